"""Tables and figures of the report."""

import itertools

from numflow.lab import style


def report(lab, found) -> None:
    """Write the report."""
    options = lab.options
    lab.text(f"Model {options['model']}, {found['threads']} threads; the machine's load average was "
             f"{found['load_average'][0]:.1f} at the start and {found['load_average'][1]:.1f} at the end. If it is "
             "above the number of threads, other programs used part of the cores, and only ratios of engines that "
             "took turns are meaningful.")
    _scale(lab, found["scale"])
    _serving(lab, found["serving"])
    prefix = found["prefix"]
    lab.heading("Prefix cache")
    lab.text(f"The first prompt had {options['shared']} tokens that the next prompt shares, and 8 others. Its first "
             f"token came after {1e3 * prefix['first_s']:.0f} ms, the first token of the next prompt after "
             f"{1e3 * prefix['second_s']:.1f} ms: {prefix['ratio']:.0f} times sooner "
             f"({prefix['tokens_found']:.0f} tokens were in the cache).")
    lab.heading("KV memory for 30 % of the requests")
    lab.text("Each request needs two blocks in the end; when memory is full, a request is preempted.")
    lab.table(["preemption", "new tok/s", "preemptions", "MiB reserved", "MiB allowed", "same tokens"],
              [(kind, row["new_tok_s"], row["preemptions"], row["measured_mib"], row["budget_mib"],
                "yes" if row["same_tokens"] else "NO") for kind, row in found["memory"].items()])
    lab.heading("Results do not depend on other requests")
    count = options["sequences"].split(",")[-1]
    lab.text(f"{count} requests of mixed lengths and settings (greedy, sampled, penalties, beams, n-gram drafts) gave "
             f"{'exactly the tokens that each gives alone' if found['mixed'] else 'OTHER tokens than alone'}.")


def _scale(lab, scale) -> None:
    lab.heading("Sequences in parallel")
    peer = any("llama.cpp" in row for row in scale.values())
    lab.text(f"Prompts of {lab.options['prompt']} tokens, {lab.options['new']} new tokens each. `decode` is measured "
             "from the time when every sequence has its first token, `all` from the first request on. numflow samples "
             "and detokenizes its tokens (greedily, or at temperature 0.8 and top-p 0.9)"
             + ("; llama-batched-bench samples none." if peer else "; llama.cpp's llama-batched-bench was not found."))
    head = ["sequences", "decode tok/s", "all tok/s", "against one", "sampling tok/s", "ms per step",
            "engine's share, ms"]
    one = scale[min(scale)]["numflow"]
    rows = []
    for count, row in scale.items():
        ours, other = row["numflow"], row.get("llama.cpp")
        rows.append([count, ours["decode_tok_s"], ours["new_tok_s"], ours["new_tok_s"] / one["new_tok_s"],
                     row["sampling"]["decode_tok_s"], ours["step_ms"], ours["engine_ms"]])
        if peer:
            rows[-1] += [other["decode_tok_s"], ours["decode_tok_s"] / other["decode_tok_s"],
                         ours["new_tok_s"] / other["new_tok_s"]]
    lab.table([*head, *(["llama.cpp decode", "ratio decode", "ratio all"] if peer else [])], rows)
    sequences_figure(lab, scale)


def sequences_figure(lab, scale) -> None:
    """Tokens per second of all sequences together, by their number."""
    scale = {int(count): row for count, row in scale.items()}
    made, axis = style.figure()
    for number, (engine, label) in enumerate((("numflow", "greedy"), ("sampling", "sampling"),
                                              ("llama.cpp", "llama.cpp"))):
        found = [(count, row[engine]["decode_tok_s"]) for count, row in scale.items() if engine in row]
        if found:
            xs, ys = zip(*found)
            axis.plot(xs, ys, **style.series(number))
            style.end(axis, label, xs, ys, number)
    one, most = min(scale), max(scale)
    alone = scale[one]["numflow"]["decode_tok_s"]
    axis.axhline(alone, color=style.GREY, linewidth=0.8)
    style.plain_log(axis, "x", list(scale))
    axis.set_xlim(one * 0.9, most * 1.7)
    axis.set_ylim(0, None)
    axis.set_xlabel("sequences at a time (grey: one alone)")
    axis.set_ylabel("new tokens a second, all together")
    lab.figure(made, "sequences", f"{most} sequences side by side write "
               f"{scale[most]['numflow']['decode_tok_s'] / alone:.1f} times the tokens of one", lab.options["model"],
               caption="Tokens per second of all sequences together, while decoding.")


