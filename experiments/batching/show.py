"""Tables and figures of the report."""

import itertools


def report(lab, found) -> None:
    """Write what was found."""
    options = lab.options
    lab.text(f"Model {options['model']}, {found['threads']} threads; the machine's load average was "
             f"{found['load_average'][0]:.1f} when it began and {found['load_average'][1]:.1f} when it ended: where it "
             "is above the number of threads, other programs took part of the cores from both engines, and only the "
             "ratios of the engines that took turns mean something.")
    _scale(lab, found["scale"])
    _serving(lab, found["serving"])
    prefix = found["prefix"]
    lab.heading("Prefix cache")
    lab.text(f"A prompt of {options['shared']} tokens and 8 of its own had its first token after "
             f"{1e3 * prefix['first_s']:.0f} ms. The next prompt with the same beginning had it after "
             f"{1e3 * prefix['second_s']:.1f} ms: {prefix['ratio']:.0f} times sooner "
             f"({prefix['tokens_found']:.0f} tokens were found).")
    lab.heading("Memory for three tenths of the requests")
    lab.text("Requests that come to need two blocks each; what does not fit waits, and makes place when others grow.")
    lab.table(["preemption", "new tok/s", "preemptions", "MiB reserved", "MiB allowed", "same tokens"],
              [(kind, row["new_tok_s"], row["preemptions"], row["measured_mib"], row["budget_mib"],
                "yes" if row["same_tokens"] else "NO") for kind, row in found["memory"].items()])
    lab.heading("Company changes nothing")
    count = options["sequences"].split(",")[-1]
    lab.text(f"{count} requests of mixed lengths and settings (greedy, sampled, penalties, beams, look-up drafts) gave "
             f"{'exactly the tokens that each gives alone' if found['mixed'] else 'OTHER tokens than alone'}.")


def _scale(lab, scale) -> None:
    lab.heading("Sequences side by side")
    peer = any("llama.cpp" in row for row in scale.values())
    lab.text(f"Prompts of {lab.options['prompt']} tokens, {lab.options['new']} new ones each. `decode` counts the time "
             "after the last of the first tokens, `all` everything from the first request on. numflow picks and "
             "decodes its tokens (greedily, or sampling at temperature 0.8 and top-p 0.9)"
             + ("; llama-batched-bench picks none." if peer else "; llama.cpp's llama-batched-bench was not found."))
    head = ["sequences", "decode tok/s", "all tok/s", "against one", "sampling tok/s", "ms per step", "of it engine"]
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
    plt = lab.pyplot()
    figure, axes = plt.subplots(figsize=(6, 4))
    for engine in ("numflow", "sampling", "llama.cpp"):
        points = [(count, row[engine]["decode_tok_s"]) for count, row in scale.items() if engine in row]
        if points:
            axes.plot(*zip(*points), marker="o", label={"sampling": "numflow, sampling"}.get(engine, engine))
    axes.plot(list(scale), [one["decode_tok_s"]] * len(scale), "--", color="gray", label="numflow, one sequence")
    axes.set(xlabel="sequences", ylabel="new tokens per second", xscale="log", xticks=list(scale))
    axes.set_xticks(list(scale), list(map(str, scale)))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.2))
    lab.figure(figure, "sequences", "Tokens per second of all sequences together, while they are generated.")


def _serving(lab, rows) -> None:
    lab.heading("Under load")
    lab.text("Requests come at random moments (a Poisson process) with prompts and answers of random lengths, the same "
             "for every way to batch. `load` is the share of the rate that dynamic batching served when all requests "
             "came at once. Static: a batch starts when the last one has ended. Times are in seconds, from a request's "
             f"arrival: medians of {lab.options['rounds']} rounds, in which all loads and ways take turns, with the "
             "least and the most. llama.cpp's server was not measured.")
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
    plt = lab.pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    for axes, key, label in ((panels[0], "first_s", "seconds to the first token"),
                             (panels[1], "per_token_ms", "ms per token")):
        for kind in dict.fromkeys(row["batching"] for row in rows):
            own = [row for row in rows if row["batching"] == kind]
            low, high = ([abs(pick(s[key] for s in row["samples"]) - row[key]) for row in own] for pick in (min, max))
            axes.errorbar([row["load"] for row in own], [row[key] for row in own], (low, high), marker="o", capsize=3,
                          label=kind)
        axes.set(xlabel="load", ylabel=f"{label} (median)", yscale="log")
    panels[1].legend()
    figure.tight_layout()
    lab.figure(figure, "load", "Medians under load, with the least and the most of the rounds; waiting counts.")


def spread(row: dict, key: str) -> str:
    """Median (least-most) of the rounds."""
    values = [sample[key] for sample in row["samples"]]
    return f"{row[key]:.3g} ({min(values):.3g}-{max(values):.3g})"


def may_follow(fewer: dict, more: dict, key: str) -> bool:
    """Whether waiting under more load can be as it was measured beside that under less: not shorter in every round.
    A single round says nothing."""
    return len(more["samples"]) < 2 or max(s[key] for s in more["samples"]) >= min(s[key] for s in fewer["samples"])
