"""The report's part on drafts that were trained for their models."""

from numflow.lab import style

from . import trained, wide


def report(lab, rows, wider):
    """Tables, sentences and figure; wider: rows of models that were made wide."""
    lab.heading("Drafts that were trained for their model")
    lab.text(f"Our own models and what was trained to draft for them, on {trained.TEXTS if not lab.quick else 2} "
             "beginnings of stories and questions from documents of another seed than those of training. Each round "
             "writes all texts without drafts and then with them. Greedy texts were the same, token by token: the "
             "experiment fails where one is not. Right: of the drafts that ran, those that stayed; of several at once "
             "the later ones count as wrong where an earlier one was. Tokens per step leaves out prompts. Cost: "
             "measured time of a draft as a part of a step without drafts.")
    said(lab, rows)
    columns = ["right", "tokens per step", "cost", "tok/s", "plain tok/s", "speed-up", "lowest", "highest"]
    lab.table(["model", "draft", "temperature", "drafts", *columns],
              [[r["model"], r["draft"], r["temperature"], r["guesses"] or "as many as pay", *cells(r)] for r in rows])
    lab.heading("The same where reading weights decides")
    lab.text("A step of these models waits for programs rather than for weights. So here they are made wide and deep "
             f"by weights that change nothing (experiments/speculative/wide.py): {wide.LAYERS['tiny']} layers with "
             f"{wide.FFN} numbers inside each feed-forward layer, in float32; a block has one such layer, the draft "
             f"model {wide.LAYERS['tiny-draft']}. What they say is the same. Speed is measured on the first "
             f"{trained.WIDE_TEXTS if not lab.quick else 2} of the texts, greedy. c: weights that a draft reads "
             "as a part of those that a step reads. Expected: t / (1 + k c), t tokens per step and k drafts, if "
             "reading weights took all the time.")
    said(lab, wider)
    for row in wider:
        lab.doubt(row["low"] <= 1.1 * row["tokens_per_step"], f"drafts of {row['draft']} make texts "
                  f"{row['low']:.2f} times as fast in every round, and give {row['tokens_per_step']:.2f} tokens a step")
    lab.table(["model", "draft", "drafts", "c", *columns, "expected"],
              [[r["model"], r["draft"], r["guesses"] or "as many as pay", r["read"], *cells(r),
                computed(r, "read") if r["guesses"] else None] for r in wider])
    lab.text(f"Large models have large output matrices, so c is more there. **Computed**, not measured, by the same "
             f"formula for a model of the shape {trained.LARGE} (numflow/lab/shapes.toml) with the tokens per step of "
             "the first table: an MTP block has a layer, a projection and the output matrix; an EAGLE-3 draft a layer "
             f"with wider inputs, a projection and {trained.WORDS} words; a draft model has the shape {trained.SMALL}. "
             "Whether drafts are right as often in a large model is not known from this.")
    lab.table(["draft", "temperature", "drafts", "c", "computed speed-up"],
              [[r["draft"], r["temperature"], r["guesses"], r["read_large"], computed(r, "read_large")]
               for r in rows if r["guesses"]])
    figure(lab, rows, wider)


def cells(row):
    """Measured values of a row, as the tables have them."""
    return [share(row), *(row[key] for key in ("tokens_per_step", "cost", "tok_s", "plain_tok_s", "speedup", "low",
                                               "high"))]


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


def figure(lab, rows, wider):
    """Tokens per step, and speed-up of the small models and of the wide ones, by the number of greedy drafts."""
    made, (left, right) = style.figure(1, 2, (10.4, 4.2))
    for number, (_, draft, _) in enumerate(trained.PAIRS):
        (xs, tokens, small), (_, _, wide_) = (line(of, draft) for of in (rows, wider))
        left.plot(xs, tokens, **style.series(number))
        style.end(left, draft, xs, tokens, number)
        right.plot(xs, small, **style.series(number) | {"alpha": 0.45})
        right.plot(xs, wide_, **style.series(number))
        style.end(right, draft, xs, wide_, number)
    right.axhline(1, color=style.GREY, linewidth=0.8)
    left.set(xlabel="drafts at once", ylabel="tokens per step", xticks=(1, 2, 3), xlim=(0.8, 3.9), ylim=(1, 4))
    right.set(xlabel="drafts at once", ylabel="times as fast as without", xticks=(1, 2, 3), xlim=(0.8, 3.9),
              ylim=(0, None))
    best = max((r for r in wider if r["guesses"]), key=lambda r: r["speedup"])
    threads = (lab.recipes.get("trained") or lab.recipe())["options"]["threads"]
    lab.figure(made, "trained", f"Where reading weights decides, drafts of {best['draft']}, {best['guesses']} at once, "
               f"make texts {best['speedup']:.1f} times as fast", "our own models, greedy",
               f"{threads} thread{'s' * (threads > 1)}", part="trained",
               caption="Left: tokens that one step gives. Right: speed-up, as measured on our models made wide and "
               "deep by weights that change nothing (strong), and as they are (pale).")


def line(rows, draft):
    """Numbers of greedy drafts at once, tokens per step, speed-ups."""
    own = sorted((r for r in rows if r["draft"] == draft and r["guesses"] and not r["temperature"]),
                 key=lambda r: r["guesses"])
    return tuple([r[key] for r in own] for key in ("guesses", "tokens_per_step", "speedup"))
