"""Schemes with outliers kept apart: "q3h+0.5%" is q3h with 0.5 % of each row's weights beside it.

A few extreme weights widen the ranges of their blocks. Here the largest weights of each row are set to 0 before the
search for codes, and the difference to the decoded value is stored beside the codes. These weights are then nearly
exact, and the other weights of their blocks are rounded finer. A row of K weights holds

    base.row_bytes(K)   the row of the base scheme, before the "+"; codes of outliers are arbitrary
    2 R bytes           columns of the R outliers, u16, ascending
    2 R bytes           bfloat16: addends to the decoded weights of these columns

with R = share * K, rounded, at least 1. All rows have the same number of outliers and therefore the same size.
outliers.py implements Inferflow's rule, which selects outliers of the whole matrix.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from numflow.errors import RequestError
from numflow.quant.scheme import Scheme, checked_bytes, checked_weights
from numflow.quant.search import checked_importance

LARGEST_SHARE = 0.05
_NAME = re.compile(r"(\w+)\+(\d{1,2}(?:\.\d{1,4})?)%")
_COLUMNS = 1 << 16  # values of a u16
_PART = 1 << 22     # weights sorted at a time


@dataclass(frozen=True)
class OutlierScheme(Scheme):
    """A scheme with a share of each row's weights kept apart."""

    base: Scheme = field(kw_only=True)
    share: float = field(kw_only=True)

    @property
    def unit(self) -> int:
        return self.base.unit

    def count(self, columns: int) -> int:
        """Number of outliers per row."""
        return max(1, round(self.share * columns))

    def _row_bytes(self, columns: int) -> int:
        if columns > _COLUMNS:
            raise RequestError(f"{self.name} has room for {_COLUMNS} columns, not {columns}")
        return self.base.row_bytes(columns) + 4 * self.count(columns)


@dataclass(frozen=True)
class Outliers:
    """Addends to single weights of a matrix [N, K], R per row; rows with fewer outliers have addends 0.

    columns: uint16 [N, R].
    values:  uint16 [N, R], bfloat16 bits.
    """

    columns: np.ndarray = field(repr=False)
    values: np.ndarray = field(repr=False)

    def between(self, begin: int, end: int) -> "Outliers":
        """Outliers in columns begin .. end - 1, with columns relative to `begin`; R is the maximum over rows."""
        inside = (self.columns >= begin) & (self.columns < end) & (self.values & 0x7FFF != 0)
        count = int(inside.sum(axis=1).max(initial=0))
        first = np.argsort(~inside, axis=1, kind="stable")[:, :count]
        inside, columns, values = (np.take_along_axis(a, first, 1) for a in (inside, self.columns, self.values))
        return Outliers(np.where(inside, columns - np.uint16(begin), 0).astype(np.uint16),
                        np.where(inside, values, 0).astype(np.uint16))

    def add_to(self, x: np.ndarray) -> np.ndarray:
        """Add the values to `x` float32 [N, K] in place; returns x."""
        np.add.at(x, (np.arange(len(x))[:, None], self.columns), (self.values.astype(np.uint32) << 16).view(np.float32))
        return x


def joined(parts: list[Outliers]) -> Outliers:
    """Outliers of vertically stacked matrices."""
    count = max(part.columns.shape[1] for part in parts)
    padded = [[np.pad(a, ((0, 0), (0, count - a.shape[1]))) for a in (part.columns, part.values)] for part in parts]
    return Outliers(*(np.concatenate(arrays) for arrays in zip(*padded, strict=True)))


def with_outliers(name: str, schemes: Mapping[str, Scheme]) -> OutlierScheme | None:
    """The scheme of a name SCHEME+SHARE%; None for other names.

    Raises:
        RequestError: a share of 0, or over 5 %.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in schemes:
        return None
    share = float(match[2]) / 100
    if not 0 < share <= LARGEST_SHARE:
        raise RequestError(f"{name}: the share of outliers should be over 0 and at most {100 * LARGEST_SHARE:g} %")
    base = schemes[match[1]]
    return OutlierScheme(f"{match[1]}+{100 * share:g}%", base.block, base.levels, base=base, share=share)


def encode(x: np.ndarray, scheme: OutlierScheme, encode_base, decode_base, importance: np.ndarray | None,
           name: str) -> np.ndarray:
    """float32 [N, K] -> uint8 [N, row_bytes].

    encode_base:  (x, importance) -> uint8 [N, base.row_bytes(K)]. decode_base: its inverse, float32 [N, K].
    importance:   float32 [K] or [N, K] or None.

    Raises:
        RequestError, FormatError: as `checked_weights` and `encode_base`.
    """
    x = checked_weights(x, scheme, name)
    columns = _largest(x, scheme.count(x.shape[1]))
    dense = x.copy()
    np.put_along_axis(dense, columns, np.float32(0), axis=1)  # 0 is in the range of every block
    if importance is not None:  # codes of outliers do not matter
        importance = np.broadcast_to(checked_importance(importance, x, name), x.shape).copy()
        np.put_along_axis(importance, columns, np.float32(0), axis=1)
    raw = encode_base(dense, importance)
    missing = np.take_along_axis(x, columns, 1) - np.take_along_axis(decode_base(raw), columns, 1)
    return np.concatenate([raw, columns.astype("<u2").view(np.uint8), _bfloat16(missing).view(np.uint8)], axis=1)


def decode(raw: np.ndarray, scheme: OutlierScheme, columns: int, decode_base) -> np.ndarray:
    """uint8 [N, row_bytes] -> float32 [N, columns]; outliers with a column out of range are ignored.

    Raises:
        RequestError, FormatError: as `checked_bytes`.
    """
    base, outliers = take_apart(raw, scheme, columns)
    return outliers.add_to(np.array(decode_base(np.ascontiguousarray(base)), np.float32))


def take_apart(raw: np.ndarray, scheme: OutlierScheme, columns: int) -> tuple[np.ndarray, Outliers]:
    """Split rows into rows of the base scheme, uint8 [N, base.row_bytes] (a view if `raw` is contiguous), and outliers.

    Outliers with a column out of range, which no encoder writes, become 0.

    Raises:
        RequestError, FormatError: as `checked_bytes`.
    """
    raw = checked_bytes(raw, scheme, columns)
    first, count = scheme.base.row_bytes(columns), scheme.count(columns)
    column, values = (np.ascontiguousarray(raw[:, begin:begin + 2 * count]).view("<u2").astype(np.uint16)
                  for begin in (first, first + 2 * count))
    if columns < _COLUMNS:
        outside = column >= columns
        column[outside], values[outside] = 0, 0
    return raw[:, :first], Outliers(column, values)


def _largest(x: np.ndarray, count: int) -> np.ndarray:
    """Columns of the `count` largest magnitudes of each row, ascending, int64 [N, count]; ties take the first
    column."""
    step = max(1, _PART // x.shape[1])
    found = [np.argsort(-np.abs(x[first:first + step]), axis=1, kind="stable")[:, :count]
             for first in range(0, len(x), step)]
    return np.sort(np.concatenate(found), axis=1)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """uint16: the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
