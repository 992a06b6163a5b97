"""Tables, sentences and figures of the report."""

import itertools
import statistics

import numpy as np

from numflow.lab import style

from . import show_trained
from .show_trained import share

GUESSED = "draft and guesses"  # of the results' models
EDITS = ("spelling", "copy", "docstrings", "rename")
RESULTS = {"guesses": ("oracle", "ngram", "batch", "drafts", "models"), "trained": ("trained", "wide")}  # by part


def report(lab, about):
    """Write the report. about: the experiment's description."""
    lab.text(" ".join(about.split()))
    if "oracle" in lab.results:
        guessed(lab, lab.results)
    if "trained" in lab.results:
        show_trained.report(lab, lab.results["trained"], lab.results["wide"])


def guessed(lab, found):
    """Drafts with a known acceptance rate, n-grams, drafts made from the target."""
    made = (lab.recipes.get("guesses") or lab.recipe())["options"]
    lab.text(f"{'; '.join(f'{what}: {name}' for what, name in found['models'].items())}; {made['threads']} "
             f"thread{'s' * (made['threads'] > 1)}, {made['rounds']} rounds.")
    lab.heading("Drafts with a known acceptance rate")
    lab.text("Drafts that cost nothing, each right with the given probability, in an automatic number. Tokens per step "
             "are the tokens that one run of the model gives.")
    lab.table(["accuracy", "speed-up", "minimum", "maximum", "tokens per step", "accepted", "drafted"],
              [[r["accuracy"], r["speedup"], r["low"], r["high"], r["tokens_per_step"], r["accepted"], r["drafts"]]
               for r in found["oracle"]])
    for worse, better in itertools.pairwise(found["oracle"]):
        lab.doubt(made["rounds"] < 2 or better["high"] >= worse["low"],
                  f"free drafts that are right with {better['accuracy']:g} are slower in every round than with "
                  f"{worse['accuracy']:g}")
    lab.heading("N-grams")
    lab.table(["prompt", "drafts", "speed-up", "minimum", "maximum", "tok/s", "plain tok/s", "tokens per step",
               "accepted"],
              [[r["prompt"], r["guesses"], r["speedup"], r["low"], r["high"], r["tok_s"], r["plain_tok_s"],
                r["tokens_per_step"], share(r)] for r in found["ngram"]])
    edits = [r["speedup"] for r in found["ngram"] if r["prompt"] in EDITS]
    lab.text(f"For the editing prompts the median is {statistics.median(edits):.2f} times, the best {max(edits):.2f}. "
             f"{found['batch']['requests']} of them in a batch: {found['batch']['ngram_tok_s']:.0f} tokens/s against "
             f"{found['batch']['plain_tok_s']:.0f}, {found['batch']['speedup']:.2f} times.")
    lab.heading("Draft models")
    lab.text("Three drafts at a time. Cost: the time of a draft relative to a step of the target. At temperature 0 "
             "drafts are compared with the target's tokens; above it rejection sampling accepts them.")
    drafts_said(lab, found["drafts"])
    lab.table(["draft", "prompt", "temperature", "cost", "accepted", "tokens per step", "speed-up"],
              [[r["draft"], r["prompt"], r["temperature"], r["cost"], share(r), r["tokens_per_step"], r["speedup"]]
               for r in found["drafts"]])
    guesses_figure(lab)


def drafts_said(lab, rows):
    """Sentences on the table of drafts."""
    greedy = {(r["draft"], r["prompt"]): share(r) for r in rows if not r["temperature"]}
    pairs = [(share(r), greedy[r["draft"], r["prompt"]]) for r in rows
             if r["temperature"] and greedy.get((r["draft"], r["prompt"])) is not None and share(r) is not None]
    if pairs:
        more = sum(drawn > compared for drawn, compared in pairs)
        lab.text(f"Rejection sampling accepts more drafts than comparison in {more} of {len(pairs)} pairs.")
    paying = [r for r in rows if r["speedup"] > 1]
    lab.text(f"{len(paying)} of {len(rows)} runs with a draft are faster than without.")
    if paying:
        costs, right = [r["cost"] for r in paying], [share(r) or 0 for r in paying]
        lab.text(f"Their drafts cost {min(costs):.2f} to {max(costs):.2f} of a step, and "
                 f"{min(right):.0%} to {max(right):.0%} of them are accepted.")


