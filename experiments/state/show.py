"""Tables and figures of the report."""

from statistics import median

from numflow.lab import style


def report(lab, found) -> None:
    """Write the report."""
    before, after = found["load_average"]
    lab.text(f"The machine's load average was {before:.1f} at the start and {after:.1f} at the end. If it is above the "
             "number of threads, other programs used part of the cores, and only ratios are meaningful. "
             + ("" if lab.options["llama_cpp"] else "llama.cpp's llama-bench was not found."))
    for part, show in (("kernels", _kernels), ("models", _models), ("positions", _positions), ("types", _types),
                       ("memory", _memory)):
        if part in found:
            show(lab, found[part])


def _kernels(lab, found) -> None:
    lab.heading("Blocks against single tokens")
    peak, pieces = found["peak"], found["pieces"]
    lab.text("Linear attention alone, one thread, in pieces of the given length in the middle of a text, in 10^9 "
             f"operations of the recurrence per second. The machine reaches {peak:.0f} with float32 multiply-adds. The "
             "pieces of a block are measured together with the work at the end of the block.")
    lab.table(["form", *(f"{n} tokens" for n in pieces), "of the peak"],
              [[name, *rates, f"{100 * max(rates) / peak:.0f} %"] for name, rates in found["forms"].items()])
    best = max(found["forms"]["gated delta rule"])
    lab.claim(f"The gated delta rule in blocks reaches {100 * best / peak:.0f} % of the peak.", best >= 0.4 * peak,
              f"The gated delta rule in blocks reaches {100 * best / peak:.0f} % of the peak, not 40 %.")
    blocks_figure(lab, found)


def blocks_figure(lab, found) -> None:
    """Rate of each form of linear attention by the tokens that it takes at a time."""
    peak, pieces = found["peak"], found["pieces"]
    made, axis = style.figure()
    for number, (name, rates) in enumerate(found["forms"].items()):
        ys = [100 * rate / peak for rate in rates]
        axis.plot(pieces, ys, **style.series(number))
        style.end(axis, name, pieces, ys, number)
    style.plain_log(axis, "x", pieces)
    axis.set(xlabel="tokens at a time; a block has 16", ylabel="% of the machine's float32 peak", ylim=(0, None),
             xlim=(pieces[0] * 0.8, pieces[-1] * 6))
    rates = found["forms"]["gated delta rule"]
    lab.figure(made, "blocks", f"In blocks the gated delta rule is {max(rates) / rates[0]:.1f} times as fast as token "
               "by token", "1 thread", part="kernels",
               caption="The same op in pieces of several lengths; a block has 16 tokens.")


def _models(lab, found) -> None:
    lab.heading("Whole models")
    lab.text("Tokens per second: medians, with the slowest and fastest round in brackets. Ratios are of the medians, "
             "and of the fastest rounds, which other load disturbs least. Matrices have the named type in the file, "
             "Q4_0 where none is named. Shares of the limit are of the memory bandwidth for decoding, counted in the "
             "bytes of the file that a token reads, and of the int8 peak for prompts, counted in the products of the "
             "layers' matrices; both limits are medians of measurements before each round.")
    rows = []
    for name, one in found.items():
        for work, values in one["samples"].items():
            if work.startswith("llama.cpp"):
                continue
            other = one["samples"].get(f"llama.cpp {work}")
            row = [*name.split("|"), work, _spread(values)]
            row += [_spread(other), median(values) / median(other), max(values) / max(other)] if other else ["-"] * 3
            rows.append([*row, *(_of_limit(one, work, rates) for rates in (values, other))])
    lab.table(["model", "threads", "work", "numflow", "llama.cpp", "ratio", "ratio of the fastest", "numflow of limit",
               "llama.cpp of limit"], rows)


def _of_limit(one, work: str, rates) -> str:
    """Share of what the machine allows, as far as that was measured."""
    if not rates or "read_bytes" not in one or "texts" in work:
        return "-"
    bound = ("operations", "int8_gop_s") if work.startswith("prefill") else ("read_bytes", "read_gb_s")
    return f"{100 * one[bound[0]] * median(rates) / median(one[bound[1]]) / 1e9:.0f} %"


def _spread(values) -> str:
    return f"{median(values):.4g} ({min(values):.4g} .. {max(values):.4g})"


def _positions(lab, found) -> None:
    lab.heading("Decoding along a text")
    pure, positions = next(iter(found.values())), list(map(int, next(iter(found.values()))))
    lab.table(["model", *(f"at {n}" for n in positions), "last relative to first"],
              [[name, *(_spread(own["samples"]) for own in one.values()), _last(one)] for name, one in found.items()])
    lab.claim(f"Without attention a token at {positions[-1]} takes as long as one at {positions[0]}, within 5 %.",
              abs(_last(pure) - 1) <= 0.05)
    positions_figure(lab, found)


def positions_figure(lab, found) -> None:
    """Rate of decoding by the position in the text."""
    positions = list(map(int, next(iter(found.values()))))
    made, axis = style.figure()
    for number, (name, one) in enumerate(found.items()):
        ys = [own["tok_s"] for own in one.values()]
        axis.plot(positions, ys, **style.series(number))
        style.end(axis, name.replace(" without", "\nwithout"), positions, ys, number)
    style.plain_log(axis, "x", positions)
    axis.set(xlabel="position", ylabel="tokens a second", ylim=(0, None), xlim=(positions[0] * 0.8, positions[-1] * 20))
    lab.figure(made, "positions", f"At {positions[-1]} tokens a model without attention keeps "
               f"{_last(next(iter(found.values()))):.0%} of its speed", part="positions",
               caption="Decoding by the position in the text.")


def _last(one) -> float:
    rates = [own["tok_s"] for own in one.values()]
    return rates[-1] / rates[0]


def _types(lab, found) -> None:
    lab.heading("Types of states")
    lab.text("The model without attention. The table has the difference of the logits after a text from those with "
             "float32 states, in standard deviations of the logits. States decay by 1.3 % per token. The weights are "
             "random, so this is the error of the arithmetic, not of a model's answers.")
    lab.table(["type", "MB per text", "root mean square", "largest", "decode tok/s"],
              [[row["type"], row["bytes"] / 1e6, row["rms"], row["largest"], row["tok_s"]] for row in found])


def _memory(lab, found) -> None:
    lab.heading("Memory of a text")
    lab.text("Computed, in MB, with 16-bit keys and values and float32 states. Reading: numflow's memory of a text "
             "while it processes a prompt, including the current block and the tokens of the running batch. Writing: "
             "the memory while decoding. Minimum: the memory that the architecture needs. Plain attention: the memory "
             "of the keys and values of all heads in all layers.")
    lab.table(["model", "tokens", "reading", "writing", "minimum", "reading / minimum", "writing / minimum",
               "plain attention"],
              [[row["name"], row["tokens"], row["kept"] / 1e6, row["writing"] / 1e6, row["least"] / 1e6,
                row["kept"] / row["least"], row["writing"] / row["least"], row["expanded"] / 1e6] for row in found])
