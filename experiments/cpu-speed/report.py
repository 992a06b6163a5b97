"""Tables and figures of the samples."""

import statistics

import numpy as np

from numflow.lab import style

# Goals: the ratio ours / theirs, by measurement and name of the weights ("" for any).
GOALS = {
    "decode": {"Q4_1": 1.8, "Q4_0": 1.4, "Q8_0": 1.3, "gemma": 1.4, "Q4_K_M": 1.5, "F16": 1.1},
    "prefill": {"Q4_1": 4, "Q4_0": 2, "Q8_0": 2, "gemma": 2, "Q4_K_M": 2.5, "F16": 1.6},
    "context 4096": {"": 1.5}, "batch 32": {"Q4_1": 3, "Q4_0": 1.8, "F16": 1.5}, "torch": {"": 1.0},
}

IK_GOALS = {
    "prefill": {"F16": 1.1, "": 1.5}, "decode, 1": {"": 1.25}, "decode, 2": {"": 1.1},
    "batch 8": {"Q4_0": 1.5, "Q4_K_M": 1.5, "F16": 1.5}, "batch 32": {"Q4_0": 1.5, "Q4_K_M": 1.5, "F16": 1.5},
    "context 4096": {"": 1.5}, "context 32768": {"": 1.5},
}
PEERS = {"peer": "llama.cpp", "ik": "ik_llama.cpp", "ik -rtr": "ik_llama.cpp -rtr"}  # by what samples are called


def write(lab, samples: dict, limits: dict, profiles: dict, text: str) -> None:
    """The whole report."""
    lab.text(text.split("\n\n", 1)[1].replace("\n", " "))
    for run in lab.results.get("runs", [])[:-1]:
        lab.text(f"Some samples are of an earlier run: `{run['command']}` on {run['started']}, commit {run['commit']}.")
    lab.heading("Limits of this machine")
    lab.table(["threads", "reads, GB/s", "int8, GOP/s", "float32, GFLOP/s", "bfloat16, GFLOP/s"],
              [[count, *(limits[count].get(key, "") for key in ("read_gb_s", "int8_gop_s", "f32_gop_s", "bf16_gop_s"))]
               for count in limits])
    _beside(lab, samples, "model", "prefill", "Prefill of 512 tokens, tokens per second: median (minimum-maximum)")
    _beside(lab, samples, "model", "decode", "Decoding of 128 tokens after 32, tokens per second")
    _above(lab, [f"{key[1]} with {key[2]}" for key in _keys(samples, "model", "decode")
                 if _weights_gb_s(samples, key) > limits.get(int(key[2]), {}).get("read_gb_s", float("inf"))])
    _beside(lab, samples, "context", "decode", "Decoding after long prompts, tokens per second", "after")
    _beside(lab, samples, "batch", "decode", "Sequences decoding together, tokens per second in total", "sequences")
    _beside(lab, samples, "busy", "decode", "Decoding beside programs that compute without end, tokens per second",
            "programs")
    _quiet(lab, samples)
    _torch(lab, samples)
    _synthetic(lab, samples)
    _start(lab, samples)
    _figures(lab, samples)
    if profiles:
        _profiles(lab, limits, profiles)


def _keys(samples: dict, part: str, what: str) -> list[tuple[str, ...]]:
    found = [tuple(key.split("|")) for key in samples]
    return [key[:-1] for key in found if key[0] == part and key[-1] == what]


def _of(samples: dict, key: tuple, what: str) -> list[float]:
    return samples.get("|".join((*key, what)), [])


def spread(values: list[float], digits: int = 0) -> str:
    """Median (minimum-maximum)."""
    if not values:
        return ""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratio(ours: list[float], theirs: list[float]) -> float | None:
    """Ratio of the medians."""
    return statistics.median(ours) / statistics.median(theirs) if ours and theirs else None


def _short(name: str) -> str:
    """The name of a model (rounds.Subject) without its file's suffix."""
    file, comma, activations = name.partition(", ")
    return file.rsplit(".", 1)[0] + comma + activations


def _goal(what: str, name: str, threads: str = "") -> float | None:
    """Goal of a measurement and a model: relative to llama.cpp, or with `threads` to the better ik_llama.cpp."""
    goals = IK_GOALS.get(f"{what}, {threads}", IK_GOALS.get(what, {})) if threads else GOALS.get(what, {})
    return next((goal for part, goal in goals.items() if part.lower() in name.lower()), None)