def _serving(lab, rows) -> None:
    lab.heading("Under load")
    lab.text("Requests arrive at random times (a Poisson process) with prompts and answers of random lengths, the same "
             "for both kinds of batching. `load` is the arrival rate as a share of the rate that dynamic batching "
             "served when all requests arrived at once. Static batching starts a batch when the previous one has "
             f"ended. Times are in seconds from a request's arrival: medians of {lab.options['rounds']} rounds, in "
             "which all loads and kinds take turns, with minimum and maximum. llama.cpp's server was not measured.")
    lab.table(["load", "requests/s", "batching", "new tok/s", "first token", "95 %", "whole", "95 %", "ms per token"],
              [(row["load"], row["requests_s"], row["batching"], row["new_tok_s"], spread(row, "first_s"),
                row["first_95_s"], spread(row, "latency_s"), row["latency_95_s"], spread(row, "per_token_ms"))
               for row in rows])
    for kind in dict.fromkeys(row["batching"] for row in rows):
        own = sorted((row for row in rows if row["batching"] == kind), key=lambda row: row["load"])
        for fewer, more in itertools.pairwise(own):
            for key, name in (("first_s", "the first token comes"), ("per_token_ms", "a token comes")):
                lab.doubt(may_follow(fewer, more, key),
                          f"{kind} batching: in every round {name} sooner at load {more['load']:g} than at "
                          f"{fewer['load']:g}")
    load_figure(lab, rows)


def load_figure(lab, rows) -> None:
    """Time to the first token and time per token, by load, for each kind of batching."""
    made, panels = style.figure(1, 2, (9, 4))
    ways = list(dict.fromkeys(row["batching"] for row in rows))
    for axis, key, by, label in ((panels[0], "first_s", 1e3, "ms to the first token (logarithmic)"),
                                 (panels[1], "per_token_ms", 1, "ms a token, waiting counts (logarithmic)")):
        for number, way in enumerate(ways):
            own = sorted((row for row in rows if row["batching"] == way), key=lambda row: row["load"])
            xs, ys = [row["load"] for row in own], [by * row[key] for row in own]
            spans = [[by * sample[key] for sample in row["samples"]] for row in own]
            axis.plot(xs, ys, **style.series(number))
            axis.fill_between(xs, [min(s) for s in spans], [max(s) for s in spans], alpha=0.15, linewidth=0,
                              color=style.SERIES[number][0])
            style.end(axis, way, xs, ys, number)
        shown = sorted({row["load"] for row in rows})
        style.plain_log(axis, "y", [n * 10**power for power in range(5) for n in (1, 2, 5)
                                    if axis.get_ylim()[0] < n * 10**power < axis.get_ylim()[1]])
        axis.set(xlabel="load, as a share of what one batch of all would bear", ylabel=label,
                 xlim=(shown[0] - 0.05, shown[-1] + 0.25), xticks=shown)
    most = max(row["load"] for row in rows)
    first = {row["batching"]: row["first_s"] for row in rows if row["load"] == most}
    ratio = first["static"] / first["dynamic"]
    lab.figure(made, "load", f"At load {most:g} dynamic batching answers {ratio:.1f} times as soon as static",
               lab.options["model"], "bands: all rounds",
               caption="Medians under load, with minimum and maximum of the rounds; waiting is included.")


def spread(row: dict, key: str) -> str:
    """Median (minimum-maximum) of the rounds."""
    values = [sample[key] for sample in row["samples"]]
    return f"{row[key]:.3g} ({min(values):.3g}-{max(values):.3g})"


def may_follow(fewer: dict, more: dict, key: str) -> bool:
    """Whether waiting under more load can be as it was measured beside that under less: not shorter in every round.
    A single round says nothing."""
    return len(more["samples"]) < 2 or max(s[key] for s in more["samples"]) >= min(s[key] for s in fewer["samples"])
