"""From logits to one token: greedy, or drawn after temperature, min-p, top-k and top-p, in this order."""

import math
from dataclasses import dataclass

import numpy as np

from numflow.errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked.

    temperature: 0 is greedy; else logits are divided by it.
    top_k: draw from the k most probable tokens (0: all). top_p: from the fewest that reach this probability.
    min_p: drop tokens less probable than min_p times the best one. seed: None draws a different one each time.

    Raises:
        RequestError: a value out of range, or a filter that would do nothing because temperature is 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self):
        for name, good, wanted in (
                ("temperature", _number(self.temperature) and self.temperature >= 0, "a number from 0"),
                ("top_k", _integer(self.top_k) and self.top_k >= 0, "a whole number from 0"),
                ("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1"),
                ("min_p", _number(self.min_p) and 0 <= self.min_p < 1, "at least 0 and below 1"),
                ("seed", self.seed is None or (_integer(self.seed) and self.seed >= 0), "a whole number from 0")):
            if not good:
                raise RequestError(f"{name} should be {wanted}, is {getattr(self, name)!r}")
        if self.temperature == 0:
            for name, idle in (("top_k", self.top_k in (0, 1)), ("top_p", self.top_p == 1), ("min_p", self.min_p == 0)):
                if not idle:
                    raise RequestError(f"{name}={getattr(self, name)} has no effect at temperature 0, which is greedy; "
                                       "give a temperature above 0")


class Sampler:
    """Picks the tokens of one request; its random numbers depend on the seed alone."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._rng = np.random.Generator(np.random.PCG64(sampling.seed))

    def pick(self, logits: np.ndarray) -> int:
        """A token id from float32 logits [V].

        Raises:
            RequestError: the logits are not numbers.
        """
        best = greedy(logits)
        if not np.isfinite(logits[best]):
            raise RequestError("the model's logits are not finite numbers; its weights or its specification are wrong")
        if self.sampling.temperature == 0:
            return best
        ids, probabilities = distribution(logits, self.sampling)
        return draw(ids, probabilities, self._rng.random())


def greedy(logits: np.ndarray) -> int:
    """The most probable token; of equal ones the lowest id."""
    return int(np.argmax(logits))


def distribution(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that may be drawn, ids [n], with their probabilities float64 [n], for a temperature above 0."""
    scores = (logits.astype(np.float64) - float(np.max(logits))) / sampling.temperature
    ids = np.flatnonzero(scores >= math.log(sampling.min_p)) if sampling.min_p else np.arange(len(scores))
    if 0 < sampling.top_k < len(ids):
        ids = largest(scores, ids, sampling.top_k)
    weights = np.exp(scores[ids])
    if sampling.top_p < 1:
        ids, weights = nucleus(ids, weights, sampling.top_p)
    return ids, weights / np.sum(weights)


def largest(scores: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """The `count` ids of the largest scores; at the border the lower id. A partition, no sort."""
    values = scores[ids]
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = ids[values > border]
    level = ids[values == border]
    return np.sort(np.concatenate([above, level[: count - len(above)]]))


def nucleus(ids: np.ndarray, weights: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The fewest ids, most probable first, that hold `top_p` of the weight; looks at 256, 1024, ... of them."""
    wanted = top_p * np.sum(weights)
    count = 256
    while True:
        count = min(count, len(ids))
        top = largest(weights, np.arange(len(ids)), count)
        top = top[np.argsort(-weights[top], kind="stable")]
        total = np.cumsum(weights[top])
        if total[-1] >= wanted or count == len(ids):
            kept = top[: int(np.searchsorted(total, wanted)) + 1]
            return ids[kept], weights[kept]
        count *= 4


def draw(ids: np.ndarray, probabilities: np.ndarray, uniform: float) -> int:
    """The id at `uniform` (0 .. 1) of the cumulated probabilities."""
    total = np.cumsum(probabilities)
    return int(ids[min(int(np.searchsorted(total, uniform * total[-1], side="right")), len(ids) - 1)])


def _number(value) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)


def _integer(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
