"""Error of quantised weights against bits per weight: tables, frontier, a heat map by tensor, how codes are used."""

import time
from pathlib import Path

import numpy as np

from numflow.errors import NumflowError
from numflow.quant import SCHEMES, decode, encode, find
from numflow.quant.layout import ROW_SCHEMES

from . import drawing, peer

APART = ("q2+1%", "q3h+0.5%", "q4+0.5%")


def weight_error(lab, places):
    """Quantises every set of matrices with everything there is."""
    sets = _sets(lab, places)
    rows = []
    for family, name, encoder, bits in _encoders(lab, places):
        lab.say(name)
        encoder(sets["normal"]["normal"][:1])  # compiles
        begin = time.process_time()  # of all threads: others may use this machine too
        errors = {label: _error(matrices, encoder) for label, matrices in sets.items()}
        seconds = time.process_time() - begin
        weights = sum(x.size for matrices in sets.values() for x in matrices.values())
        rows.append({"family": family, "scheme": name, "errors": errors, "seconds": seconds, "weights": weights,
                     "bits": {label: _mean_bits(matrices, bits) for label, matrices in sets.items()}})
    lab.results |= {"rows": rows, "sets": {label: len(matrices) for label, matrices in sets.items()}}
    _table(lab, rows, list(sets))
    _frontier(lab, rows, list(sets))
    _tensors(lab, sets)
    _codes(lab, sets)


