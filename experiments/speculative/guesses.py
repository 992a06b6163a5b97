"""Drafts with a known acceptance rate, n-gram drafts, and draft models made from the target."""

import statistics
import time
from functools import partial

import numpy as np

from .models import draft_model, step_seconds
from .show import EDITS

ACCURACIES = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
NOTE = """The committee met on Monday to discus the new budget. The members agreed that the budget should be approved \
befor the end of the month. The chairman said that the budget would be publishd on Friday, and that the members of the \
commitee would be informed by letter."""
CODE = """def total(prices):
    result = 0
    for price in prices:
        result = result + price
    return result

def average(prices):
    result = 0
    for price in prices:
        result = result + price
    return result / len(prices)
"""
PROMPTS = {
    "spelling": f"Correct the spelling and return the whole text:\n{NOTE}",
    "copy": f"Repeat the following text exactly:\n{NOTE}",
    "docstrings": f"Add a docstring to each function and return the whole file:\n{CODE}",
    "rename": f"Rename `prices` to `values` everywhere in this Python code and return only the code:\n{CODE}",
    "question": "Explain in three sentences why the sky is blue.",
    "story": "Write a short story about a lighthouse keeper and a storm.",
}


def asked(model, name):
    """A prompt as `generate` takes it, continued greedily; ids for a toy that has no tokenizer."""
    if model.runner.vocabulary == 512:
        return {"prompt": [len(name), *range(40, 60), *range(40, 50)], "temperature": 0}
    return {"prompt": PROMPTS[name], "chat": True, "temperature": 0}


def compare(lab, model, plain, guessing):
    """Alternating calls; {tok_s, plain_tok_s, speedup, accepted, drafts, tokens per step} of the second."""
    ratios, speeds, counts = [], [], {}
    for _ in range(lab.options["rounds"]):
        before = plain().stats["decode_tok_s"]
        start = dict(model.core.counts)
        result = guessing()
        counts = {name: model.core.counts[name] - start[name] for name in ("drafts", "accepted_drafts", "steps")}
        speeds.append((result.stats["decode_tok_s"], before))
        ratios.append(speeds[-1][0] / before if before else 1.0)
    fast, slow = map(statistics.median, zip(*speeds, strict=True))
    return {"speedup": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "tok_s": fast,
            "plain_tok_s": slow, "accepted": counts["accepted_drafts"], "drafts": counts["drafts"],
            "tokens_per_step": len(result.ids) / max(1, counts["steps"])}


class Oracle:
    """Drafter that proposes the tokens of a known text, each right with a given probability, at no cost."""

    needs_streams = False

    def __init__(self, paced, text, accuracy):
        self._paced, self._text, self._accuracy = paced, text, accuracy
        self._paced.draft = self._draft
        self.propose, self.accepted, self.close = paced.propose, paced.accepted, paced.close

    def _draft(self, ids, limit):
        rng = np.random.default_rng(len(ids))
        right = self._text[len(ids):len(ids) + self._paced.count(limit)]
        return [int(id) if rng.random() < self._accuracy else int(id) ^ 1 for id in right]

    def distribution(self, index):
        return None


class Oracles:
    """Makes oracles where a model has drafters."""

    def __init__(self, text, accuracy):
        from numflow.decoding.speculative import StepTimes

        self._times, self._text, self._accuracy = StepTimes(), text, accuracy

    def make(self, request, sampler):
        from numflow.engine.speculate.drafters import SpeedDrafter

        return Oracle(SpeedDrafter(self._times), self._text, self._accuracy)


def oracle(lab, model):
    """Speed-up by the accuracy of drafts that cost nothing."""
    from numflow.engine.request.settings import Settings
    from numflow.engine.run.streaming import together

    settings = {**asked(model, "story"), "max_tokens": lab.options["tokens"], "ignore_eos": True}
    text = model.generate(**settings).ids
    request = model.request(settings.pop("prompt"), Settings.of(settings))
    text = [*request.prefix.tolist(), *text]
    rows = []
    for accuracy in ACCURACIES[::7] if lab.quick else ACCURACIES:
        oracles = Oracles(text, accuracy)

        def guessing(oracles=oracles):
            own, model.core.drafters = model.core.drafters, oracles
            try:
                return together(model.core, [request], model.text_decoder)[0]
            finally:
                model.core.drafters = own

        rows.append({"accuracy": accuracy, **compare(
            lab, model, lambda: together(model.core, [request], model.text_decoder)[0], guessing)})
    if rows[-1]["accepted"] < rows[-1]["drafts"]:
        raise ValueError("the model does not write the text that the oracle knows: its accuracy means nothing")
    return rows


def ngrams(lab, model):
    """N-gram drafts on every prompt, with an automatic number of drafts and with three."""
    rows = []
    for name in list(PROMPTS)[:1] if lab.quick else PROMPTS:
        for count in (None, 3):
            plain = partial(model.generate, **asked(model, name), max_tokens=2 * lab.options["tokens"])
            found = compare(lab, model, plain, partial(plain, speculate="ngram", draft_tokens=count))
            rows.append({"prompt": name, "guesses": count or "as many as pay", **found})
            lab.say(f"{name}: {found['speedup']:.2f}")
    return rows


def batch(lab, model):
    """The editing prompts in a batch: tokens per second in total."""
    common = asked(model, "copy")
    prompts = [asked(model, name)["prompt"] for name in EDITS]
    del common["prompt"]

    def speed(**settings):
        begin = time.perf_counter()
        results = model.generate_batch(prompts, max_tokens=lab.options["tokens"], **common, **settings)
        return sum(len(result.ids) for result in results) / (time.perf_counter() - begin)

    pairs = [(speed(), speed(speculate="ngram")) for _ in range(lab.options["rounds"])]
    plain, guessing = map(statistics.median, zip(*pairs, strict=True))
    return {"requests": len(prompts), "plain_tok_s": plain, "ngram_tok_s": guessing,
            "speedup": statistics.median(b / a for a, b in pairs)}


def drafts(lab, target, name):
    """One draft model on prompts without repetition, greedy and sampled."""
    kind, _, value = name.partition(":")
    lab.say(f"draft {name}")
    with draft_model(lab.options["model"], kind, value, lab.options["threads"]) as draft:
        target.draft = draft
        cost = step_seconds(draft) / step_seconds(target)
        for prompt in ("question",) if lab.quick else ("question", "story"):
            for temperature in map(float, lab.options["temperatures"].split(",")):
                settings = asked(target, prompt) | {"temperature": temperature, "seed": 1}
                both = partial(target.generate, max_tokens=lab.options["tokens"], ignore_eos=True, **settings)
                found = compare(lab, target, partial(both, speculate="off"), partial(both, draft_tokens=3))
                yield {"draft": name, "prompt": prompt, "temperature": temperature, "cost": cost, **found}
        target.draft = None
