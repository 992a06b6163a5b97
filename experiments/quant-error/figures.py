"""Figures of the weights' errors, from results alone."""

import numpy as np

from numflow.lab import style

from . import drawing

FAMILIES = ("numflow", "numflow, outliers apart", "Inferflow", "GGUF")


def errors(lab, rows, labels) -> None:
    """Error against bits, one panel per set: the error itself, and the error times 2^bits, which separates schemes of
    all sizes."""
    by = {row["scheme"]: row["errors"][labels[0]] for row in rows}
    three, half, four = (by[name] for name in ("q3", "q3h", "q4"))
    halves = f"Half a bit more takes {1 - half / three:.0%} off the error of 3 bits, another half {1 - four / half:.0%}"
    best = min((row for row in rows if row["errors"][labels[0]]),
               key=lambda row: row["errors"][labels[0]] * 2 ** row["bits"][labels[0]])
    level = f"Per bit {best['scheme']} is best: its error times 2^bits is " \
            f"{best['errors'][labels[0]] * 2 ** best['bits'][labels[0]]:.2f}"
    for name, flat, finding, caption in (
            ("error_against_bits", False, halves, "Left and below is better; numflow's schemes are joined"),
            ("error_times_levels", True, level, "The same, times 2^bits: half the error for a bit more is a level "
                                                "line. What a file's own type holds exactly is below the picture")):
        height = -(-len(labels) // 3)
        made, axes = style.figure(height, 3, (12, 3.9 * height + 0.8))
        axes = np.ravel(axes)
        shown = [_panel(axis, rows, label, flat) for axis, label in zip(axes, labels)]
        for axis in axes[len(labels):]:
            axis.set_visible(False)
        for axis in axes[::3]:
            axis.set_ylabel("rms error / rms weight" + " × 2^bits" * flat + " (logarithmic)")
        axes[0].legend(loc="upper right", fontsize=8)
        style.layout(made, wspace=0.18, hspace=0.28)
        for axis, found in zip(axes, shown):
            drawing.names(axis, found)
        lab.figure(made, name, finding, f"{labels[0]} weights", part="weights", wspace=0.18, hspace=0.28,
                   caption=caption)


def _panel(axis, rows, label, flat) -> list[tuple[float, float, str, str]]:
    """Draw one set's points; returns (bits, error, name, family) of the points in the picture."""
    low, high = (1, 6) if flat else (2e-3, 0.6)
    shown = []
    for family in FAMILIES:
        points = sorted((r["bits"][label], r["errors"][label] * (2 ** r["bits"][label] if flat else 1), r["scheme"])
                        for r in rows if r["family"] == family and r["errors"][label])
        if points:
            bits, values, _ = zip(*points)
            drawing.points(axis, family, bits, values, line=family == "numflow")
            shown += [(x, y, name, family) for x, y, name in points if low < y < high]
    ticks = (1, 2, 3, 4, 6) if flat else (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    style.plain_log(axis, "y", ticks)
    axis.set(xlabel=f"bits per weight, {label}", xlim=(2, 9.4), ylim=(low, high))
    return shown


def by_tensor(lab, models) -> None:
    """q3h's error by layer and kind of matrix, for each model, all in the same colours. models: "layer.kind" -> error,
    by model."""
    made, axes = style.figure(len(models), 1, (9, 2.2 * len(models) + 1))
    everything = [error for found in models.values() for error in found.values()]
    limits = {"vmin": np.quantile(everything, 0.01), "vmax": np.quantile(everything, 0.99)}
    axes = np.ravel(axes)
    for axis, (label, found) in zip(axes, models.items()):
        cells = {tuple(name.split(".", 1)): error for name, error in found.items()}
        kinds = list(dict.fromkeys(kind for _, kind in cells))
        layers = sorted({int(layer) for layer, _ in cells})
        image = axis.imshow([[cells.get((str(layer), kind), np.nan) for layer in layers] for kind in kinds],
                            aspect="auto", cmap="viridis", **limits)
        axis.set(xlabel=f"layer of {label}", yticks=range(len(kinds)))
        axis.set_yticklabels(kinds, fontsize=7)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(visible=False)
    label, name, worst = max(((label, name, error) for label, found in models.items() for name, error in found.items()),
                             key=lambda row: row[2])
    margins = {"left": 1.7, "right": 1.1, "hspace": 0.35}
    style.layout(made, **margins)
    made.colorbar(image, ax=list(axes), label="rms error / rms weight", extend="both",
                  cax=made.add_axes((1 - 0.9 / 9, 0.2, 0.15 / 9, 0.55)))
    middle = float(np.median(everything))
    lab.figure(made, "error_by_tensor", f"Tensors hardly differ in q3h: the median error is {middle:.3f}, the worst "
               f"{worst:.3f}", f"{name} of {label}", part="weights", **margins,
               caption="Relative rms error of q3h in each matrix; the same colours for all models")


def codes(lab, used) -> None:
    """Shares of each code; used: for each scheme its "entropy" and "shares"."""
    made, axes = style.figure(1, 3, (10.4, 3.6))
    for axis, (ours, theirs) in zip(axes, (("q3h", "q3h_b64t1"), ("q4", "q4_b64t1"), ("q6", "q6_b64t1"))):
        for number, name in ((0, ours), (1, theirs)):
            shares = used[name]["shares"]
            axis.stairs(shares, np.arange(len(shares) + 1) - 0.5, fill=not number, alpha=1 if number else 0.45,
                        linewidth=1.5, color=style.SERIES[number][0],
                        label=f"{name}: {used[name]['entropy']:.2f} bits of entropy")
        levels = len(used[ours]["shares"])
        axis.axhline(1 / levels, color=style.GREY, linewidth=0.8, linestyle=":")
        axis.set(xlabel=f"code, of {levels}", ylim=(0, 2.9 / levels))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(loc="upper right", fontsize=7.5)
    axes[0].set_ylabel("share of weights")
    ours, theirs = used["q3h"]["entropy"], used["q3h_b64t1"]["entropy"]
    lab.figure(made, "codes", f"The 11 levels of q3h carry {ours:.2f} bits each, Inferflow's {theirs:.2f}",
               "normal weights", part="weights",
               caption="Share of each code, on normal weights; dotted line: equal shares")
