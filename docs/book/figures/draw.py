"""Figures of the book, drawn from what the reports have measured (reports/*/results.json), or from a formula.

    python docs/book/figures/draw.py        all of them, as SVG and PNG beside this file

A title is a sentence that is computed from the numbers below it.
"""

import json
import math
from pathlib import Path

from numflow.lab import style

HERE = Path(__file__).parent
REPORTS = HERE.parents[2] / "reports"


def results(name: str, part: str = "") -> tuple[dict, dict]:
    """Results of a report, and its recipe or that of a part."""
    found = json.loads((REPORTS / name / "results.json").read_text(encoding="utf-8"))
    return found["results"], found.get("parts", {}).get(part, found["recipe"])


def why_eleven():
    """Share of the bits of a pair of codes that carry something, by the number of levels."""
    levels = range(2, 17)
    bits = {n: math.ceil(2 * math.log2(n)) for n in levels}
    used = {n: 2 * math.log2(n) / bits[n] for n in levels}
    odd = [n for n in levels if bits[n] % 2]
    best = max(odd, key=used.get)
    made, axis = style.figure()
    axis.bar([str(n) for n in levels], [100 * used[n] for n in levels],
             color=[style.SERIES[1][0] if n == best else style.SERIES[0][0] for n in levels])
    for at, n in enumerate(levels):
        axis.text(at, 100 * used[n] + 1, f"{bits[n]}", ha="center", fontsize=8)
    axis.set_xlabel("levels of a code (above each bar: whole bits that a pair of codes takes)")
    axis.set_ylabel("bits that carry something, %")
    axis.set_ylim(0, 112)
    style.title(made, f"{best} levels fill {100 * used[best]:.1f} % of {bits[best]} bits: no odd number is used better",
                "computed: 2 log2(levels) of the bits of a pair; powers of two fill theirs, with a whole bit more")
    return made


def error_against_bits():
    """Relative error of random normal weights against bits per weight."""
    found, recipe = results("quant-error", "weights")
    rows = {row["scheme"]: (row["bits"]["normal"], row["errors"]["normal"], row["family"]) for row in found["rows"]}
    ours = ["q2", "q3", "q3h", "q4", "q5", "q6", "q8"]
    theirs = sorted((n for n, row in rows.items() if row[2] == "Inferflow"), key=lambda n: rows[n][0])
    gguf = sorted((n for n, row in rows.items() if row[2] == "GGUF"), key=lambda n: rows[n][0])
    made, axis = style.figure()
    for number, (label, names) in enumerate((("numflow", ours), ("Inferflow's", theirs), ("GGUF", gguf))):
        look = style.series(number) | ({} if number == 0 else {"linestyle": "none"})
        axis.plot([rows[n][0] for n in names], [rows[n][1] for n in names], label=label, **look)
    for n in ("q2", "q3", "q3h", "q4", "q5", "q6"):
        axis.annotate(n, rows[n][:2], xytext=(-6, -9), textcoords="offset points", fontsize=8.5, ha="right",
                      color=style.SERIES[0][0])
    steps = [rows[n] for n in ("q3_b32t1b", "q3h_b64t1", "q4_b32t1a")]
    axis.plot([step[0] for step in steps], [step[1] for step in steps], color=style.SERIES[1][0], linewidth=1)
    for at, label in enumerate(("Q3", "Q3H", "Q4")):
        saved = f", {steps[at][1] / steps[at - 1][1] - 1:.0%}" if at else ""
        axis.annotate(label + saved, steps[at][:2], xytext=(6, 8) if at else (-4, 9), textcoords="offset points",
                      fontsize=8.5, ha="left" if at else "right", color=style.SERIES[1][0])
    style.plain_log(axis, "y", (0.003, 0.01, 0.03, 0.1, 0.3))
    axis.set_xlabel("bits per weight (joined: Inferflow's 3, 3.5 and 4 bits)")
    axis.set_ylabel("relative rms error (logarithmic)")
    axis.legend(fontsize=8)
    three, half, four = (rows[n][1] for n in ("q3", "q3h", "q4"))
    style.title(made, f"Half a bit more takes {1 - half / three:.0%} off the error of 3 bits, another half "
                      f"{1 - four / half:.0%}", style.source(recipe, "normal random weights"))
    return made