def verdict(goal: float | None, ours: list[float], theirs: list[float], disturbed: int = 0) -> str:
    """Text: the goal, whether the ratio of the medians meets it, the rounds that meet it, and the disturbed rounds."""
    reached = ratio(ours, theirs)
    if goal is None or reached is None:
        return ""
    met = sum(a >= goal * b for a, b in zip(ours, theirs))
    rounds = min(len(ours), len(theirs))
    text = f"{goal:g}" + ("" if reached >= goal else ", MISSED") + (f", {met} of {rounds}" if 0 < met < rounds else "")
    return text + (f", {disturbed} disturbed" if disturbed else "")


def _beside(lab, samples, part, what, title, size="") -> None:
    keys = _keys(samples, part, what)
    there = [peer for peer in PEERS if any(_of(samples, key, f"{peer} {what}") for key in keys)]
    rows = []
    for key in keys:
        ours, theirs = _of(samples, key, what), {peer: _of(samples, key, f"{peer} {what}") for peer in there}
        quantity = what if part == "model" else f"{part} {key[-1]}"
        disturbed = int((_of(samples, key, "disturbed") or [0])[0])
        relatives = [theirs[peer] for peer in there if peer != "peer" and theirs[peer]]
        better = max(relatives, key=statistics.median, default=[])
        rate = [_weights_gb_s(samples, key)] if part == "model" and what == "decode" else []
        own = [ratio(ours, theirs["peer"]), verdict(_goal(quantity, key[1]), ours, theirs["peer"], disturbed)] \
            if "peer" in there else []
        second = [ratio(ours, better), verdict(_goal(quantity, key[1], key[2]), ours, better, disturbed)] \
            if len(there) > ("peer" in there) else []
        rows.append([key[1], *key[2:], spread(ours, 1), *(spread(theirs[peer], 1) for peer in there), *own, *second,
                     *rate])
    if rows:
        lab.heading(title)
        last = ["GB/s of weights"] if part == "model" and what == "decode" else []
        lab.table(["model", "threads", *([size] if size else []), "numflow", *(PEERS[peer] for peer in there),
                   *(["ratio", "goal"] if "peer" in there else []),
                   *(["to the better ik", "goal"] if len(there) > ("peer" in there) else []), *last], rows)


def _weights_gb_s(samples, key) -> float:
    return statistics.median(_of(samples, key, "decode")) * _of(samples, key, "bytes")[0] / 1e9


def _above(lab, names: list[str]) -> None:
    """The measurements above the machine's limit, and the reason."""
    if names:
        lab.text(f"Above the limit: {', '.join(names)}. The limit is measured on data that is in no cache. Here some "
                 "of the data was still in a cache from the previous token, or the memory was slower when the limit "
                 "was measured.")


def _quiet(lab, samples) -> None:
    """Disturbance of the rounds by other processes."""
    rows = [[*key[:2], ", ".join(key[2:]), *(int(_of(samples, key, name)[0]) for name in ("repeated", "disturbed")),
             _of(samples, key, "others")[0], *(round(one[0], 1) if (one := _of(samples, key, name)) else ""
                                               for name in ("slowest memory", "fastest memory"))]
            for part in ("model", "context", "batch") for key in _keys(samples, part, "disturbed")]
    if rows:
        lab.heading("Other load during the rounds")
        lab.text("Repeated: rounds repeated because other processes disturbed them. Disturbed: samples of disturbed "
                 "rounds that are used because undisturbed ones were missing. Others: the most cores that other "
                 "processes used in undisturbed rounds. Slowest, fastest: memory bandwidth around them, GB/s.")
        lab.table(["part", "model", "threads, size", "repeated", "disturbed", "others", "slowest", "fastest"], rows)


def _torch(lab, samples) -> None:
    rows = []
    for what in ("prefill", "sentences"):
        for key in _keys(samples, "torch", what):
            ours, theirs = _of(samples, key, what), _of(samples, key, f"peer {what}")
            name = "prefill of 512, bfloat16 in torch" if what == "prefill" else f"{key[3]} sentences of 128, float32"
            rows.append([key[1], key[2], name, spread(ours, 1), spread(theirs, 1), ratio(ours, theirs)])
    if rows:
        lab.heading("Beside torch: tokens or sentences per second")
        lab.table(["model", "threads", "what", "numflow", "torch", "ratio"], rows)


def _synthetic(lab, samples) -> None:
    rows = []
    for key in _keys(samples, "synthetic", "decode"):
        read = samples["|".join((*key, "bytes"))][0]
        rows.append([key[1], key[2], read / 1e9, spread(_of(samples, key, "decode"), 1),
                     _percent(_of(samples, key, "of bandwidth")), spread(_of(samples, key, "prefill"), 0),
                     _percent(_of(samples, key, "of int8 peak")), int((_of(samples, key, "left out") or [0])[0])])
    if rows:
        lab.heading("A large model of random weights")
        lab.text("Goals: decoding reads weights at 88 % of the bandwidth measured right before it, prefill computes at "
                 "55 % of the int8 peak (the products of the matrices only, over the whole time).")
        lab.table(["shape, weights", "threads", "GB a token", "decode tok/s", "of bandwidth", "prefill tok/s",
                   "of int8 peak", "left out"], rows)
        lab.text("Left out: rounds whose speed was above the limit, because the limit was measured at a worse moment. "
                 "Where too few rounds are below the limit, these count as well: the share is then above 100 %.")