def _sets(lab, places) -> dict[str, dict[str, np.ndarray]]:
    """Matrices float32 [N, K] by name, by set."""
    rng, shape = np.random.default_rng(0), (lab.options["size"] // 1024, 1024)
    draws = {"normal": rng.standard_normal(shape), "Laplace": rng.laplace(size=shape) / np.sqrt(2),
             "Student-t": rng.standard_t(4, shape) / np.sqrt(2)}
    sets = {label: {label: (x * 0.02).astype(np.float32)} for label, x in draws.items()}
    for model in filter(None, places["models"].split(",")):
        try:
            sets[Path(model).name] = _matrices(model, lab.options["rows"])
        except NumflowError as error:
            lab.text(f"`{model}` is left out: {error}")
    return sets


def _matrices(model: str, most: int) -> dict[str, np.ndarray]:
    """The first rows of each matrix of a model's layers."""
    from numflow.formats import open_checkpoint
    from numflow.registry import resolve

    tensors = open_checkpoint(resolve(model)).tensors
    return {name: np.ascontiguousarray(t.f32(slice(0, most))) for name, t in tensors.items()
            if len(t.shape) == 2 and any(part.isdigit() for part in name.split("."))}


def _encoders(lab, places):
    """(family, name, x -> decoded x, columns -> bits per weight) of everything that is compared."""
    for name, scheme in SCHEMES.items():
        family = "numflow" if name in ROW_SCHEMES else "Inferflow"
        yield family, name, lambda x, s=scheme: decode(encode(x, s), s, x.shape[1]), scheme.bits_per_weight
    for name in APART:
        scheme = find(name)
        yield "numflow, outliers apart", name, lambda x, s=scheme: decode(
            encode(x, s), s, x.shape[1]), scheme.bits_per_weight
    library = peer.library(places["llama_cpp"])
    if library is None:
        lab.text("llama.cpp's library was not at hand: GGUF's types are left out of this part.")
        return
    for name, bits in peer.TYPES.items():
        yield "GGUF", name, lambda x, n=name: peer.roundtrip(library, x, n), lambda columns, b=bits: b


def _relative(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    return float(np.sum((x - y) ** 2.0, dtype=np.float64)), float(np.sum(x ** 2.0, dtype=np.float64))


def _error(matrices, encoder) -> float | None:
    """Relative rms error over all matrices; None where the scheme cannot hold one of them."""
    try:
        error, whole = np.sum([_relative(x, encoder(x)) for x in matrices.values()], axis=0)
    except NumflowError:
        return None
    return float(np.sqrt(error / whole))


def _mean_bits(matrices, bits) -> float | None:
    try:
        return sum(bits(x.shape[1]) * x.size for x in matrices.values()) / sum(x.size for x in matrices.values())
    except NumflowError:
        return None


def _table(lab, rows, labels):
    lab.heading("Relative rms error")
    lab.text("Bits per weight are those of 1024 columns; a row of numflow's schemes has a header of 16 bits. An empty "
             "cell: blocks do not divide the rows, or the header cannot hold the numbers. Time is processor time of "
             "quantising and decoding.")
    ordered = sorted(rows, key=lambda r: r["bits"]["normal"])
    lab.table(["scheme", "family", "bits", *labels, "ns per weight"],
              [[r["scheme"], r["family"], f"{r['bits']['normal']:.4f}",
                *(None if r["errors"][label] is None else f"{r['errors'][label]:.4f}" for label in labels),
                1e9 * r["seconds"] / r["weights"]] for r in ordered])


def _frontier(lab, rows, labels):
    """Error against bits, one panel per set: as it is, and times 2^bits, which tells schemes apart at all sizes."""
    lab.heading("Error against size")
    for name, flat, caption in (
            ("error_against_bits", False, "Left and below is better; numflow's schemes are joined by a line"),
            ("error_times_levels", True, "The same, times 2^bits: half the error for a bit more is a level line. What "
                                         "a file's own type holds exactly is below the picture")):
        plt = lab.pyplot()
        height = -(-len(labels) // 3)
        figure, axes = plt.subplots(height, 3, squeeze=False, sharex=True, sharey=True, figsize=(15, 5 * height),
                                    layout="constrained")
        shown = [_panel(axis, rows, label, flat) for axis, label in zip(axes.flat, labels)]
        for axis in axes.flat[len(labels):]:
            axis.set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel("rms error / rms weight" + " × 2^bits" * flat)
        axes.flat[0].legend(loc="upper right")
        for axis, found in zip(axes.flat, shown):
            drawing.names(axis, found)
        lab.figure(figure, name, caption)
        plt.close(figure)


def _panel(axis, rows, label, flat) -> list[tuple[float, float, str, str]]:
    """Draw one set's points; returns (bits, error, name, family) of those that are in the picture."""
    low, high = (1, 6) if flat else (2e-3, 0.6)
    shown = []
    for family in ("numflow", "numflow, outliers apart", "Inferflow", "GGUF"):
        points = sorted((r["bits"][label], r["errors"][label] * (2 ** r["bits"][label] if flat else 1), r["scheme"])
                        for r in rows if r["family"] == family and r["errors"][label])
        if points:
            bits, errors, _ = zip(*points)
            drawing.points(axis, family, bits, errors, line=family == "numflow")
            shown += [(x, y, name, family) for x, y, name in points if low < y < high]
    axis.set(title=label, xlabel="bits per weight", yscale="log", xlim=(2, 9.4), ylim=(low, high))
    axis.grid(alpha=0.3, which="both" if flat else "major")
    return shown


def _tensors(lab, sets):
    """Heat map of q3h's error by layer and kind of matrix, for each real model, all in the same colours."""
    plt, scheme = lab.pyplot(), find("q3h")
    models = {label: matrices for label, matrices in sets.items() if len(matrices) > 1}
    if not models:
        return
    figure, axes = plt.subplots(len(models), 1, squeeze=False, figsize=(9, 2.3 * len(models)), layout="constrained")
    tables = {label: _by_layer(matrices, scheme) for label, matrices in models.items()}
    everything = [error for errors in tables.values() for error in errors.values()]
    limits = {"vmin": np.quantile(everything, 0.01), "vmax": np.quantile(everything, 0.99)}
    for axis, (label, errors) in zip(axes.flat, tables.items()):
        kinds, layers = list(dict.fromkeys(kind for _, kind in errors)), sorted({layer for layer, _ in errors})
        image = axis.imshow([[errors.get((layer, kind), np.nan) for layer in layers] for kind in kinds], aspect="auto",
                            cmap="viridis", **limits)
        axis.set(title=label, xlabel="layer", yticks=range(len(kinds)))
        axis.set_yticklabels(kinds, fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        lab.results.setdefault("q3h_by_tensor", {})[label] = {f"{a}.{b}": e for (a, b), e in errors.items()}
    figure.colorbar(image, ax=axes, label="rms error / rms weight", extend="both")
    lab.heading("q3h by tensor")
    lab.figure(figure, "error_by_tensor", "Relative rms error of q3h in each matrix; the same colours for all models")
    plt.close(figure)


def _by_layer(matrices, scheme) -> dict[tuple[int, str], float]:
    """(layer, kind of matrix) -> relative rms error."""
    errors = {}
    for name, x in matrices.items():
        parts = name.split(".")
        at = next(i for i, part in enumerate(parts) if part.isdigit())
        kind = ".".join(parts[at + 1:]).removesuffix(".weight")
        error, whole = _relative(x, decode(encode(x, scheme), scheme, x.shape[1]))
        errors[int(parts[at]), kind] = (error / whole) ** 0.5
    return errors


def _codes(lab, sets):
    """How often each code is used: ours, where every level is, and the original's."""
    from numflow.quant.bits import unpack_planes
    from numflow.quant.inferflow import PAIR_LEVELS
    from numflow.quant.search_kernels import search

    plt, x = lab.pyplot(), sets["normal"]["normal"]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    used = {}
    for axis, (ours, theirs) in zip(axes, (("q3h", "q3h_b64t1"), ("q4", "q4_b64t1"), ("q6", "q6_b64t1"))):
        scheme, other = find(ours), find(theirs)
        raw = encode(x, other).reshape(-1, other.size)
        codes = unpack_planes(raw[:, other.header:], other.planes, other.codes)
        if other.paired:
            codes = np.stack([codes % PAIR_LEVELS, codes // PAIR_LEVELS])
        for name, values in ((ours, search(x, scheme).codes), (theirs, codes)):
            shares = np.bincount(values.ravel(), minlength=scheme.levels) / values.size
            entropy = float(-np.sum(shares[shares > 0] * np.log2(shares[shares > 0])))
            used[name] = {"entropy": entropy, "levels": int(np.count_nonzero(shares))}
            family = "numflow" if name == ours else "Inferflow"
            axis.stairs(shares, np.arange(len(shares) + 1) - 0.5, fill=name == ours, alpha=0.45 if name == ours else 1,
                        linewidth=1.5, color=drawing.STYLES[family][0], label=f"{name}: {entropy:.2f} bits of entropy")
        axis.axhline(1 / scheme.levels, color="gray", linewidth=0.8, linestyle=":")
        axis.set(xlabel="code", title=f"{scheme.levels} levels", ylim=(0, 2.7 / scheme.levels))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(loc="upper right", fontsize=8)
    axes[0].set_ylabel("share of weights")
    lab.results["codes"] = used
    lab.heading("Distribution of codes")
    lab.table(["scheme", "levels used", "entropy, bits"], [[n, u["levels"], u["entropy"]] for n, u in used.items()])
    lab.figure(figure, "codes", "Share of each code, on normal weights; a dotted line where all were used alike")
    plt.close(figure)
