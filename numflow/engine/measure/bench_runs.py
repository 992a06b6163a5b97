"""Runs of `bench`: prompts, decoding after a context, and batched decoding."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from numflow.engine.runner.batches import BatchPart

BATCHED_CONTEXT = 32  # tokens of each sequence before batched decoding
BATCHED_STEPS = 32    # maximum number of timed steps of batched decoding


class Measure:
    """Measurements of one model, each `repeat` times, with random tokens and greedy decoding that ignores end tokens.

    report: called with a line after each run.
    """

    def __init__(self, model, repeat: int, report: Callable[[str], None]):
        self._model, self._repeat, self._report = model, repeat, report
        self._rng = random.Random(0)

    def generate(self, prompt_tokens: int, gen_tokens: int, what: str = "") -> list[dict]:
        """Statistics of runs of `generate`; every run has a new prompt, so that no prefix cache helps."""
        runs = []
        for number in range(1, self._repeat + 1):
            ids = self._tokens(prompt_tokens)
            runs.append(self._model.generate(ids, max_tokens=gen_tokens, ignore_eos=True).stats)
            self._report(f"{what}run {number} of {self._repeat}")
        return runs

    def prefill(self, lengths: Sequence[int]) -> dict[str, dict]:
        """Tokens/s of prompts of these lengths: {length: spread}."""
        return {str(n): spread([run["prefill_tok_s"] for run in self.generate(n, 1, f"prompt of {n}: ")])
                for n in lengths}

    def decode(self, contexts: Sequence[int], gen_tokens: int) -> dict[str, dict]:
        """Tokens/s of decoding `gen_tokens` tokens after prompts of these lengths (0: after a single token)."""
        return {str(n): spread([run["decode_tok_s"] for run in
                                self.generate(max(n, 1), gen_tokens + 1, f"decoding after {n}: ")])
                for n in contexts}

    def batched(self, counts: Sequence[int], gen_tokens: int) -> dict[str, dict]:
        """Total tokens/s of batched decoding of `counts` sequences, without sampling."""
        return {str(n): spread([self._batched(n, min(gen_tokens, BATCHED_STEPS), number)
                                for number in range(1, self._repeat + 1)]) for n in counts}

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._model.vocabulary) for _ in range(count)]

    def _batched(self, count: int, steps: int, number: int) -> float:
        runner = self._model.runner
        context = min(BATCHED_CONTEXT, runner.context - steps - 1)
        prompts = [np.array(self._tokens(context), np.int32) for _ in range(count)]
        with ExitStack() as stack:
            sequences = [stack.enter_context(runner.open(context + steps + 1)) for _ in range(count)]
            for sequence, prompt in zip(sequences, prompts):
                sequence.last(prompt)
            parts = [BatchPart(sequence, prompt[-1:], np.zeros(1, np.int32))
                     for sequence, prompt in zip(sequences, prompts)]
            runner.run(parts, "logits")
            begin = time.perf_counter()
            for _ in range(steps):
                runner.run(parts, "logits")
            seconds = time.perf_counter() - begin
        self._report(f"{count} sequences: run {number} of {self._repeat}")
        return count * steps / seconds


def spread(samples: Sequence[float]) -> dict:
    """{median, min, max, samples}."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": list(samples)}


def compare(ours: dict, theirs: dict) -> list[dict]:
    """Speeds in both results of `bench`: rows of what, ours, theirs (medians) and their ratio."""
    rows = []
    for what, value in _speeds(ours):
        other = dict(_speeds(theirs)).get(what)
        if other:
            rows.append({"what": what, "ours": value, "theirs": other, "ratio": value / other})
    return rows


def _speeds(result: dict) -> list[tuple[str, float]]:
    """(name, median tokens/s) of everything measured."""
    found = [(key, result[key]["median"]) for key in ("prefill_tok_s", "decode_tok_s") if key in result]
    for key, what in (("prefill", "prompt of {}"), ("decode", "decoding after {}"), ("batched", "{} sequences")):
        found += [(what.format(size), value["median"]) for size, value in result.get(key, {}).items()]
    return found
