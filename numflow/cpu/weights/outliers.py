"""Outliers of a quantised matrix (numflow/quant/apart.py): a sparse matrix beside the packed matrix.

    y [T, N] += S @ x, where S [N, K] has a few weights of each row

The packed matrix is multiplied with activations of its usual kind. S is multiplied with float32 activations, and the
product is added to the output of the packed matrix's kernel (outlier_calls.py). A lane is a row: a slot is a cache line
with one outlier of each of a tile's 16 rows, i32 [16] = column | bits of the bfloat16 << 16. A tile has as many slots
as its fullest row needs; the other rows are padded with zeros in column 0. Products are added in the order of slots.
"""

from dataclasses import dataclass, field

import numpy as np

from numflow.cpu.memory.arena import Arena
from numflow.cpu.weights.layout import ROWS, tiles_of
from numflow.quant.apart import Outliers, OutlierScheme

SLOT_BYTES = 4 * ROWS
_ARENA = Arena()
_PART = 1 << 20  # outliers packed at a time


@dataclass(frozen=True)
class PackedOutliers:
    """Outliers of a packed matrix: slots uint32 [S, 16], and starts int64 [tiles + 1], each tile's first slot."""

    slots: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.slots.nbytes + self.starts.nbytes


def pack_outliers(outliers: Outliers, groups: int) -> PackedOutliers:
    """Pack the outliers of a matrix of `groups` equal groups of rows; each group begins at a tile of its own."""
    rows = len(outliers.columns) // groups
    tiles, width = tiles_of(rows), outliers.columns.shape[1]
    used = _by_tile(outliers.values & 0x7FFF != 0, groups, rows)
    slots_of_tile = (used * np.arange(1, width + 1)[:, None]).max(axis=(1, 2), initial=0)
    starts = np.concatenate([[0], np.cumsum(slots_of_tile)]).astype(np.int64)
    slots = _ARENA.zeros(int(starts[-1]) * SLOT_BYTES).view(np.uint32).reshape(-1, ROWS)
    step = max(1, _PART // max(1, width * ROWS * tiles))
    for group in range(0, groups, step):
        some = slice(group * rows, (group + step) * rows)
        count = min(step, groups - group)
        columns, values = (_by_tile(a[some], count, rows) for a in (outliers.columns, outliers.values))
        group_tiles = slice(group * tiles, (group + count) * tiles)
        used_slots = np.arange(width) < slots_of_tile[group_tiles, None]
        slots[starts[group_tiles.start]:starts[group_tiles.stop]] = (
            columns | values.astype(np.uint32) << 16)[used_slots]
    return PackedOutliers(slots, starts)


def _by_tile(a: np.ndarray, groups: int, rows: int) -> np.ndarray:
    """[groups * rows, R] -> [tiles of all groups, R, 16], padded with zeros behind the last row of a group."""
    tiles, width = tiles_of(rows), a.shape[1]
    padded = np.zeros((groups, tiles * ROWS, width), a.dtype)
    padded[:, :rows] = a.reshape(groups, rows, width)
    return padded.reshape(groups * tiles, ROWS, width).transpose(0, 2, 1)


def expected_bytes(scheme: OutlierScheme, rows: int, columns: int, cut: bool) -> int:
    """Expected bytes of the outliers of a group of rows.

    cut: whether the matrix has only some of a tensor's columns, so that rows have different numbers of outliers. A tile
    then needs about 1.77 standard deviations more slots than the mean, the expected maximum of 16 normal variables. The
    variance is the mean times the share of columns on other devices, 1/2 to 3/4 for 2 to 4 devices.
    """
    slots = float(scheme.count(columns))
    if cut:
        slots = min(float(columns), scheme.share * columns + 1.77 * (0.6 * scheme.share * columns) ** 0.5)
    return round(tiles_of(rows) * (slots * SLOT_BYTES + 8))
