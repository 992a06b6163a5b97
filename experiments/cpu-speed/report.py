"""Tables and figures out of the samples."""

import statistics

import numpy as np

# What was asked for: ours / theirs, by what is measured and the name of the weights ("" for any).
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
    lab.heading("What this machine can do at most")
    lab.table(["threads", "reads, GB/s", "int8, GOP/s", "float32, GFLOP/s"],
              [[count, *(limits[count][key] for key in ("read_gb_s", "int8_gop_s", "f32_gop_s"))] for count in limits])
    _beside(lab, samples, "model", "prefill", "Prefill of 512 tokens, tokens per second: median (lowest-highest)")
    _beside(lab, samples, "model", "decode", "Decoding of 128 tokens after 32, tokens per second")
    _beside(lab, samples, "context", "decode", "Decoding after long prompts, tokens per second", "after")
    _beside(lab, samples, "batch", "decode", "Sequences decoding together, tokens per second of all", "sequences")
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
    """Median (lowest-highest)."""
    if not values:
        return ""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratio(ours: list[float], theirs: list[float]) -> float | None:
    """Of the medians."""
    return statistics.median(ours) / statistics.median(theirs) if ours and theirs else None


def _goal(what: str, name: str, threads: str = "") -> float | None:
    """Of what is measured and a model: beside llama.cpp, or, with so many threads, beside the better ik_llama.cpp."""
    goals = IK_GOALS.get(f"{what}, {threads}", IK_GOALS.get(what, {})) if threads else GOALS.get(what, {})
    return next((goal for part, goal in goals.items() if part.lower() in name.lower()), None)


def verdict(goal: float | None, ours: list[float], theirs: list[float], disturbed: int = 0) -> str:
    """Whether the ratio of the medians meets a goal, and in how many rounds it does; how many were disturbed."""
    reached = ratio(ours, theirs)
    if goal is None or reached is None:
        return ""
    met = sum(a >= goal * b for a, b in zip(ours, theirs))
    rounds = min(len(ours), len(theirs))
    told = f"{goal:g}" + ("" if reached >= goal else ", MISSED") + (f", {met} of {rounds}" if 0 < met < rounds else "")
    return told + (f", {disturbed} disturbed" if disturbed else "")


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
        rate = [statistics.median(ours) * samples["|".join((*key, "bytes"))][0] / 1e9] \
            if part == "model" and what == "decode" else []
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


def _quiet(lab, samples) -> None:
    """How quiet the rounds were."""
    rows = [[*key[:2], ", ".join(key[2:]), *(int(_of(samples, key, name)[0]) for name in ("repeated", "disturbed")),
             _of(samples, key, "others")[0], *(round(one[0], 1) if (one := _of(samples, key, name)) else ""
                                               for name in ("slowest memory", "fastest memory"))]
            for part in ("model", "context", "batch") for key in _keys(samples, part, "disturbed")]
    if rows:
        lab.heading("How quiet it was")
        lab.text("Rounds that were repeated because they were disturbed; samples of disturbed rounds that had to fill "
                 "up; most cores that other processes took in the others, and GB/s of memory before and after them.")
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
        lab.text("Left out: rounds in which the limit was measured in a worse moment than the speed, so that the speed "
                 "was above it.")


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
        lab.text("Of the command line. Seconds from the start of the process to the first token of a 16-token prompt, "
                 "kernels compiled and files cached before. Peak of resident memory, MiB: a prompt of 512 tokens and "
                 "16 more. \"Beside weights\" is what does not grow with them: interpreter, modules, vocabulary, keys "
                 "and values, activations. Goals: under 1.0 s; at most 1.3 times the memory.")
        lab.table(["model", "threads", "first token, s", "numflow, MiB", "llama.cpp, MiB", "ratio",
                   "numflow beside weights"], rows)


