"""Selection from large arrays without a full sort: top k, leading values, random draws."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from numflow.decoding.weights import part, weigh

COLUMNS = 16  # values per group; groups whose maximum is too small are skipped
BLOCK = 1024  # weights per block: cumulated by blocks first, then within one block
FIRST_LOOK = 256  # values sorted at first; four times as many whenever they are not enough


class Candidates(NamedTuple):
    """Candidates for the next token.

    ids: int64 [n], ascending. scores: float [n], log-probabilities up to a constant.
    """

    ids: np.ndarray
    scores: np.ndarray

    def keep(self, indices: np.ndarray) -> "Candidates":
        """Candidates at `indices` (in any order, or a mask), in ascending order."""
        if indices.dtype != bool:
            indices = np.sort(indices)
        return Candidates(self.ids[indices], self.scores[indices])

    @property
    def weights(self) -> np.ndarray:
        """Unnormalised probabilities of the scores' type; the largest is 1. float32 scores use decoding.weights, which
        gives the same bits on every device."""
        return weigh(self.scores - np.max(self.scores)) if self.scores.dtype == np.float32 else self.exponentials

    @property
    def exponentials(self) -> np.ndarray:
        """Unnormalised probabilities by np.exp: faster than `weights` and different in the last bits; for filters that
        run on the host only."""
        below = self.scores - np.max(self.scores)
        return np.exp(below, out=below)

    @property
    def probabilities(self) -> np.ndarray:
        """Normalised probabilities, float64 [n]."""
        weights = self.weights
        return weights / np.sum(weights, dtype=np.float64)

    @property
    def surprise(self) -> np.ndarray:
        """Surprise -ln p of the scores' type."""
        peak = np.max(self.scores)
        return (peak + self.scores.dtype.type(np.log(np.sum(self.exponentials, dtype=np.float64)))) - self.scores


def greedy(scores: np.ndarray) -> int:
    """Index of the largest score; ties: lowest index."""
    return int(np.argmax(scores))


def top(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of the `count` largest values; ties at the border: lower indices. A partition, no sort."""
    indices = _not_below(values, count) if len(values) >= 2 * COLUMNS * count else all_indices(len(values))
    values = values[indices]
    border = np.partition(values, len(values) - count)[len(values) - count]
    ties = indices[values == border]
    larger = indices[values > border]
    return np.sort(np.concatenate([larger, ties[: count - len(larger)]]))


def largest(scores: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """The `count` of `ids`, ascending, with the largest scores[id]; ties at the border: lower ids."""
    return ids[top(scores[ids], count)]


@lru_cache(maxsize=4)
def all_indices(count: int) -> np.ndarray:
    """int64 0 .. count - 1; read-only and cached, since the array has vocabulary size."""
    indices = np.arange(count)
    indices.flags.writeable = False
    return indices


def _not_below(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of a superset of the `count` largest values and their ties.

    Values are grouped into columns of COLUMNS values. At least `count` values are not below the count-th largest column
    maximum, so all smaller values can be skipped.
    """
    rows = len(values) // COLUMNS
    peaks = np.max(values[:rows * COLUMNS].reshape(COLUMNS, rows), axis=0)
    return np.flatnonzero(values >= np.partition(peaks, rows - count)[rows - count])


def descending(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest values in descending order; ties: lower index first."""
    if count <= 0:
        return np.zeros(0, np.int64)
    indices = top(values, count) if count < len(values) else all_indices(len(values))
    return indices[np.argsort(-values[indices], kind="stable")]


def leading(values: np.ndarray, wanted: Callable[[np.ndarray], int | None]) -> np.ndarray:
    """Indices of the leading values in descending order, as many as `wanted` returns; sorts 256, 1024, ... values.

    wanted: function from the sorted indices to the number of them that are kept, None if more are needed; not
            None when all indices are given.
    """
    count = FIRST_LOOK
    while True:
        indices = descending(values, min(count, len(values)))
        count_kept = wanted(indices)
        if count_kept is not None:
            return indices[:count_kept]
        count *= 4


def draw(ids: np.ndarray, weights: np.ndarray, uniform: float) -> int:
    """Sample an id by inverting the cumulative weights [n] (not normalised) at `uniform` (0 .. 1)."""
    starts = np.arange(0, len(weights), BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = part(weights, blocks[-1], uniform)
    block = min(int(np.searchsorted(blocks, target, side="right")), len(blocks) - 1)
    weights = weights[starts[block]:starts[block] + BLOCK]
    before = blocks[block - 1] if block else 0.0
    offset = int(np.searchsorted(before + np.cumsum(weights, dtype=np.float64), target, side="right"))
    if offset == len(weights):  # rounding, or a uniform of 1: the last id with a weight
        offset = int(np.flatnonzero(weights)[-1])
    return int(ids[starts[block] + offset])


def uniform(seed: int, index: int, position: int, stream: int = 0) -> float:
    """Random number 0 .. 1 that depends only on the arguments (Philox, a counter-based generator).

    seed: of the request. index: of the sample within the request. position: of the token. stream: index of the random
    number at this position.
    """
    return uniforms(seed, index, position, 1, stream)[0]


def uniforms(seed: int, index: int, position: int, count: int, stream: int = 0) -> list[float]:
    """Random numbers of `count` tokens from `position` on; see `uniform`."""
    key = np.array([seed & (2**64 - 1), index], np.uint64)
    bits = np.random.Philox(key=key, counter=[0, position, stream, 0])
    generator = np.random.Generator(bits)
    found = [float(generator.random())]
    while len(found) < count:
        bits.advance(2**64 - 1)  # the counter has advanced by one already; positions are 2^64 apart
        found.append(float(generator.random()))
    return found
