"""Speculative decoding: how much faster it is, by how good the guesses are.

Guesses of a known quality (an oracle that is wrong as often as it is told to be), of drafts made of the target itself
(fewer bits, fewer layers), and of n-grams on texts that repeat their prompt; alone and in a batch. Every pair of runs
alternates, so that the machine's other work falls on both; the ratio is the median of the rounds.

Options: `model` is the draft's file and, without `target`, the target's as well; `drafts` are "bits:SCHEME" (quantised
anew), "layers:N" (the first N layers) or "file:NAME"; --quick runs a toy with random weights.
"""

import itertools
import statistics
import time
from dataclasses import replace
from functools import partial

import numpy as np

from numflow.lab import style

OPTIONS = {"model": "smollm2-135m-instruct", "target": "", "threads": 1, "rounds": 3, "tokens": 96,
           "drafts": "file:,bits:q4,bits:q3h,bits:q2,layers:24,layers:16,layers:8", "temperatures": "0,0.8"}
GUESSED = "draft and guesses"  # of the results' models
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
EDITS = ("spelling", "copy", "docstrings", "rename")


def run(lab):
    if lab.quick:
        lab.options |= {"model": "random", "rounds": 1, "tokens": 12, "drafts": "file:,layers:2", "temperatures": "0"}
    threads = lab.options["threads"]
    with open_model(lab.options["model"], threads) as model:
        model.generate(**asked(model, "copy"), max_tokens=8, speculate="ngram", draft_tokens=4)
        lab.say("guesses of a known quality")
        lab.results["oracle"] = oracle(lab, model)
        lab.say("n-grams")
        lab.results["ngram"] = ngrams(lab, model)
        lab.results["batch"] = batch(lab, model)
    with open_model(lab.options["target"] or lab.options["model"], threads) as target:
        lab.results["drafts"] = [row for name in lab.options["drafts"].split(",") for row in drafts(lab, target, name)]
    lab.results["models"] = {GUESSED: file_name(lab.options["model"]),
                             "target of drafts": file_name(lab.options["target"] or lab.options["model"])}
    report(lab)


def file_name(model):
    """The file of a model by its name alone."""
    from pathlib import Path

    from numflow import registry

    return model if model == "random" else Path(registry.resolve(model)).name


def open_model(path, threads, layers=4):
    """The model of a file; "random" is a toy that needs none."""
    import numflow
    from numflow.lab.shapes import Shape, random_network

    if path != "random":
        return numflow.load(path, threads=threads)
    return bound(*random_network(Shape(layers, 64, 4, 2, 128, 512, 512), "Q8_0"), threads)


def bound(built, checkpoint, threads):
    """A model of a network."""
    from numflow.cpu.program import Program
    from numflow.engine.model import Model
    from numflow.network import WeightSource
    from numflow.partition.cut.plan import single_device

    part = single_device(built, "cpu").part(0)
    return Model(built, Program(part, WeightSource(built, checkpoint), threads=threads, activations="int8"))


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
    """Guesses the tokens of a known text, each right with a given probability. It takes no time."""

    listens = False

    def __init__(self, paced, text, accuracy):
        self._paced, self._text, self._accuracy = paced, text, accuracy
        self._paced.draft = self._draft
        self.propose, self.accepted, self.close = paced.propose, paced.accepted, paced.close

    def _draft(self, ids, limit):
        rng = np.random.default_rng(len(ids))
        right = self._text[len(ids):len(ids) + self._paced.count(limit)]
        return [int(id) if rng.random() < self._accuracy else int(id) ^ 1 for id in right]

    def drawn_from(self, place):
        return None


class Oracles:
    """Makes oracles where a model has drafters."""

    def __init__(self, text, accuracy):
        from numflow.decoding.speculative import StepTimes

        self._times, self._text, self._accuracy = StepTimes(), text, accuracy

    def make(self, request, sampler):
        from numflow.engine.speculate.drafters import Paced

        return Oracle(Paced(self._times), self._text, self._accuracy)


def oracle(lab, model):
    """Speed-up against the quality of guesses that cost nothing."""
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
    """Prompt look-up on every prompt, with as many guesses as pay and with three."""
    rows = []
    for name in list(PROMPTS)[:1] if lab.quick else PROMPTS:
        for count in (None, 3):
            plain = partial(model.generate, **asked(model, name), max_tokens=2 * lab.options["tokens"])
            found = compare(lab, model, plain, partial(plain, speculate="ngram", draft_tokens=count))
            rows.append({"prompt": name, "guesses": count or "as many as pay", **found})
            lab.say(f"{name}: {found['speedup']:.2f}")
    return rows


def batch(lab, model):
    """The edits side by side: tokens per second of all together."""
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
    """One draft model on prompts that do not repeat themselves, greedy and drawn."""
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


def draft_model(path, kind, value, threads):
    """A model: the file itself or another, quantised anew, or cut off after some layers."""
    import numflow

    if kind == "bits":
        return numflow.load(path, weights=value, threads=threads, progress=False)
    if kind == "file" or path == "random":
        return open_model(path if path == "random" else value or path, threads, int(value or 4))
    return first_layers(numflow.registry.resolve(path), int(value), threads)