def _percent(values: list[float]) -> str:
    return spread([100 * v for v in values], 0) + " %"


def _start(lab, samples) -> None:
    rows = []
    for key in _keys(samples, "start", "first token"):
        ours, theirs = _of(samples, key, "memory"), _of(samples, key, "peer memory")
        weights = _of(samples, key, "weights")
        rows.append([key[1], key[2], spread(_of(samples, key, "first token"), 2), spread(ours), spread(theirs),
                     ratio(ours, theirs), spread([a - b for a, b in zip(ours, weights)])])
    if rows:
        lab.heading("Start and memory")
        lab.text("Command line. First token: seconds from the start of the process to the first token after a prompt "
                 "of 16 tokens, with compiled kernels and files in the page cache. Memory: peak resident memory in MiB "
                 "for a prompt of 512 tokens and 16 new ones. \"Beside weights\" is the memory that does not depend on "
                 "the weights: interpreter, modules, vocabulary, KV cache, activations. Goals: under 1.0 s; at most "
                 "1.3 times the memory.")
        lab.table(["model", "threads", "first token, s", "numflow, MiB", "llama.cpp, MiB", "ratio",
                   "numflow beside weights"], rows)


def _profiles(lab, limits, profiles) -> None:
    lab.heading("Where the time goes")
    lab.text("With the smallest number of threads of the run unless another number is given, and a barrier after every "
             "step. \"Of limit\" is the time that the bytes or operations would take at this machine's limits, as a "
             "share of the measured time. A norm, activation function or addition that is fused with a matrix product "
             "is part of that product.")
    for name, phases in profiles.items():
        for phase, rows in phases.items():
            rows = [row for row in rows if row["share"] > 0.002]
            total = sum(row["microseconds"] for row in rows)
            lab.text(f"**{name}, {phase}**: {total / 1e3:.2f} ms")
            lab.table(["op", "steps", "us", "share", "GB/s", "GOP/s", "of limit"],
                      [[row["op"], row["steps"], f"{row['microseconds']:.0f}", f"{row['share']:.1%}", row["gb_s"],
                        row["gop_s"], "" if row["at_limit"] is None else f"{row['at_limit']:.0%}"] for row in rows])
            _above(lab, [row["op"] for row in rows if (row["at_limit"] or 0) > 1])
    _roofline(lab, limits, profiles)


def _roofline(lab, limits, profiles) -> None:
    count, limit = next(iter(limits.items()))
    made, axis = style.figure()
    for number, key, label in ((4, "int8_gop_s", "int8"), (5, "f32_gop_s", "float32")):
        xs = [0.03, limit[key] / limit["read_gb_s"], 1500]
        ys = [min(x * limit["read_gb_s"], limit[key]) for x in xs]
        axis.plot(xs, ys, **style.series(number) | {"marker": ""})
        style.end(axis, label, xs, ys, number)
    shown = [name for name in profiles if not name.endswith(" threads")]  # the limits are those of the fewest
    shares = {}
    for number, (phase, label) in enumerate((("prefill", "a prompt's steps"), ("decode", "a token's steps"))):
        rows = [row for name in shown for row in profiles[name][phase] if row["gop_s"] and row["share"] > 0.01]
        axis.plot([row["gop_s"] / row["gb_s"] for row in rows], [row["gop_s"] for row in rows], label=label,
                  **style.series(number) | {"linestyle": "none"})
        counted = [row for row in rows if row["at_limit"] is not None]
        time = sum(row["microseconds"] for row in counted)
        shares[phase] = sum(row["at_limit"] * row["microseconds"] for row in counted) / time if time else 0.0
    style.plain_log(axis, "x", (0.1, 1, 10, 100, 1000))
    style.plain_log(axis, "y", (1, 10, 100, 1000))
    axis.set(xlabel="operations for each byte that must move", ylabel="10⁹ operations a second", xlim=(0.03, 6000))
    axis.legend(fontsize=8, loc="lower right")
    lab.figure(made, "roofline", f"Steps of a prompt run at {shares['prefill']:.0%} of their limit, those of a token "
               f"at {shares['decode']:.0%}", f"{len(shown)} models", f"{count} thread{'s' * (int(count) > 1)}",
               caption="Matrices and attention of each model, and the limits of the machine")


