"""Speculative decoding: how much faster it is, by how good the guesses are.

Guesses of a known quality (an oracle that is wrong as often as it is told to be), of drafts made of the target itself
(fewer bits, fewer layers), and of n-grams on texts that repeat their prompt; alone and in a batch. Then drafts that
were trained for a model of our own: a block in its file (MTP), a block beside it (EAGLE-3), a small model. Every pair
of runs alternates, so that the machine's other work falls on both; the ratio is the median of the rounds.

Options: `parts` are what is measured, guesses or trained; the report keeps what it had of the other. Of the first,
`model` is the draft's file and, without `target`, the target's as well; `drafts` are "bits:SCHEME" (quantised anew),
"layers:N" (the first N layers) or "file:NAME". --quick runs a toy with random weights, and two texts of trained models.
"""

from pathlib import Path

from numflow import registry
from numflow.errors import RequestError

from . import guesses, show, trained
from .models import open_model

PARTS = "guesses,trained"
OPTIONS = {"parts": PARTS, "model": "smollm2-135m-instruct", "target": "", "threads": 1, "rounds": 3, "tokens": 96,
           "drafts": "file:,bits:q4,bits:q3h,bits:q2,layers:24,layers:16,layers:8", "temperatures": "0,0.8"}


def run(lab):
    if lab.quick:
        lab.options |= {"model": "random", "rounds": 1, "tokens": 12, "drafts": "file:,layers:2", "temperatures": "0"}
    parts, measures = lab.options["parts"].split(","), {"guesses": guessed, "trained": trained.measured}
    if unknown := set(parts) - set(measures):
        raise RequestError(f"option parts: no part {min(unknown)!r}, expected some of {PARTS}")
    before = {} if lab.quick else lab.before().get("results", {})
    for part, measure in measures.items():
        if part in parts:
            lab.results |= measure(lab)
            lab.measured(part)
        elif own := {key: before[key] for key in show.RESULTS[part] if key in before}:
            lab.results |= own
            lab.kept(part)
    show.report(lab, __doc__.split("\n\n")[1])


def guessed(lab):
    """Guesses of a known quality, n-grams, and drafts made of the target."""
    found, threads = {}, lab.options["threads"]
    with open_model(lab.options["model"], threads) as model:
        model.generate(**guesses.asked(model, "copy"), max_tokens=8, speculate="ngram", draft_tokens=4)
        lab.say("guesses of a known quality")
        found["oracle"] = guesses.oracle(lab, model)
        lab.say("n-grams")
        found["ngram"] = guesses.ngrams(lab, model)
        found["batch"] = guesses.batch(lab, model)
    target = lab.options["target"] or lab.options["model"]
    with open_model(target, threads) as model:
        found["drafts"] = [row for name in lab.options["drafts"].split(",") for row in guesses.drafts(lab, model, name)]
    return found | {"models": {show.GUESSED: file_name(lab.options["model"]), "target of drafts": file_name(target)}}


def file_name(model):
    """The file of a model by its name alone."""
    return model if model == "random" else Path(registry.resolve(model)).name


def redraw(lab):
    """The figures from results alone."""
    show.figures(lab)