def figures(lab):
    """The figures of the measured parts."""
    if "oracle" in lab.results:
        guesses_figure(lab)
    if "trained" in lab.results:
        show_trained.figure(lab, lab.results["trained"], lab.results["wide"])


def guesses_figure(lab):
    """Speed-up by the accuracy of drafts, and of n-grams by prompt."""
    made, (left, right) = style.figure(1, 2, (10.4, 4.2))
    rows = sorted(lab.results["oracle"], key=lambda row: row["accuracy"])
    xs, ys = [100 * row["accuracy"] for row in rows], [row["speedup"] for row in rows]
    bars = [[row["speedup"] - row["low"] for row in rows], [row["high"] - row["speedup"] for row in rows]]
    left.errorbar(xs, ys, bars, capsize=3, **style.series(0))
    style.end(left, "free, as many\nas pay", xs, ys, 0)
    a = np.linspace(0, 1, 101)
    for number, count in ((1, 1), (2, 3)):
        tokens = sum(a**i for i in range(count + 1))
        left.plot(100 * a, tokens, **style.series(number) | {"marker": ""})
        style.end(left, f"tokens a step,\n{count} guess{'es' * (count > 1)}", 100 * a, tokens, number)
    kinds = {"file": 3, "bits": 5, "layers": 6}
    names = {"file": "a file", "bits": "fewer bits", "layers": "fewer layers"}
    for kind in sorted({r["draft"].partition(":")[0] for r in lab.results["drafts"]}):
        own = [r for r in lab.results["drafts"] if r["draft"].startswith(kind) and share(r) is not None]
        left.plot([100 * first_right(r) for r in own], [r["speedup"] for r in own], label=f"draft: {names[kind]}",
                  **style.series(kinds[kind]) | {"linestyle": "none"})
    left.axhline(1, color=style.GREY, linewidth=0.8)
    left.set(xlabel="guesses that are right, %", ylabel="times as fast as without guesses", ylim=(0, 4.6),
             xlim=(-3, 134), xticks=range(0, 101, 20))
    left.legend(fontsize=8, loc="upper left")
    names = list(dict.fromkeys(r["prompt"] for r in lab.results["ngram"]))
    for place, guesses in enumerate(("as many as pay", 3)):
        own = {r["prompt"]: r["speedup"] for r in lab.results["ngram"] if r["guesses"] == guesses}
        right.barh(np.arange(len(names)) + 0.4 * place, [own[name] for name in names], 0.38,
                   color=style.SERIES[place][0], label=f"{guesses} guesses" if guesses == 3 else guesses)
    right.axvline(1, color=style.GREY, linewidth=0.8)
    right.set(yticks=np.arange(len(names)) + 0.2, yticklabels=names, xlabel="n-grams: times as fast as without")
    right.invert_yaxis()
    right.grid(axis="y", visible=False)
    right.legend(fontsize=8)
    pays = next((row["accuracy"] for row in rows if row["low"] > 1), None)
    lab.figure(made, "speedup", f"Free guesses pay in every round from {pays:.0%} right on" if pays is not None else
               f"No guesses paid in every round; at best {max(ys):.1f} times as fast", lab.results["models"][GUESSED],
               "bars: least and most of the rounds", part="guesses",
               caption="Left: speed-up against the accuracy of drafts. Right: n-grams by prompt.")


def first_right(row):
    """The acceptance probability of one draft that gives these tokens per step with three drafts at a time."""
    grid = np.linspace(0, 1, 1001)
    tokens = sum(grid**i for i in range(4))
    return float(grid[np.argmin(np.abs(tokens - row["tokens_per_step"]))])
