"""One row of a real matrix in four schemes, and the choice of `--target-bpw` from measured sensitivities."""

from pathlib import Path

import numpy as np

from numflow.errors import NumflowError
from numflow.lab import style
from numflow.quant import decode, encode, find

from .frontier import _offered
from .outputs import _kind

SHOWN = ("q2", "q3", "q3h", "q4")
COLUMNS = 64  # of the row that are kept: two blocks
DRAWN = 32    # of these
TARGET = 3.75


def row_part(lab, places) -> None:
    """The first row of a matrix in the middle of the first model: its weights, and their values in each scheme."""
    lab.heading("One row")
    name = places["models"].split(",")[0]
    try:
        tensor, x = _middle(name)
    except NumflowError as error:
        lab.text(f"`{Path(name).name}` is left out: {error}")
        return
    found = {"model": Path(name).name, "tensor": tensor, "values": x[:COLUMNS].tolist(), "schemes": {}}
    for scheme in map(find, SHOWN):
        y = decode(encode(x[None], scheme), scheme, len(x))[0]
        found["schemes"][scheme.name] = {"bits": scheme.bits_per_weight(len(x)), "levels": scheme.levels,
                                         "values": y[:COLUMNS].tolist(),
                                         "error": float(np.sqrt(np.sum((y - x) ** 2) / np.sum(x ** 2)))}
    lab.results["row"] = found
    lab.table(["scheme", "bits", "levels", "relative rms error of the row"],
              [[key, one["bits"], one["levels"], one["error"]] for key, one in found["schemes"].items()])
    figure(lab, found)


