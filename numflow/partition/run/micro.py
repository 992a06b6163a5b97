"""Micro-batches: a batch is split, so that the groups of a plan work on several parts concurrently.

Rows keep their order, and a sequence may be split anywhere: later micro-batches read the keys of earlier ones from the
cache. On the CPU a row's result does not depend on other rows, so results are the same bits.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from numflow.ops import Batch

ROWS = 64  # minimal rows of a micro-batch: with fewer, reading the weights again costs more than waiting


def pieces_of(rows: int, groups: int) -> int:
    """Number of micro-batches for a batch of so many rows and a plan of so many groups."""
    return 1 if groups == 1 else max(1, min(2 * groups, rows // ROWS))


def cut_batch(batch: Batch, pieces: int) -> list[tuple[Batch, np.ndarray]]:
    """Split a batch into at most `pieces` micro-batches of about equal size, none empty.

    Returns:
        For each, the batch and the indices into logit_rows of its wanted rows.
    """
    borders = np.linspace(0, len(batch.tokens), pieces + 1).round().astype(np.int64)
    return [_rows_of(batch, int(begin), int(end)) for begin, end in pairwise(borders) if end > begin]


def _rows_of(batch: Batch, begin: int, end: int) -> tuple[Batch, np.ndarray]:
    starts = np.asarray(batch.starts, np.int64)
    inside = np.maximum(starts[:-1], begin) < np.minimum(starts[1:], end)  # sequences with rows in this piece
    cut = np.append(np.maximum(starts[:-1][inside], begin), end) - begin
    wanted = np.flatnonzero((batch.logit_rows >= begin) & (batch.logit_rows < end))

    def of_sequences(array):
        return None if array is None else array[inside]

    piece = replace(
        batch, tokens=batch.tokens[begin:end], positions=batch.positions[begin:end], starts=cut.astype(np.int32),
        blocks=batch.blocks[inside], logit_rows=(batch.logit_rows[wanted] - begin).astype(np.int32),
        types=None if batch.types is None else batch.types[begin:end], cross_blocks=of_sequences(batch.cross_blocks),
        cross_lengths=of_sequences(batch.cross_lengths), limits=of_sequences(batch.limits),
        slots=np.flatnonzero(inside) if batch.slots is None else batch.slots[inside],
        adapters=of_sequences(batch.adapters), adapter_starts=of_sequences(batch.adapter_starts),
        windows=batch.windows and {window: table[inside] for window, table in batch.windows.items()})
    return piece, wanted
