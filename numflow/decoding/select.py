"""Picking out of many numbers without sorting all of them."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from numflow.decoding.weights import part, weigh

COLUMNS = 16  # values of which one stands for all, when many are to be passed over
BLOCK = 1024  # weights that are summed up before one of them is looked for
FIRST_LOOK = 256  # values that are sorted at first; four times as many whenever that is not enough


class Candidates(NamedTuple):
    """Tokens that may come next.

    ids: int64 [n], rising. scores: float [n], their logarithmic probabilities up to a constant.
    """

    ids: np.ndarray
    scores: np.ndarray

    def keep(self, places: np.ndarray) -> "Candidates":
        """Those at `places` (any order, or a mask), in rising order."""
        if places.dtype != bool:
            places = np.sort(places)
        return Candidates(self.ids[places], self.scores[places])

    @property
    def weights(self) -> np.ndarray:
        """Probabilities up to a factor, as the scores' type; the largest is 1. Of float32 scores those of
        decoding.weights, which every device has."""
        return weigh(self.scores - np.max(self.scores)) if self.scores.dtype == np.float32 else self.exponentials

    @property
    def exponentials(self) -> np.ndarray:
        """The same but for their last bits, sooner: for what no device does."""
        below = self.scores - np.max(self.scores)
        return np.exp(below, out=below)

    @property
    def probabilities(self) -> np.ndarray:
        """Normalised, float64 [n]."""
        weights = self.weights
        return weights / np.sum(weights, dtype=np.float64)

    @property
    def surprise(self) -> np.ndarray:
        """-ln of the probabilities, as the scores' type."""
        peak = np.max(self.scores)
        return (peak + self.scores.dtype.type(np.log(np.sum(self.exponentials, dtype=np.float64)))) - self.scores


def greedy(scores: np.ndarray) -> int:
    """Place of the largest score; of equal ones the lowest."""
    return int(np.argmax(scores))


def top(values: np.ndarray, count: int) -> np.ndarray:
    """Places, rising, of the `count` largest of the values; at the border the lower ones. A partition, no sort."""
    places = _not_below(values, count) if len(values) >= 2 * COLUMNS * count else every(len(values))
    values = values[places]
    border = np.partition(values, len(values) - count)[len(values) - count]
    level = places[values == border]
    above = places[values > border]
    return np.sort(np.concatenate([above, level[: count - len(above)]]))


def largest(scores: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """The `count` of `ids`, rising, whose scores[id] are largest; at the border the lower id."""
    return ids[top(scores[ids], count)]


@lru_cache(maxsize=4)
def every(count: int) -> np.ndarray:
    """int64 0 .. count - 1; read-only, and kept, as it is as long as a vocabulary."""
    places = np.arange(count)
    places.flags.writeable = False
    return places


def _not_below(values: np.ndarray, count: int) -> np.ndarray:
    """Places of few of the values, rising, the `count` largest and all equal to them among them.

    The values are taken as columns: as many columns hold a value not below the count-th largest of their maxima.
    """
    rows = len(values) // COLUMNS
    peaks = np.max(values[:rows * COLUMNS].reshape(COLUMNS, rows), axis=0)
    return np.flatnonzero(values >= np.partition(peaks, rows - count)[rows - count])


def descending(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest values, the largest first; of equal ones the lower place first."""
    if count <= 0:
        return np.zeros(0, np.int64)
    places = top(values, count) if count < len(values) else every(len(values))
    return places[np.argsort(-values[places], kind="stable")]


def leading(values: np.ndarray, wanted: Callable[[np.ndarray], int | None]) -> np.ndarray:
    """Places of the leading values, largest first, as many as `wanted` says; looks at 256, 1024, ... of them.

    wanted: from the places that were sorted so far to how many of them are kept; None: more must be seen. It is not
            None when all places are given.
    """
    count = FIRST_LOOK
    while True:
        places = descending(values, min(count, len(values)))
        kept = wanted(places)
        if kept is not None:
            return places[:kept]
        count *= 4


def draw(ids: np.ndarray, weights: np.ndarray, uniform: float) -> int:
    """The id at `uniform` (0 .. 1) of the cumulated weights [n], which need not be normalised."""
    starts = np.arange(0, len(weights), BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = part(weights, blocks[-1], uniform)
    block = min(int(np.searchsorted(blocks, target, side="right")), len(blocks) - 1)
    weights = weights[starts[block]:starts[block] + BLOCK]
    before = blocks[block - 1] if block else 0.0
    place = int(np.searchsorted(before + np.cumsum(weights, dtype=np.float64), target, side="right"))
    if place == len(weights):  # rounding, or a uniform of 1: the last that may come
        place = int(np.flatnonzero(weights)[-1])
    return int(ids[starts[block] + place])


def uniform(seed: int, index: int, position: int, number: int = 0) -> float:
    """A random number 0 .. 1 that depends on its arguments alone (Philox, a counter-based generator).

    seed, index: of a request, and of one of its parallel samples. position: of the token. number: of those that one
    token needs.
    """
    return uniforms(seed, index, position, 1, number)[0]


def uniforms(seed: int, index: int, position: int, count: int, number: int = 0) -> list[float]:
    """The same of so many tokens, from `position` on."""
    key = np.array([seed & (2**64 - 1), index], np.uint64)
    bits = np.random.Philox(key=key, counter=[0, position, number, 0])
    generator = np.random.Generator(bits)
    found = [float(generator.random())]
    while len(found) < count:
        bits.advance(2**64 - 1)  # the counter is one further already; positions are 2^64 apart
        found.append(float(generator.random()))
    return found
