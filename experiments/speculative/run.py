"""Speculative decoding: speed-up by the acceptance rate of drafts.

The first part, `guesses`, measures drafts with a known acceptance rate (an oracle that is wrong at a given rate),
drafts made from the target itself (fewer bits, fewer layers), and n-gram drafts on texts that repeat their prompt; for
single requests and in a batch. The second part, `trained`, measures drafts trained for numflow's own models: a block in
the model's file (MTP), a separate block (EAGLE-3), a small model. The two runs of a pair alternate, so other load on
the machine affects both; the ratio is the median of the rounds.

Options: `parts` selects guesses, trained or both; the report keeps its earlier results of the other part. For guesses,
`model` is the file of the draft and, without `target`, of the target too; `drafts` are "bits:SCHEME" (quantised again),
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
    """Drafts with a known acceptance rate, n-grams, and drafts made from the target."""
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
