"""Picking out of many numbers without sorting all of them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

COLUMNS = 16  # values of which one stands for all, when many are to be passed over
FIRST_LOOK = 256  # values that are sorted at first; four times as many whenever that is not enough


class Candidates(NamedTuple):
    """Tokens that may come next.

    ids: int64 [n], rising. scores: float64 [n], their logarithmic probabilities up to a constant.
    """

    ids: np.ndarray
    scores: np.ndarray

    def keep(self, places: np.ndarray) -> "Candidates":
        """Those at `places` (any order, or a mask), in rising order."""
        if places.dtype != bool:
            places = np.sort(places)
        return Candidates(self.ids[places], self.scores[places])

    @property
    def probabilities(self) -> np.ndarray:
        """Normalised, float64 [n]."""
        weights = np.exp(self.scores - np.max(self.scores))
        return weights / np.sum(weights)


def greedy(scores: np.ndarray) -> int:
    """Place of the largest score; of equal ones the lowest."""
    return int(np.argmax(scores))


def largest(scores: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """The `count` of `ids`, rising, whose scores[id] are largest; at the border the lower id. A partition, no sort."""
    values = scores[ids]
    if len(values) >= 2 * COLUMNS * count:
        places = _not_below(values, count)
        ids, values = ids[places], values[places]
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = ids[values > border]
    level = ids[values == border]
    return np.sort(np.concatenate([above, level[: count - len(above)]]))


def _not_below(values: np.ndarray, count: int) -> np.ndarray:
    """Places of few of the values, rising, the `count` largest and all equal to them among them.

    The values are taken as columns: as many columns hold a value not below the count-th largest of their maxima.
    """
    rows = len(values) // COLUMNS
    peaks = np.max(values[:rows * COLUMNS].reshape(COLUMNS, rows), axis=0)
    return np.flatnonzero(values >= np.partition(peaks, rows - count)[rows - count])


def descending(values: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest values, the largest first; of equal ones the lower place first."""
    places = np.arange(len(values))
    if count <= 0:
        return places[:0]
    if count < len(values):
        places = largest(values, places, count)
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


def draw(ids: np.ndarray, probabilities: np.ndarray, uniform: float) -> int:
    """The id at `uniform` (0 .. 1) of the cumulated probabilities."""
    total = np.cumsum(probabilities)
    return int(ids[min(int(np.searchsorted(total, uniform * total[-1], side="right")), len(ids) - 1)])


def uniform(seed: int, index: int, position: int, number: int = 0) -> float:
    """A random number 0 .. 1 that depends on its arguments alone (Philox, a counter-based generator).

    seed, index: of a request, and of one of its parallel samples. position: of the token. number: of those that one
    token needs.
    """
    key = np.array([seed & (2**64 - 1), index], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=[0, position, number, 0])).random())
