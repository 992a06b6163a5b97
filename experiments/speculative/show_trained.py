"""The report's part on drafts that were trained for their models."""

from numflow.lab import style

from . import trained, wide


def report(lab, rows, wider):
    """Tables, sentences and figure; wider: rows of models that were made wide."""
    lab.heading("Drafts trained for their model")
    lab.text(f"numflow's own models and their trained drafts, on {trained.TEXTS if not lab.quick else 2} beginnings of "
             "stories and questions from documents with another seed than the training text. Each round writes all "
             "texts without drafts and then with drafts. Greedy texts are the same, token by token: the experiment "
             "fails otherwise. Right: the share of drafts that were accepted; of several drafts at once, those after a "
             "wrong one count as wrong. Tokens per step do not count prompts. Cost: the measured time of a draft "
             "relative to a step without drafts.")
    said(lab, rows)
    columns = ["right", "tokens per step", "cost", "tok/s", "plain tok/s", "speed-up", "lowest", "highest"]
    lab.table(["model", "draft", "temperature", "drafts", *columns],
              [[r["model"], r["draft"], r["temperature"], r["guesses"] or "automatic", *cells(r)] for r in rows])
    lab.heading("The same models, limited by reading weights")
    lab.text("A step of these small models is limited by software overhead, not by reading weights. So this table uses "
             "the same models made wide and deep by weights that do not change the results "
             f"(experiments/speculative/wide.py): {wide.LAYERS['tiny']} layers with {wide.FFN} columns inside each "
             "feed-forward layer, in float32; a block has one such layer, the draft model "
             f"{wide.LAYERS['tiny-draft']}. Speed is measured on the first "
             f"{trained.WIDE_TEXTS if not lab.quick else 2} texts, greedy. c: the weights that a draft reads relative "
             "to those that a step reads. Expected: "
             "t / (1 + k c) with t tokens per step and k drafts, the speed-up if reading weights took all the time.")
    said(lab, wider)
    for row in wider:
        lab.doubt(row["low"] <= 1.1 * row["tokens_per_step"], f"drafts of {row['draft']} make texts "
                  f"{row['low']:.2f} times as fast in every round, and give {row['tokens_per_step']:.2f} tokens a step")
    lab.table(["model", "draft", "drafts", "c", *columns, "expected"],
              [[r["model"], r["draft"], r["guesses"] or "automatic", r["read"], *cells(r),
                computed(r, "read") if r["guesses"] else None] for r in wider])
    lab.text(f"In large models the output matrix is large, so c is larger. The next table is **computed**, not "
             f"measured, with the same formula for a model of the shape {trained.LARGE} (numflow/lab/shapes.toml) and "
             "the tokens per step of the first table. An MTP block has a layer, a projection and the output matrix; "
             f"an EAGLE-3 draft has a layer with wider inputs, a projection and {trained.WORDS} words; a draft model "
             f"has the shape {trained.SMALL}. This does not show whether drafts are right as often in a large model.")
    lab.table(["draft", "temperature", "drafts", "c", "computed speed-up"],
              [[r["draft"], r["temperature"], r["guesses"], r["read_large"], computed(r, "read_large")]
               for r in rows if r["guesses"]])
    figure(lab, rows, wider)


def cells(row):
    """Measured values of a row, as the tables have them."""
    return [share(row), *(row[key] for key in ("tokens_per_step", "cost", "tok_s", "plain_tok_s", "speedup", "low",
                                               "high"))]


def share(row):
    """Share of accepted drafts."""
    return row["accepted"] / row["drafts"] if row["drafts"] else None


def computed(row, which):
    """Speed-up if reading weights takes all the time."""
    return row["tokens_per_step"] / (1 + row["guesses"] * row[which])


def said(lab, rows):
    """Sentences on the table."""
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
               caption="Left: tokens per step. Right: measured speed-up of our models made wide and deep by weights "
               "that do not change the results (strong), and of the original models (pale).")


def line(rows, draft):
    """Numbers of greedy drafts at once, tokens per step, speed-ups."""
    own = sorted((r for r in rows if r["draft"] == draft and r["guesses"] and not r["temperature"]),
                 key=lambda r: r["guesses"])
    return tuple([r[key] for r in own] for key in ("guesses", "tokens_per_step", "speedup"))
