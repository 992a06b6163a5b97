"""The report's part on drafts that were trained for their models."""

from numflow.lab import style

from . import trained


def report(lab, rows):
    """Table, sentences and figure."""
    lab.heading("Drafts that were trained for their model")
    lab.text(f"Our own models and what was trained to draft for them, on {trained.TEXTS if not lab.quick else 2} "
             "beginnings of stories and questions from documents of another seed than those of training. Each round "
             "writes all texts without drafts and then with them. Greedy texts were the same, token by token: the "
             "experiment fails where one is not. Right: of the drafts that ran, those that stayed; of several at once "
             "the later ones count as wrong where an earlier one was. Tokens per step leaves out prompts. Cost: "
             "measured time of a draft as a part of a step without drafts.")
    said(lab, rows)
    lab.table(["model", "draft", "temperature", "drafts", "right", "tokens per step", "cost", "tok/s", "plain tok/s",
               "speed-up", "lowest", "highest"],
              [[r["model"], r["draft"], r["temperature"], r["guesses"] or "as many as pay", share(r),
                r["tokens_per_step"], r["cost"], r["tok_s"], r["plain_tok_s"], r["speedup"], r["low"], r["high"]]
               for r in rows])
    lab.text("These models are so small that a step hardly waits for weights, and that a draft costs more than its "
             "share of them. So the speed-up of a model whose time is that of reading weights is **computed**, not "
             "measured: t / (1 + k c), with t tokens per step as measured above, k drafts, and c the weights that a "
             "draft reads as a part of those that a step reads: in our files, and in a model of the shape "
             f"{trained.LARGE} (numflow/lab/shapes.toml). There an MTP block has a layer, a projection and the output "
             f"matrix; an EAGLE-3 draft has a layer with wider inputs, a projection and {trained.WORDS} words; a draft "
             f"model has the shape {trained.SMALL}. Whether drafts are right as often in a large model is not known "
             "from this.")
    lab.table(["model", "draft", "temperature", "drafts", "c of our files", "computed with it",
               f"c of {trained.LARGE}", "computed with it"],
              [[r["model"], r["draft"], r["temperature"], r["guesses"], r["read"], computed(r, "read"), r["read_large"],
                computed(r, "read_large")] for r in rows if r["guesses"]])
    figure(lab, rows)


def share(row):
    """Of the drafts, those that stayed."""
    return row["accepted"] / row["drafts"] if row["drafts"] else None


def computed(row, which):
    """Speed-up where reading weights takes all the time."""
    return row["tokens_per_step"] / (1 + row["guesses"] * row[which])


def said(lab, rows):
    """What the table shows, counted in it."""
    single = [r for r in rows if r["guesses"] == 1 and not r["temperature"] and r["drafts"]]
    if single:
        lab.text("Of single greedy drafts " + ", ".join(f"{share(r):.0%} of {r['draft']}'s" for r in single)
                 + " are right.")
    faster = [r for r in rows if r["low"] > 1]
    lab.text(f"{len(faster)} of {len(rows)} settings are faster than without drafts in every round"
             + (f", at best {max(r['speedup'] for r in faster):.2f} times." if faster else "."))


def figure(lab, rows):
    """Tokens per step, and speed-up as measured and as computed, by the number of greedy drafts."""
    made, (left, right) = style.figure(1, 2, (10.4, 4.2))
    greedy = [r for r in rows if not r["temperature"] and r["guesses"]]
    for number, draft in enumerate(dict.fromkeys(r["draft"] for r in greedy)):
        own = sorted((r for r in greedy if r["draft"] == draft), key=lambda r: r["guesses"])
        xs, line = [r["guesses"] for r in own], style.series(number)
        ys = [r["tokens_per_step"] for r in own]
        left.plot(xs, ys, **line)
        style.end(left, draft, xs, ys, number)
        right.plot(xs, [r["speedup"] for r in own], **line)
        ys = [computed(r, "read_large") for r in own]
        right.plot(xs, ys, **line | {"alpha": 0.45})
        style.end(right, f"{draft}, computed", xs, ys, number)
    right.axhline(1, color=style.GREY, linewidth=0.8)
    left.set(xlabel="drafts at once", ylabel="tokens per step", xticks=(1, 2, 3), xlim=(0.8, 3.9), ylim=(1, 4))
    right.set(xlabel="drafts at once", ylabel="times as fast as without", xticks=(1, 2, 3), xlim=(0.8, 4.4),
              ylim=(0, None))
    best = max(greedy, key=lambda r: r["tokens_per_step"])
    threads = (lab.recipes.get("trained") or lab.recipe())["options"]["threads"]
    lab.figure(made, "trained", f"{best['guesses']} drafts at once of {best['draft']} give "
               f"{best['tokens_per_step']:.1f} tokens per step", "our own models, greedy",
               f"{threads} thread{'s' * (threads > 1)}", part="trained",
               caption="Left: tokens that one step gives. Right: speed-up as measured on our small models (strong), "
               f"and as computed for the shape {trained.LARGE} if drafts are right as often there (pale).")
