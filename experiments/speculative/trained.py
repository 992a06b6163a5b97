"""Drafts trained for numflow's own models, on texts of the training distribution that were not used in training."""

import random
import statistics
import tempfile
import time
from math import prod
from pathlib import Path

from numflow.errors import RequestError
from numflow.lab.shapes import find_shape

from . import wide

# Model, what drafts for it, and what that is.
PAIRS = (("tiny-hybrid", "mtp", "a block of its own (MTP)"), ("tiny", "tiny-eagle", "EAGLE-3"),
         ("tiny", "tiny-draft", "a draft model"))
COUNTS = (1, 2, 3, None)  # tokens that are drafted at once; None: as many as pay
TEXTS, WIDE_TEXTS = 24, 8
LARGE, SMALL, WORDS = "8b", "1b", 32000  # of what is computed: shapes, words of an EAGLE-3 draft


def measured(lab):
    """Acceptance, speed and cost of each pair, for the original models and the wide ones."""
    found, temperatures = {}, [float(text) for text in lab.options["temperatures"].split(",")]
    texts, few = (beginnings(2 if lab.quick else count) for count in (TEXTS, WIDE_TEXTS))
    found["trained"] = [row for pair in PAIRS for row in rows_of(lab, pair, pair[:2], texts, temperatures)]
    with tempfile.TemporaryDirectory() as folder:
        places = {name: wide.write(name, Path(folder), lab.quick) for name in wide.LAYERS} | {"mtp": "mtp"}
        found["wide"] = [row for pair in PAIRS for row in rows_of(
            lab, pair, [places[name] for name in pair[:2]], few, [0.0])]
    return found


def rows_of(lab, names, places, texts, temperatures):
    """Rows of a model and its draft, by temperature and number of drafts. places: of both files."""
    import numflow

    (name, draft, kind), (place, draft_place) = names, places
    with numflow.load(place, threads=lab.options["threads"], draft=draft_place) as model:
        read = bytes_read(model.core.drafters.runner.network) / bytes_read(model.network)

        def written(temperature, **how):
            return [model.generate(text, chat=chat, temperature=temperature, max_tokens=lab.options["tokens"],
                                   **({"seed": seed} if temperature else {}), **how)
                    for seed, (text, chat) in enumerate(texts)]

        written(0.0, draft_tokens=3)
        for temperature in temperatures:
            for count in COUNTS:
                lab.say(f"{name}{', wide' * (place != name)}: {draft}, temperature {temperature:g}, "
                        f"drafts {count or 'as many as pay'}")
                found = rounds(lab, model, written, temperature, count)
                yield {"model": name, "draft": draft, "kind": kind, "temperature": temperature, "guesses": count,
                       "read": read, "read_large": large_share(draft), **found}


def rounds(lab, model, written, temperature, count):
    """Texts without and with drafts, in turns; the same texts where they are greedy."""
    ratios, speeds, core = [], [], model.core
    for _ in range(lab.options["rounds"]):
        plain, before = written(temperature, speculate="off"), dict(core.counts)
        drafted = written(temperature, draft_tokens=count)
        steps, drafts, right = (core.counts[key] - before[key] for key in ("steps", "drafts", "accepted_drafts"))
        if not temperature and [one.ids for one in drafted] != [one.ids for one in plain]:
            raise RequestError("drafts changed a greedy text")
        speeds.append((speed(drafted), speed(plain)))
        ratios.append(speeds[-1][0] / speeds[-1][1])
    tok_s, plain_tok_s = map(statistics.median, zip(*speeds, strict=True))
    steps -= len(drafted)  # a step for each prompt
    tokens = sum(runs(one) for one in drafted)
    return {"speedup": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "tok_s": tok_s,
            "plain_tok_s": plain_tok_s, "drafts": drafts, "accepted": right, "tokens": tokens, "steps": steps,
            "tokens_per_step": tokens / max(1, steps),
            "cost": draft_seconds(model, lambda: written(temperature, draft_tokens=count)) * plain_tok_s}


def runs(result):
    """Number of tokens after the first one, including the end token."""
    return round(result.stats["decode_tok_s"] * result.stats["decode_s"])


def speed(results):
    """Tokens per second after the prompts."""
    return sum(map(runs, results)) / sum(one.stats["decode_s"] for one in results)


class Watched:
    """Drafters whose proposals are timed."""

    def __init__(self, drafters):
        self._drafters, self.seconds, self.drafts = drafters, 0.0, 0

    def make(self, request, sampler):
        drafter = self._drafters.make(request, sampler)
        propose = drafter.propose

        def timed(ids, limit):
            begin = time.perf_counter()
            found = propose(ids, limit)
            self.seconds += time.perf_counter() - begin
            self.drafts += len(found)
            return found

        drafter.propose = timed
        return drafter


def draft_seconds(model, work):
    """Seconds of a draft, with what the drafter runs to catch up with the text."""
    own = model.core.drafters
    watched = model.core.drafters = Watched(own)
    try:
        work()
    finally:
        model.core.drafters = own
    return watched.seconds / max(1, watched.drafts)


def beginnings(count):
    """(text, whether it is a question) from documents of another seed than the training set: the first words of
    stories, and whole questions."""
    from numflow.learn.models import stories

    rng, found = random.Random(10**7), []
    while len(found) < count:
        text, _ = stories.document(rng)
        if stories.ASSISTANT in text:
            found.append((text.partition(stories.ASSISTANT)[0].removeprefix(stories.USER), True))
        elif len(text.split()) > 12:
            found.append((" ".join(text.split()[:5]), False))
    return found


def bytes_read(network):
    """Number of weights that a token is multiplied with; all have one type."""
    return sum(prod(network.weights[name].shape) for steps in network.entries.values() for step in steps
               for role, name in step.weights.items() if role != "table" and len(network.weights[name].shape) == 2)


def large_share(draft):
    """The same share in a model of the shape LARGE: of a block with one of its layers, a projection and the output
    matrix; of an EAGLE-3 draft with WORDS words; of a draft model of the shape SMALL."""
    shape = find_shape(LARGE)
    d, head = shape.width, shape.width * shape.vocabulary
    whole = shape.weights - head  # the table of words is not read whole
    layer = (whole - head) / shape.layers
    if draft == "mtp":
        return (layer + 2 * d * d + head) / whole
    if draft == "tiny-eagle":
        wider = d * d + 2 * d * d // shape.heads * shape.kv_heads
        return (layer + wider + 3 * d * d + d * WORDS) / whole
    small = find_shape(SMALL)
    return (small.weights - small.width * small.vocabulary) / whole