def first_layers(path, layers, threads):
    """The model of a GGUF file without its later layers."""
    from numflow import formats, network

    checkpoint = formats.open_checkpoint(path)
    key, = (key for key in checkpoint.config if key.endswith("block_count"))
    checkpoint.config[key] = layers
    own = {name: tensor for name, tensor in checkpoint.tensors.items()
           if not name.startswith("blk.") or int(name.split(".")[1]) < layers}
    checkpoint = replace(checkpoint, tensors=own)
    return bound(network.build(network.choose_spec(checkpoint, None), checkpoint), checkpoint, threads)


def step_seconds(model):
    """Median time of a token."""
    model.generate([1, 2, 3], max_tokens=4, ignore_eos=True, speculate="off")
    return statistics.median(1 / model.generate([1, 2, 3], max_tokens=12, ignore_eos=True, speculate="off")
                             .stats["decode_tok_s"] for _ in range(3))


def report(lab):
    found = lab.results
    lab.text(__doc__.split("\n\n")[1].replace("\n", " "))
    lab.text(f"{'; '.join(f'{what}: {name}' for what, name in found['models'].items())}; {lab.options['threads']} "
             f"thread{'s' * (lab.options['threads'] > 1)}, {lab.options['rounds']} rounds.")
    lab.heading("Guesses of a known quality")
    lab.text("Guesses that cost nothing, as many as pay, each right with the given probability. Tokens per step is "
             "what one run of the model gives.")
    lab.table(["accuracy", "speed-up", "lowest", "highest", "tokens per step", "right", "guessed"],
              [[r["accuracy"], r["speedup"], r["low"], r["high"], r["tokens_per_step"], r["accepted"], r["drafts"]]
               for r in found["oracle"]])
    for worse, better in itertools.pairwise(found["oracle"]):
        lab.doubt(lab.options["rounds"] < 2 or better["high"] >= worse["low"],
                  f"free guesses that are right with {better['accuracy']:g} are slower in every round than with "
                  f"{worse['accuracy']:g}")
    lab.heading("N-grams")
    lab.table(["prompt", "guesses", "speed-up", "lowest", "highest", "tok/s", "plain tok/s", "tokens per step",
               "right"],
              [[r["prompt"], r["guesses"], r["speedup"], r["low"], r["high"], r["tok_s"], r["plain_tok_s"],
                r["tokens_per_step"], share(r)] for r in found["ngram"]])
    edits = [r["speedup"] for r in found["ngram"] if r["prompt"] in EDITS]
    lab.text(f"On the edits the median is {statistics.median(edits):.2f} times, the best {max(edits):.2f}. "
             f"{found['batch']['requests']} edits side by side: {found['batch']['ngram_tok_s']:.0f} tokens/s against "
             f"{found['batch']['plain_tok_s']:.0f}, {found['batch']['speedup']:.2f} times.")
    lab.heading("Draft models")
    lab.text("Three guesses at a time. Cost: time of a guess as a part of the target's step. At temperature 0 guesses "
             "are compared, above it they pass by rejection sampling.")
    drafts_said(lab, found["drafts"])
    lab.table(["draft", "prompt", "temperature", "cost", "right", "tokens per step", "speed-up"],
              [[r["draft"], r["prompt"], r["temperature"], r["cost"], share(r), r["tokens_per_step"], r["speedup"]]
               for r in found["drafts"]])
    figures(lab)


def drafts_said(lab, rows):
    """What the table of drafts shows, counted in it."""
    greedy = {(r["draft"], r["prompt"]): share(r) for r in rows if not r["temperature"]}
    pairs = [(share(r), greedy[r["draft"], r["prompt"]]) for r in rows
             if r["temperature"] and greedy.get((r["draft"], r["prompt"])) is not None and share(r) is not None]
    if pairs:
        more = sum(drawn > compared for drawn, compared in pairs)
        lab.text(f"Rejection sampling lets more guesses pass than comparing in {more} of {len(pairs)} pairs.")
    paying = [r for r in rows if r["speedup"] > 1]
    lab.text(f"{len(paying)} of {len(rows)} runs with a draft are faster than without.")
    if paying:
        costs, right = [r["cost"] for r in paying], [share(r) or 0 for r in paying]
        lab.text(f"Their drafts cost {min(costs):.2f} to {max(costs):.2f} of a step and are right with "
                 f"{min(right):.0%} to {max(right):.0%} of their guesses.")


def share(row):
    """Of the guesses, those that stayed."""
    return row["accepted"] / row["drafts"] if row["drafts"] else None


def figures(lab):
    """Speed-up by the quality of guesses, and of n-grams by prompt."""
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
               "bars: least and most of the rounds",
               caption="Left: speed-up against the quality of guesses. Right: n-grams by prompt.")


def redraw(lab):
    """The figure from results alone."""
    figures(lab)


def first_right(row):
    """The probability of one guess that gives these tokens per step with three guesses at a time."""
    grid = np.linspace(0, 1, 1001)
    tokens = sum(grid**i for i in range(4))
    return float(grid[np.argmin(np.abs(tokens - row["tokens_per_step"]))])