def _profiles(lab, limits, profiles) -> None:
    lab.heading("Where the time goes")
    lab.text("With the fewest threads of the run where nothing else is said; a barrier after every step. \"Of limit\" "
             "is the time that the bytes or the operations would take at this machine's limits, as a part of the time "
             "they took. A norm, an activation or an addition that the matrix beside it does is a part of that matrix.")
    for name, phases in profiles.items():
        for phase, rows in phases.items():
            rows = [row for row in rows if row["share"] > 0.002]
            total = sum(row["microseconds"] for row in rows)
            lab.text(f"**{name}, {phase}**: {total / 1e3:.2f} ms")
            lab.table(["op", "steps", "us", "share", "GB/s", "GOP/s", "of limit"],
                      [[row["op"], row["steps"], f"{row['microseconds']:.0f}", f"{row['share']:.1%}", row["gb_s"],
                        row["gop_s"], "" if row["at_limit"] is None else f"{row['at_limit']:.0%}"] for row in rows])
            above = [row["op"] for row in rows if (row["at_limit"] or 0) > 1]
            if above:
                lab.text(f"Above the limit: {', '.join(above)}. The limit is measured on bytes that no cache holds. "
                         "Some of what these steps read is still in the cache from the token before, or the memory was "
                         "slower when the limit was measured.")
    _roofline(lab, limits, profiles)


def _roofline(lab, limits, profiles) -> None:
    plt, (count, limit) = lab.pyplot(), next(iter(limits.items()))
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    intensity = np.logspace(-1.5, 3, 200)
    for key, label in (("int8_gop_s", "int8"), ("f32_gop_s", "float32")):
        axis.plot(intensity, np.minimum(intensity * limit["read_gb_s"], limit[key]), color="0.6" if key[0] == "f" else
                  "0.2", label=f"limit, {label}")
    shown = [name for name in profiles if not name.endswith(" threads")]  # the limits are those of the fewest
    for name, color in zip(shown, plt.cm.tab20.colors, strict=False):
        for phase, mark in (("prefill", "o"), ("decode", "^")):
            rows = [row for row in profiles[name][phase] if row["gop_s"] and row["share"] > 0.01]
            axis.scatter([row["gop_s"] / row["gb_s"] for row in rows], [row["gop_s"] for row in rows], s=24,
                         marker=mark, color=color, label=name.removesuffix(".gguf") if phase == "prefill" else None)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="10^9 operations per second",
             title=f"prefill (dots) and decoding (triangles), {count} thread{'s' * (count > 1)}")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    lab.figure(figure, "roofline", "Matrices and attention of each model below what the machine can do")
    plt.close(figure)


def _figures(lab, samples) -> None:
    plt = lab.pyplot()
    keys = _keys(samples, "model", "decode")
    if keys:
        figure, axes = plt.subplots(1, 2, figsize=(11, 0.42 * len(keys) + 1.5), sharey=True)
        labels = [f"{key[1].rsplit('.', 1)[0]}, {key[2]}T" for key in keys]
        for axis, what in zip(axes, ("prefill", "decode"), strict=True):
            at = np.arange(len(keys))
            for shift, name, label in ((-0.2, what, "numflow"), (0.2, f"peer {what}", "llama.cpp")):
                values = [_of(samples, key, name) for key in keys]
                axis.barh(at + shift, [statistics.median(v) if v else 0 for v in values], 0.4, label=label)
            axis.set(yticks=at, yticklabels=labels, xlabel="tokens/s", title=what)
            axis.legend()
        axes[0].invert_yaxis()
        lab.figure(figure, "tokens_per_second", "Prefill and decoding by quantisation and threads, medians")
        plt.close(figure)
    for part, label in (("context", "tokens before"), ("batch", "sequences")):
        _lines(lab, plt, samples, part, label)


def _lines(lab, plt, samples, part, label) -> None:
    keys = _keys(samples, part, "decode")
    if not keys:
        return
    figure, axis = plt.subplots(figsize=(8, 4.5))
    groups = dict.fromkeys(key[1:3] for key in keys)
    for (name, threads), color in zip(groups, plt.cm.tab10.colors):
        own = sorted((int(key[3]), key) for key in keys if key[1:3] == (name, threads))
        for what, style, who in (("decode", "-o", "numflow"), ("peer decode", "--x", "llama.cpp")):
            points = [(size, statistics.median(_of(samples, key, what))) for size, key in own
                      if _of(samples, key, what)]
            if points:
                axis.plot(*zip(*points), style, color=color, label=f"{who}, {name.rsplit('.', 1)[0]}, {threads}T")
    axis.set(xscale="log", yscale="log", xlabel=label, ylabel="tokens/s")
    axis.legend(fontsize=7)
    lab.figure(figure, f"by_{part}", f"Decoding by {label}, medians")
    plt.close(figure)
