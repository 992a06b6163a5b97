"""Error of quantised weights against bits per weight: tables, frontier, a heat map by tensor, how codes are used."""

import time
from pathlib import Path

import numpy as np

from numflow.errors import NumflowError, RequestError
from numflow.quant import SCHEMES, decode, encode, find
from numflow.quant.layout import ROW_SCHEMES

from . import figures, peer

APART = ("q2+1%", "q3h+0.5%", "q4+0.5%")


def weight_error(lab, places):
    """Quantise every set of matrices with every scheme and type."""
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
    lab.heading("Error against size")
    figures.errors(lab, rows, list(sets))
    _tensors(lab, sets)
    _codes(lab, sets)


def _sets(lab, places) -> dict[str, dict[str, np.ndarray]]:
    """Matrices float32 [N, K] by name, by set."""
    sets = _drawn(lab)
    for model in filter(None, places["models"].split(",")):
        try:
            sets[Path(model).name] = _matrices(model, lab.options["rows"])
        except NumflowError as error:
            lab.text(f"`{model}` is left out: {error}")
    return sets


def _drawn(lab) -> dict[str, dict[str, np.ndarray]]:
    """Sets of drawn weights, the same in every run."""
    rng, shape = np.random.default_rng(0), (lab.options["size"] // 1024, 1024)
    draws = {"normal": rng.standard_normal(shape), "Laplace": rng.laplace(size=shape) / np.sqrt(2),
             "Student-t": rng.standard_t(4, shape) / np.sqrt(2)}
    return {label: {label: (x * 0.02).astype(np.float32)} for label, x in draws.items()}


def _matrices(model: str, most: int) -> dict[str, np.ndarray]:
    """The first rows of each matrix of a model's layers."""
    from numflow.formats import open_checkpoint
    from numflow.registry import resolve

    tensors = open_checkpoint(resolve(model)).tensors
    return {name: np.ascontiguousarray(t.f32(slice(0, most))) for name, t in tensors.items()
            if len(t.shape) == 2 and any(part.isdigit() for part in name.split("."))}


def _encoders(lab, places):
    """(family, name, x -> decoded x, columns -> bits per weight) of all compared schemes and types."""
    for name, scheme in SCHEMES.items():
        family = "numflow" if name in ROW_SCHEMES else "Inferflow"
        yield family, name, lambda x, s=scheme: decode(encode(x, s), s, x.shape[1]), scheme.bits_per_weight
    for name in APART:
        scheme = find(name)
        yield "numflow, outliers apart", name, lambda x, s=scheme: decode(
            encode(x, s), s, x.shape[1]), scheme.bits_per_weight
    library = peer.library(places["llama_cpp"])
    if library is None:
        lab.text("llama.cpp's library was not available: GGUF's types are left out of this part.")
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
    lab.text("Bits per weight are for rows of 1024 columns; a row of numflow's schemes has a header of 16 bits. A "
             "cell is empty if blocks do not divide the rows, or if the header cannot represent the values. Time is "
             "the processor time of quantising and decoding.")
    ordered = sorted(rows, key=lambda r: r["bits"]["normal"])
    lab.table(["scheme", "family", "bits", *labels, "ns per weight"],
              [[r["scheme"], r["family"], f"{r['bits']['normal']:.4f}",
                *(None if r["errors"][label] is None else f"{r['errors'][label]:.4f}" for label in labels),
                1e9 * r["seconds"] / r["weights"]] for r in ordered])


def _tensors(lab, sets):
    """Heat map of q3h's error by layer and kind of matrix, for each real model, all in the same colours."""
    models = {label: matrices for label, matrices in sets.items() if len(matrices) > 1}
    if not models:
        return
    lab.results["q3h_by_tensor"] = {
        label: {f"{layer}.{kind}": error for (layer, kind), error in _by_layer(matrices, find("q3h")).items()}
        for label, matrices in models.items()}
    lab.heading("q3h by tensor")
    figures.by_tensor(lab, lab.results["q3h_by_tensor"])


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
    """Distribution of codes in numflow's schemes, which use every level, and in Inferflow's."""
    used = lab.results["codes"] = code_shares(sets["normal"]["normal"])
    lab.heading("Distribution of codes")
    lab.table(["scheme", "levels used", "entropy, bits"], [[n, u["levels"], u["entropy"]] for n, u in used.items()])
    figures.codes(lab, used)


def code_shares(x: np.ndarray) -> dict[str, dict]:
    """Of float32 [N, K] in numflow's schemes and Inferflow's: shares of codes, their entropy, levels that are used."""
    from numflow.quant.bits import unpack_planes
    from numflow.quant.inferflow import PAIR_LEVELS
    from numflow.quant.search_kernels import search

    used = {}
    for ours, theirs in (("q3h", "q3h_b64t1"), ("q4", "q4_b64t1"), ("q6", "q6_b64t1")):
        scheme, other = find(ours), find(theirs)
        raw = encode(x, other).reshape(-1, other.size)
        codes = unpack_planes(raw[:, other.header:], other.planes, other.codes)
        if other.paired:
            codes = np.stack([codes % PAIR_LEVELS, codes // PAIR_LEVELS])
        for name, values in ((ours, search(x, scheme).codes), (theirs, codes)):
            shares = np.bincount(values.ravel(), minlength=scheme.levels) / values.size
            entropy = float(-np.sum(shares[shares > 0] * np.log2(shares[shares > 0])))
            used[name] = {"entropy": entropy, "levels": int(np.count_nonzero(shares)), "shares": shares.tolist()}
    return used


def redraw(lab) -> None:
    """The figures from results; codes of drawn weights, which older results lack, are counted again and have to have
    the entropy that the results have.

    Raises:
        RequestError: they have another one.
    """
    found = lab.results
    figures.errors(lab, found["rows"], list(found["sets"]))
    figures.by_tensor(lab, found["q3h_by_tensor"])
    used = found["codes"]
    if not all("shares" in own for own in used.values()):
        used = code_shares(_drawn(lab)["normal"]["normal"])
        if any(abs(used[name]["entropy"] - own["entropy"]) > 1e-6 for name, own in found["codes"].items()):
            raise RequestError("codes are not those of the report any more: measure its part `weights` anew")
    figures.codes(lab, used)