def figures(lab, samples, limits, profiles) -> None:
    """All figures, from results alone."""
    if profiles:
        _roofline(lab, limits, profiles)
    _figures(lab, samples)


def _figures(lab, samples) -> None:
    keys = _keys(samples, "model", "decode")
    if keys:
        _beside_each_other(lab, samples, keys)
    for part, label in (("context", "tokens before"), ("batch", "sequences at a time")):
        _lines(lab, samples, part, label)


def _beside_each_other(lab, samples, keys) -> None:
    """Bars of the engines for each file and number of threads; of ik_llama.cpp the better of both its ways."""
    with_ik = any(_of(samples, key, "ik decode") for key in keys)
    made, axes = style.figure(1, 2, (9.6, (0.52 if with_ik else 0.4) * len(keys) + 1.6))
    engines = [("numflow", ("",)), ("llama.cpp", ("peer ",)), *([("ik_llama.cpp", ("ik ", "ik -rtr "))] * with_ik)]
    thick, rates = 0.8 / len(engines), {}
    for axis, what, label in ((axes[0], "prefill", "a prompt, tokens a second"), (axes[1], "decode", "writing, tokens "
                                                                                  "a second")):
        longest = 0.0
        for number, (who, marks) in enumerate(engines):
            values = [max(statistics.median(_of(samples, key, mark + what) or [0]) for mark in marks) for key in keys]
            places = [at + thick * (number - (len(engines) - 1) / 2) for at in range(len(keys))]
            axis.barh(places, values, 0.95 * thick, color=style.SERIES[number][0], label=who)
            longest = max(longest, *values)
            for place, value in zip(places, values):
                if value:
                    axis.text(value + 0.01 * longest, place, f"{value:.0f}", va="center", fontsize=7)
            rates[what, who] = values
        axis.set(xlabel=label, yticks=range(len(keys)), yticklabels=[], ylim=(len(keys) - 0.5, -0.5),
                 xlim=(0, 1.12 * longest))
        axis.grid(axis="y", visible=False)
    axes[0].set_yticklabels([f"{_short(key[1])}, {key[2]} thread{'s' * (key[2] != '1')}" for key in keys])
    axes[1].legend(fontsize=8, loc="lower right")
    finding = f"numflow writes {max(rates['decode', 'numflow']):.0f} tokens a second at most"
    times = {who: [ours / theirs for ours, theirs in zip(rates["decode", "numflow"], rates["decode", who]) if theirs]
             for who, _ in engines[1:]}
    if any(times.values()):
        finding = "numflow writes " + ", ".join(
            f"{min(found):.1f} to {max(found):.1f} times as fast as {who}" for who, found in times.items() if found)
    lab.figure(made, "tokens_per_second", finding, "medians", left=3.1, wspace=0.1,
               caption="Prefill and decoding by quantisation and threads, medians")


def _lines(lab, samples, part, label) -> None:
    keys = _keys(samples, part, "decode")
    if not keys:
        return
    groups = list(dict.fromkeys(key[1:3] for key in keys))
    columns = min(3, len(groups))
    made, panels = style.figure(-(-len(groups) // columns), columns, (3.2 * columns + 0.8,
                                                                      2.9 * -(-len(groups) // columns) + 0.9))
    panels, ratios = np.ravel(panels), []
    for axis in panels[len(groups):]:
        axis.set_visible(False)
    for axis, (name, threads) in zip(panels, groups):
        own = sorted((int(key[3]), key) for key in keys if key[1:3] == (name, threads))
        sizes = [size for size, _ in own]
        for number, what, who in ((0, "decode", "numflow"), (1, "peer decode", "llama.cpp")):
            found = [(size, statistics.median(_of(samples, key, what))) for size, key in own if _of(samples, key, what)]
            if found:
                xs, ys = zip(*found)
                axis.plot(xs, ys, **style.series(number))
                style.end(axis, who, xs, ys, number)
        ratios += [statistics.median(_of(samples, key, "decode")) / statistics.median(_of(samples, key, "peer decode"))
                   for _, key in own if _of(samples, key, "peer decode")]
        style.plain_log(axis, "x", sizes)
        axis.set_xlim(sizes[0] * 0.8, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.45 * 1.1)
        axis.set(ylim=(0, None), xlabel=label)
        axis.set_title(f"{_short(name)}, {threads} thread{'s' * (threads != '1')}", fontsize=8)
    for axis in panels[::columns]:
        axis.set_ylabel("tokens a second")
    finding = f"By {label}, numflow writes {min(ratios):.1f} to {max(ratios):.1f} times as fast" if ratios else \
        f"Decoding by {label}, {len(keys)} measurements"
    lab.figure(made, f"by_{part}", finding, "medians", caption=f"Decoding by {label}, medians")