def divergence_against_bits():
    """KL divergence from the float model against bits per weight."""
    found, recipe = results("quant-error", "frontier")
    rows = found["frontier"]["smollm2-135m-instruct"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    made, axis = style.figure()
    for number, family in enumerate(families):
        own = sorted((row["bits"], row["kl"]["mean"]) for row in rows if row["family"] == family and row["bits"] < 7)
        if own:
            axis.plot([b for b, _ in own], [k for _, k in own], label=family, **style.series(number))
    axis.set_yscale("log")
    axis.set_xlabel("bits per weight of the quantised matrices")
    axis.set_ylabel("mean KL divergence, nats a token (logarithmic)")
    axis.legend(fontsize=8)
    enough = min((row for row in rows if row["same_top"] >= 0.9), key=lambda row: row["bits"])
    style.title(made, f"From {enough['bits']:.1f} bits on the first choice is the same 9 times of 10",
                style.source(recipe, "SmolLM2 135M, 20 chunks of 512 tokens"))
    return made


def speed_and_throughput():
    """Speed of one query against throughput of all, a curve for each cut."""
    found, recipe = results("partition")
    sweep = found["sweeps"]["queries at the same time"]
    made, axis = style.figure()
    for number, (cut, points) in enumerate(sweep.items()):
        axis.plot([y for _, y in points], [y / n for n, y in points], **style.series(number))
        n, y = points[0]
        style.name(axis, f"{cut}, 1 query", y, y / n, number, (0, 9))
        n, y = points[-1]
        axis.annotate(f"{n}", (y, y / n), xytext=(7, 3 - 8 * (number == 1)), textcoords="offset points", fontsize=8,
                      color=style.SERIES[number][0])
    overtaken = next(n for (n, hybrid), (_, tensor) in zip(sweep["hybrid"], sweep["by tensor"]) if hybrid > tensor)
    style.plain_log(axis, "x", (25, 50, 100, 200, 500, 1000, 2500))
    style.plain_log(axis, "y", (10, 20, 50, 100))
    axis.set_xlim(22, 4000)
    axis.set_xlabel("throughput of all queries, tokens/s (numbers at the ends: queries at a time)")
    axis.set_ylabel("speed of each query, tokens/s")
    style.title(made, f"Hybrid overtakes the cut by tensor at {overtaken} queries",
                style.source(recipe, "simulated", found["cluster"], "13B, 16-bit weights"))
    return made


def latency_against_load():
    """Time to the first token against load, for three ways to batch."""
    found, recipe = results("batching")
    rows = found["serving"]
    made, axis = style.figure()
    ways = list(dict.fromkeys(row["batching"] for row in rows))
    for number, way in enumerate(ways):
        own = [row for row in rows if row["batching"] == way]
        xs = [row["load"] for row in own]
        axis.plot(xs, [1000 * row["first_s"] for row in own], **style.series(number))
        spans = [[1000 * sample["first_s"] for sample in row["samples"]] for row in own]
        axis.fill_between(xs, [min(s) for s in spans], [max(s) for s in spans], alpha=0.15,
                          color=style.SERIES[number][0], linewidth=0)
        style.name(axis, way, xs[-1], 1000 * own[-1]["first_s"], number, (7, 0))
    axis.set_yscale("log")
    axis.set_xlim(0.25, 1.08)
    axis.set_xlabel("load, as a share of what one by one would bear")
    axis.set_ylabel("time to the first token, ms (logarithmic)")
    most = max(row["load"] for row in rows)
    dynamic, static = (next(row["first_s"] for row in rows if row["batching"] == way and row["load"] == most)
                       for way in ("dynamic", "static"))
    style.title(made, f"At load {most:g} continuous batching answers {static / dynamic:.1f} times sooner than static",
                style.source(recipe, "SmolLM2 135M Q4_1", f"{found['threads']} threads", "bands: all rounds"))
    return made


def roofline():
    """Operations of a decoding step and of a prompt against the two limits of the machine."""
    found, recipe = results("cpu-speed")
    limit = found["limits"]["1"]
    made, axis = style.figure()
    ridge = limit["int8_gop_s"] / limit["read_gb_s"]
    xs = [0.1, ridge, 2000]
    axis.plot(xs, [min(x * limit["read_gb_s"], limit["int8_gop_s"]) for x in xs], color="#555555", linewidth=1.5)
    shares = []
    for number, (phase, label) in enumerate((("decode", "one token"), ("prefill", "a prompt"))):
        rows = [row for row in found["profiles"]["1b q3h, 1 thread"][phase]
                if row["at_limit"] is not None and row["op"].startswith("linear")]
        look = style.series(number) | {"linestyle": "none"}
        axis.plot([row["gop_s"] / row["gb_s"] for row in rows], [row["gop_s"] for row in rows], **look)
        row = (min, max)[number](rows, key=lambda row: row["gop_s"])
        style.name(axis, f"products of {label}", row["gop_s"] / row["gb_s"], row["gop_s"], number, (-4, -22))
        shares.append(sum(row["at_limit"] * row["microseconds"] for row in rows) / sum(r["microseconds"] for r in rows))
    style.plain_log(axis, "x", (0.1, 1, 10, 100, 1000))
    style.plain_log(axis, "y", (1, 10, 100, 1000))
    axis.set_xlabel("operations for each byte that must move")
    axis.set_ylabel("10⁹ operations a second")
    axis.annotate(f"memory: {limit['read_gb_s']:.0f} GB/s", (0.35, 0.35 * limit["read_gb_s"]), xytext=(-8, 8),
                  textcoords="offset points", fontsize=8, color="#555555", ha="right")
    axis.annotate(f"int8 products: {limit['int8_gop_s']:.0f}", (60, limit["int8_gop_s"]), xytext=(0, 6),
                  textcoords="offset points", fontsize=8, color="#555555")
    style.title(made, f"One token reads at {shares[0]:.0%} of the memory's speed, a prompt computes at "
                      f"{shares[1]:.0%}", style.source(recipe, "random 1B model in q3h", "1 thread"))
    return made


def kernel_ladder():
    """Speed of a product, step by step from plain loops to tiles of bytes."""
    found, recipe = results("kernel-steps")
    rows, limit = found["rows"], found["limits"]["int8_gop_s"]
    rows = sorted(rows, key=lambda row: row[1])
    made, axis = style.figure(size=(7.2, 3.8))
    axis.barh([row[0] for row in rows], [row[1] for row in rows], color=style.SERIES[0][0])
    for at, row in enumerate(rows):
        axis.text(row[1] + 5, at, f"{row[1]:.3g}", va="center", fontsize=8)
    axis.axvline(limit, color=style.SERIES[1][0], linestyle="--", linewidth=1)
    axis.text(limit - 5, -0.1, f"limit {limit:.0f}", color=style.SERIES[1][0], fontsize=8, ha="right", va="center")
    axis.set_xlabel("10⁹ operations a second, a prompt of many tokens")
    axis.grid(axis="y", visible=False)
    style.title(made, f"From plain loops to tiles of bytes: {rows[-1][1] / rows[0][1]:.0f} times as fast",
                style.source(recipe, "Q4_0", "1 thread"))
    made.subplots_adjust(left=0.44)
    return made


def speculation():
    """Speed-up of speculative decoding against the share of drafts that are right."""
    found, recipe = results("speculative", "guesses")
    rows = sorted(found["oracle"], key=lambda row: row["accuracy"])
    made, axis = style.figure()
    axis.errorbar([100 * row["accuracy"] for row in rows], [row["speedup"] for row in rows],
                  [[row["speedup"] - row["low"] for row in rows], [row["high"] - row["speedup"] for row in rows]],
                  capsize=3, **style.series(0))
    style.name(axis, "measured, drafts that cost nothing", 100 * rows[2]["accuracy"], rows[2]["speedup"], 0, (-2, 30))
    k = 4
    xs = [x / 100 for x in range(100)]
    axis.plot([100 * a for a in xs], [(1 - a ** (k + 1)) / (1 - a) for a in xs], color=style.SERIES[1][0],
              linestyle="--", linewidth=1.2)
    style.name(axis, f"tokens a step, {k} drafts", 70, (1 - 0.7 ** (k + 1)) / 0.3, 1, (-8, 10))
    axis.axhline(1, color="#555555", linewidth=0.8)
    axis.set_xlabel("drafts that are right, %")
    axis.set_ylabel("times as fast as without drafts")
    pays = next((row["accuracy"] for row in rows if row["low"] > 1), 1.0)
    style.title(made, f"Drafts pay from {pays:.0%} right on, by less than the tokens they save",
                style.source(recipe, "SmolLM2 135M", "bars: least and most of the rounds"))
    return made


def cache_types():
    """Divergence by the types of keys and of values."""
    found, recipe = results("quant-error", "kv")
    rows = found["kv"]["smollm2-135m-instruct"]
    made, axis = style.figure()
    same = sorted((row["bytes"] / 1000, row["kl"]["mean"], row["k"], row["v"]) for row in rows)
    axis.plot([b for b, *_ in same], [kl for _, kl, *_ in same], **(style.series(0) | {"linestyle": "none"}))
    for b, kl, k, v in same:
        axis.annotate(f"{k} / {v}", (b, kl), xytext=(-6, -4) if k == v else (6, 4),
                      ha="right" if k == v else "left", va="center", textcoords="offset points", fontsize=8)
    axis.set_yscale("log")
    axis.set_xlim(0, 1.12 * same[-1][0])
    axis.set_xlabel("kilobytes of keys and values a token (keys / values)")
    axis.set_ylabel("mean KL divergence, nats a token (logarithmic)")
    by = {(row["k"], row["v"]): row["kl"]["mean"] for row in rows}
    pairs = [(k, v) for k, v in by if k != v and (v, k) in by]
    if pairs:
        k, v = pairs[0]
        worse = max((k, v), (v, k), key=by.get)
        finding = (f"Keys need the bits: {worse[0]} / {worse[1]} diverges {by[worse] / by[worse[::-1]]:.1f} times "
                   f"as much as {worse[1]} / {worse[0]}")
    else:
        finding = f"{same[0][2]} takes {same[0][0] / same[-1][0]:.0%} of the bytes of {same[-1][2]}"
    style.title(made, finding, style.source(recipe, "SmolLM2 135M", f"{rows[0]['tokens'] * rows[0]['chunks']} tokens"))
    return made


FIGURES = {f.__name__: f for f in (why_eleven, error_against_bits, divergence_against_bits, speed_and_throughput,
                                   latency_against_load, roofline, kernel_ladder, speculation, cache_types)}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        print(*(path.name for path in style.save(draw(), HERE / name)))
