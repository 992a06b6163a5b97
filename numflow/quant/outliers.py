"""Outliers of a matrix by Inferflow's rule: a few extreme weights are moved to a sparse matrix to narrow block ranges.

`split` follows Inferflow's rules for its "delta tensor":
1. Histogram of the matrix with 100 buckets. The end bucket with fewer weights is removed repeatedly, as long as the
removed
   weights are at most `ratio` of all. Removed weights are moved.
2. In each block of 32 of the rest, the weight farthest from the block's mean is moved too, if the block's range is at
least
   0.7 of the remaining range of the matrix, the weight's distance from the mean is over 0.4 of that range, and without
   it the block's range is below 0.7 of its former range.
A moved weight is 0 in the dense matrix and exact in the sparse one. A product with the matrix is the sum of both
products.
"""

from dataclasses import dataclass, field

import numpy as np

from numflow.errors import RequestError

LARGEST_RATIO = 0.05
_BUCKETS, _BLOCK = 100, 32
_WIDE, _FAR, _SHRUNK = 0.7, 0.4, 0.7


@dataclass(frozen=True)
class Sparse:
    """A sparse matrix [N, K] in CSR form.

    starts:  uint32 [N + 1], index of each row's first value.
    columns: uint16 [S], or uint32 where K is over 65536; ascending in a row.
    values:  float32 [S].
    """

    shape: tuple[int, int]
    starts: np.ndarray = field(repr=False)
    columns: np.ndarray = field(repr=False)
    values: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, x: np.ndarray, mask: np.ndarray) -> "Sparse":
        """The values of `x` float32 [N, K] where `mask` is true."""
        counts = np.count_nonzero(mask, axis=1)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        index = np.uint16 if x.shape[1] <= 1 << 16 else np.uint32
        return cls(x.shape, starts, np.nonzero(mask)[1].astype(index), x[mask].astype(np.float32))

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.starts.nbytes + self.columns.nbytes + self.values.nbytes

    @property
    def rows(self) -> np.ndarray:
        """Row of each value, int64 [S]."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.starts.astype(np.int64)))

    def add_to(self, x: np.ndarray) -> np.ndarray:
        """Add the values to `x` float32 [N, K] in place; returns x."""
        x[self.rows, self.columns] += self.values
        return x

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        """float32 [K, T] -> float32 [N, T]"""
        result = np.zeros((self.shape[0], x.shape[1]), np.float32)
        np.add.at(result, self.rows, self.values[:, None] * x[self.columns])
        return result


def split(x: np.ndarray, ratio: float) -> tuple[np.ndarray, Sparse]:
    """`x` float32 [N, K] as (dense float32 [N, K] with zeros where weights were moved, the moved weights).

    Args:
        ratio: maximal share of weights moved by step 1, 0 to 0.05; 0 moves no weight at all.

    Raises:
        RequestError: the ratio is out of range, or K is no multiple of 32.
    """
    if not 0 <= ratio <= LARGEST_RATIO:
        raise RequestError(f"the share of outliers should be 0 to {LARGEST_RATIO}, is {ratio:g}")
    mask = extremes(x, ratio) if ratio else np.zeros(x.shape, bool)
    return np.where(mask, np.float32(0), x), Sparse.of(x, mask)


def extremes(x: np.ndarray, ratio: float) -> np.ndarray:
    """Mask of the weights that `split` moves, bool [N, K]."""
    if x.shape[1] % _BLOCK:
        raise RequestError(f"outliers are looked for in blocks of {_BLOCK}, which do not divide {x.shape[1]} columns")
    low, high = _soft_limits(x, ratio)
    mask = (x < low) | (x > high)
    blocks = np.ma.array(x, mask=mask).reshape(-1, _BLOCK)
    distance = np.abs(blocks - blocks.mean(axis=1)[:, None])
    item = distance.argmax(axis=1, fill_value=-1)
    rows = np.arange(len(item))
    without = blocks.copy()
    without[rows, item] = np.ma.masked
    span, rest = (part.max(axis=1) - part.min(axis=1) for part in (blocks, without))
    whole = high - low
    moved = (span >= _WIDE * whole) & (distance[rows, item] > _FAR * whole) & (rest < _SHRUNK * span)
    mask.reshape(-1, _BLOCK)[rows, item] |= moved.filled(False)
    return mask


def _soft_limits(x: np.ndarray, ratio: float) -> tuple[float, float]:
    """Lower and upper limit of weights that step 1 does not move."""
    counts, edges = np.histogram(x, bins=_BUCKETS)
    budget, first, last = int(ratio * x.size), 0, _BUCKETS - 1
    while first < last:
        lighter = first if counts[first] <= counts[last] else last
        budget -= counts[lighter]
        if budget < 0:
            break
        first, last = (first + 1, last) if lighter == first else (first, last - 1)
    return edges[first], edges[last + 1]
