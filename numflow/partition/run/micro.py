"""Cutting a batch into micro-batches, so that the groups of a plan work on several of them at the same time.

Rows stay in their order, and a sequence may be cut anywhere: a later piece finds the keys of the earlier ones in the
cache. What a row gives does not depend on the rows beside it (the CPU's promise), so the results are the same bits.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from numflow.ops import Batch

ROWS = 64  # of a micro-batch at least: fewer would read the weights more often than they save waiting


def pieces_of(rows: int, groups: int) -> int:
    """Number of micro-batches of a batch of so many rows on a plan of so many groups."""
    return 1 if groups == 1 else max(1, min(2 * groups, rows // ROWS))


def cut_batch(batch: Batch, pieces: int) -> list[tuple[Batch, np.ndarray]]:
    """About equal micro-batches in the order of the rows, at most so many and none without rows.

    Returns:
        Of each, the batch and which of the wanted rows (indices into logit_rows) it has.
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
        adapters=of_sequences(batch.adapters),
        windows=batch.windows and {window: table[inside] for window, table in batch.windows.items()})
    return piece, wanted
