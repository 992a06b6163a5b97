"""Figures of the report, from results alone."""

from collections.abc import Mapping, Sequence

import numpy as np

from numflow.lab import style

WORK, EXCHANGE, WAIT = style.SERIES[0][0], style.SERIES[1][0], "#DDDDDD"


def strategies(lab, rows: Sequence[Mapping], names: Sequence[str]) -> None:
    """Speed of one query and throughput under load, for both engines and each cut."""
    made, axes = style.figure(1, 2, (9.6, 3.8))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    by = {(row["engine"], row["strategy"]): row for row in rows}
    for axis, key, label in ((axes[0], "speed", "one query, tokens/s"),
                             (axes[1], "throughput", f"{lab.options['at_once']} queries, prompts counted, tokens/s")):
        for i, engine in enumerate(engines):
            for j, name in enumerate(names):
                value = by[engine, name][key]
                axis.bar(i * 4 + j, value, color=style.SERIES[j][0])
                axis.text(i * 4 + j, value, f"{value:.0f}", ha="center", va="bottom", fontsize=8)
                axis.text(i * 4 + j, 0, f" {name}", ha="center", va="bottom", rotation=90, fontsize=8,
                          color="black" if j == 2 else "white")
        axis.set_xticks([1, 5], engines)
        axis.set_xlabel("who executes the plan")
        axis.set_ylabel(label)
        axis.margins(y=0.12)
        axis.grid(axis="x", visible=False)
    own = {name: by[engines[-1], name] for name in names}
    fastest, most = (max(own, key=lambda name: own[name][key]) for key in ("speed", "throughput"))
    lab.figure(made, "strategies", f"Executed {engines[-1].removeprefix('as ').removesuffix(' executes')}'s way, "
               f"{fastest} is fastest at 1 query, {most} carries most", "simulated", lab.results["cluster"],
               caption="Simulated: decoding speed of one query, and throughput under load with its prompts")


def timeline(lab, found: Mapping[str, Mapping], devices: Mapping[str, str]) -> None:
    """Shares of each device's time, and one layer enlarged."""
    made, axes = style.figure(len(found), 2, (9.6, 5.4))
    colours = {"work": WORK, "exchange": EXCHANGE, "wait": WAIT}
    for (left, right), (name, one) in zip(axes, found.items(), strict=True):
        places = list(one["shares"])
        for row, place in enumerate(places):
            begin = 0.0
            for what, colour in colours.items():
                share = 100 * one["shares"][place][what]
                left.barh(row, share, 0.8, left=begin, color=colour)
                begin += share
            for what, colour in colours.items():
                spans = [(start, end - start) for device, kind, start, end in one["spans"]
                         if (device, kind) == (place, what)]
                right.broken_barh(spans, (row - 0.4, 0.8), color=colour, linewidth=0)
        for axis in (left, right):
            axis.set(yticks=range(len(places)), yticklabels=places, ylim=(len(places) - 0.5, -0.5))
            axis.grid(visible=False)
        left.set(ylabel=f"{name}\n{devices[name]}", xlim=(0, 100))
        right.set_xlim(*one["window"])
    axes[-1][0].set_xlabel("% of the time of three steps of eight queries")
    axes[-1][1].set_xlabel("one layer enlarged, ms: blue works, red exchanges, grey waits")
    lost = {name: np.mean([share["exchange"] for share in one["shares"].values()]) for name, one in found.items()}
    ordered = sorted(lost, key=lost.get)
    lab.figure(made, "timeline", "Exchanges take " + ", ".join(f"{lost[name]:.0%} of the time {name}" if at == 0 else
                                                               f"{lost[name]:.0%} {_cut(name)}"
                                                               for at, name in enumerate(reversed(ordered))),
               "simulated", lab.results["cluster"], hspace=0.3, wspace=0.15,
               caption="Activity of each device (numflow's execution, simulated): shares of time, and one layer")


def _cut(name: str) -> str:
    return f"in the {name}" if name == "hybrid" else name


def sweeps(lab, points: Mapping[str, Mapping[str, Sequence]]) -> None:
    """Decoding rate by one changing quantity, in one panel each."""
    made, axes = style.figure(2, 2, (9.6, 7))
    for axis, (what, lines) in zip(axes.flat, points.items(), strict=True):
        for number, (name, line) in enumerate(lines.items()):
            xs, ys = zip(*line, strict=True)
            axis.plot(xs, ys, **style.series(number))
            style.end(axis, name, xs, ys, number)
        ticks = sorted({point[0] for line in lines.values() for point in line})
        style.plain_log(axis, "x", ticks[::2] if len(ticks) > 8 else ticks)
        axis.set_xlim(ticks[0] * 0.9, ticks[-1] * (ticks[-1] / ticks[0]) ** 0.3)
        axis.set(xlabel=what, ylabel="tokens/s", ylim=(0, None))
    style.plain_log(axes.flat[0], "y", (30, 100, 300, 1000))
    axes.flat[0].set_ylim(20, 4000)
    queries = points["queries at the same time"]
    pairs = zip(queries["hybrid"], queries["by tensor"])
    overtaken = next((n for (n, both), (_, tensor) in pairs if both > tensor), None)
    lab.figure(made, "sweeps", f"Hybrid overtakes the cut by tensor at {overtaken} queries" if overtaken else
               f"Hybrid does not overtake the cut by tensor up to {queries['hybrid'][-1][0]} queries", "simulated",
               lab.results["cluster"], caption="Simulated: decoding rate of all queries together, prompts not counted")


def virtual(lab, rows: Sequence[Mapping]) -> None:
    """Measured and predicted rates on virtual devices of this machine."""
    counts = sorted({row["queries"] for row in rows})
    made, axes = style.figure(1, len(counts), (9.6, 4.2))
    for axis, queries in zip(np.ravel(axes), counts, strict=True):
        chosen = [row for row in rows if row["queries"] == queries]
        at = np.arange(len(chosen))
        for shift, key, least, most, number in ((-0.2, "measured", "least", "most", 0),
                                                (0.2, "predicted", "predicted_least", "predicted_most", 2)):
            rate = np.array([row[key] for row in chosen])
            spread = [np.maximum(0, rate - [row[least] for row in chosen]),
                      np.maximum(0, [row[most] for row in chosen] - rate)]
            axis.bar(at + shift, rate, 0.4, yerr=spread, capsize=2, color=style.SERIES[number][0], label=key)
        for x, row in zip(at, chosen, strict=True):
            axis.annotate(f"{row['off']:+.0%}", (x + 0.2, max(row["predicted"], row["predicted_most"])), fontsize=7,
                          ha="center", xytext=(0, 2), textcoords="offset points")
        axis.set_xticks(at, [f"{_folded(row['strategy'])}\n{row['devices']}" for row in chosen], fontsize=7)
        axis.set(xlabel="one query" if queries == 1 else f"{queries} queries", ylabel="tokens/s")
        axis.margins(y=0.2)
        axis.grid(axis="x", visible=False)
    np.ravel(axes)[0].legend(loc="upper right", ncol=2, fontsize=8)
    near = sum(row["least"] <= row["predicted"] <= row["most"] for row in rows)
    lab.figure(made, "virtual", f"{near} of {len(rows)} predictions lie within what was measured",
               str(lab.results["model"]), part="virtual devices", bottom=0.8,
               caption="Measured, and predicted: virtual devices of this machine")


def _folded(name: str) -> str:
    return name.replace(" by ", "\nby ")