def _middle(model: str) -> tuple[str, np.ndarray]:
    """(name, float32 [K]) of the first row of the matrix in the middle of a model's layers."""
    from numflow.formats import open_checkpoint
    from numflow.registry import resolve

    tensors = open_checkpoint(resolve(model)).tensors
    names = [name for name, t in tensors.items()
             if len(t.shape) == 2 and any(part.isdigit() for part in name.split("."))]
    chosen = names[len(names) // 2]
    return chosen, tensors[chosen].f32(slice(0, 1))[0]


def figure(lab, found) -> None:
    """Weights before and after quantisation, and the error, in four panels."""
    made, axes = style.figure(2, len(found["schemes"]), (12, 4.2))
    x = np.array(found["values"][:DRAWN])
    reach = 1.15 * np.abs(x).max()
    for axis, (name, one) in zip(axes[0], found["schemes"].items()):
        y = np.array(one["values"][:DRAWN])
        axis.plot(range(len(x)), x, "o", color=style.GREY, markersize=2.5)
        axis.step(range(len(x)), y, where="mid", color=style.SERIES[0][0], linewidth=1)
        axis.set(ylim=(-reach, reach))
        axis.set_title(f"{name}: {one['levels']} levels, {one['bits']:.2f} bits", fontsize=8.5)
        axis.set_xticklabels([])
    for axis, one in zip(axes[1], found["schemes"].values()):
        axis.fill_between(range(len(x)), np.array(one["values"][:DRAWN]) - x, step="mid", color=style.SERIES[1][0],
                          linewidth=0)
        axis.set(ylim=(-reach / 3, reach / 3), xlabel=f"column; error of the row {one['error']:.1%}")
    for axis in axes[:, 1:].flat:
        axis.set_yticklabels([])
    axes[0, 0].set_ylabel("weight")
    axes[1, 0].set_ylabel("error (enlarged)")
    first, last = (found["schemes"][name]["error"] for name in (SHOWN[0], SHOWN[-1]))
    half = found["schemes"]["q3h"]
    lab.figure(made, "row", f"{half['levels']} levels follow a row to {half['error']:.0%}; 4 miss it by {first:.0%}, "
               f"16 by {last:.0%}", found["model"], found["tensor"], part="row", wspace=0.08, hspace=0.12,
               caption="Dots: the first 32 weights of a row. Lines: their values in each scheme. Below: the "
                       "difference.")


def chosen_part(lab, places) -> None:
    """Schemes for a target size with the smallest predicted divergence, for each model with measured sensitivities."""
    from numflow import formats, network
    from numflow.engine.quantise.sensitivity import allocate, groups
    from numflow.registry import resolve

    lab.heading("The choice of schemes")
    lab.text(f"Schemes of the parts of a model at {TARGET:g} bits per weight. The divergence of each part in q3 is "
             "that of the figures above. The errors of the other schemes are measured on some rows of each matrix, "
             "without importances.")
    found = {}
    for place in filter(None, places["language_models"].split(",")):
        name = Path(place).name
        costs = lab.results.get("sensitivity", {}).get(name)
        if costs is None:
            lab.text(f"`{name}` is left out: its sensitivities were not measured.")
            continue
        checkpoint = formats.open_checkpoint(resolve(place))
        built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
        parts = [_offered(part) for part in groups(built, checkpoint)]
        left = {kind: list(values) for kind, values in costs.items()}
        schemes = allocate(parts, [left[_kind(part.modules[0])].pop(0) for part in parts], TARGET)
        table: dict[str, list[str]] = {}
        for part, scheme in zip(parts, schemes):
            table.setdefault(_kind(part.modules[0]), []).append(scheme)
        found[name] = {"target": TARGET, "schemes": table, "divergence": costs}
        lab.table(["part", *map(str, range(max(map(len, table.values()))))],
                  [[kind, *row, *[""] * (max(map(len, table.values())) - len(row))] for kind, row in table.items()])
    if found:
        lab.results["chosen"] = found
        chosen_figure(lab, found)


def chosen_figure(lab, found) -> None:
    """Divergence of each part in q3, and the scheme that it was given, one above the other for each model."""
    made, axes = style.figure(2, len(found), (5.2 * len(found), 6.2))
    axes = np.reshape(axes, (2, len(found)))
    for (above, below), (name, one) in zip(axes.T, found.items()):
        kinds = list(one["schemes"])
        depth = max(map(len, one["schemes"].values()))
        costs = np.array([_wide(one["divergence"][kind], depth) for kind in kinds])
        bits = np.array([_wide(map(_bits, one["schemes"][kind]), depth) for kind in kinds])
        above.imshow(np.log10(np.maximum(costs, 1e-9)), aspect="auto", cmap="Blues", vmin=-4, vmax=0)
        below.imshow(bits, aspect="auto", cmap="Oranges", vmin=1, vmax=9)
        for row, kind in enumerate(kinds):
            for column, scheme in enumerate(one["schemes"][kind]):
                below.text(column, row, scheme, ha="center", va="center", fontsize=8)
                above.text(column, row, f"{costs[row, column]:.3f}", ha="center", va="center", fontsize=8,
                           color="white" if costs[row, column] > 0.03 else "black")
        for axis in (above, below):
            axis.set(xticks=range(depth), yticks=range(len(kinds)), yticklabels=kinds)
            axis.grid(visible=False)
        above.set_xlabel(f"{name}: divergence when only these are q3")
        below.set_xlabel(f"part of the depth: what {one['target']:g} bits per weight become")
    spans = []
    for name, one in found.items():
        schemes = sorted({scheme for row in one["schemes"].values() for scheme in row}, key=_bits)
        spans.append(f"parts of {name} get {schemes[0]} to {schemes[-1]}")
    lab.figure(made, "chosen", f"At {TARGET:g} bits a weight {', '.join(spans)}", part="chosen", left=1.2, wspace=0.35,
               hspace=0.25,
               caption="Above: the divergence caused by each part in q3. Below: its scheme, chosen by --target-bpw.")


def _wide(values, depth: int) -> list[float]:
    """A row of a table, padded with NaN to `depth` values."""
    found = list(values)
    return found + [np.nan] * (depth - len(found))


def _bits(scheme: str) -> float:
    """Bits of a code; unquantised tensors count as 8."""
    return {"q3h": 3.5}.get(scheme) or (float(scheme[1:]) if scheme[1:].isdigit() else 8.0)
