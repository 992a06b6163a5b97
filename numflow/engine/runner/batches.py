"""Batches of a program: parts of sequences side by side, and a step that goes on from the one before."""

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.engine.schedule.blocks import BlockTable
from numflow.engine.schedule.pools import Pool
from numflow.engine.schedule.sequence import SequenceGroup
from numflow.network.windows import STATE
from numflow.ops import Batch


@dataclass
class BatchPart:
    """Part of one sequence in a batch: its next tokens.

    sequence: an OpenSequence, or what has its length, tables, cross, encoded, reach and adapter (a Sequence of the
    scheduler).
    ids: n of them. rows: i32, which of the n rows are wanted. types: i32 [n] token types, None for zeros.
    given: rows f32 [n, W] of the network's inputs, by name.
    """

    sequence: Any
    ids: Ids[int] | np.ndarray
    rows: np.ndarray
    types: np.ndarray | None = None
    given: dict[str, np.ndarray] | None = None

    @property
    def plain(self) -> bool:
        """Whether it is one token, whose row is wanted, and nothing else."""
        return len(self.ids) == len(self.rows) == 1 and self.types is None and not self.given


class EncodedText:
    """An encoder's text as a batch sees it: nothing has been read yet."""

    __slots__ = ("adapter", "cross", "encoded", "length")

    def __init__(self, group: SequenceGroup):
        self.length, self.cross, self.encoded, self.adapter = 0, group.cross, group.encoder, group.adapter


class Batches:
    """Makes the batches of a program.

    A step of one token of each of the same sequences, in the same blocks as the step before, is the batch of that step,
    gone on (Batch.go_on): nothing else of it is made or checked anew.

    pools: of the runner. context: tokens that the network takes. has_encoder: whether batches have encoder memory.
    """

    def __init__(self, pools: Ids[Pool], context: int, has_encoder: bool):
        self._pools, self._context, self._has_encoder = pools, context, has_encoder
        self._last: Batch | None = None
        self._sequences: list[tuple[Any, list[list[int]]]] = []  # of the last batch, with their blocks

    def of(self, parts: Ids[BatchPart], tables: Ids[BlockTable] | None = None) -> Batch:
        """The parts side by side, without padding. tables: instead of the sequences' own."""
        if tables is None and self._last is not None and self._follow(parts, self._last):
            self._last.go_on([part.ids[0] for part in parts])
            return self._last
        batch = self._made(parts, tables)
        self._last, self._sequences = None, []
        if tables is None and not self._has_encoder and all(part.plain for part in parts):
            self._last = batch
            self._sequences = [(part.sequence, [list(table.blocks) for table in part.sequence.tables])
                               for part in parts]
        return batch

    def _follow(self, parts: Ids[BatchPart], last: Batch) -> bool:
        """Whether the parts are the step after the last one."""
        if len(parts) != len(self._sequences):
            return False
        for part, (sequence, blocks), position in zip(parts, self._sequences, last.positions.tolist()):
            if part.sequence is not sequence or sequence.length != position + 1 or not part.plain:
                return False
            for table, own in zip(sequence.tables, blocks):
                if table.blocks != own:
                    return False
        return True

    def _made(self, parts: Ids[BatchPart], tables: Ids[BlockTable] | None) -> Batch:
        counts = [len(part.ids) for part in parts]
        starts = np.cumsum([0, *counts], dtype=np.int32)
        sequences = [part.sequence for part in parts]
        own: Iterable = [tables] if tables else zip(*(sequence.tables for sequence in sequences), strict=True)
        blocks = [_rows_of([table.blocks for table in some]) for some in own]
        narrow = {pool.window: rows for pool, rows in zip(self._pools, blocks) if pool.window and not tables}
        slots = narrow.pop(STATE, None)
        batch = Batch(
            tokens=np.concatenate([np.asarray(part.ids, np.int32) for part in parts]),
            positions=np.concatenate([s.length + np.arange(n, dtype=np.int32) for s, n in zip(sequences, counts)]),
            starts=starts, blocks=blocks[0], windows=narrow or None, slots=None if slots is None else slots[:, 0],
            logit_rows=np.concatenate([start + part.rows for start, part in zip(starts, parts)], dtype=np.int32),
            types=np.concatenate([np.zeros(n, np.int32) if part.types is None else part.types
                                  for n, part in zip(counts, parts)]),
            # An encoder reads whole texts. No text holds more than the context: its last token is not run.
            limits=np.array(counts if tables else [min(s.reach, self._context) for s in sequences], np.int32))
        if any(sequence.adapter >= 0 for sequence in sequences):
            batch.adapters = np.array([sequence.adapter for sequence in sequences], np.int32)
        given = [part.given for part in parts if part.given]
        if given:
            batch.given = {name: np.concatenate([rows[name] for rows in given]) for name in given[0]}
        if self._has_encoder:
            batch.cross_blocks = _rows_of([sequence.cross.blocks for sequence in sequences])
            batch.cross_lengths = np.array([sequence.encoded for sequence in sequences], np.int32)
        return batch


def _rows_of(tables: Ids[list[int]]) -> np.ndarray:
    """i32 [B, M]; -1, which no block has, beyond a sequence's own."""
    table = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, blocks in zip(table, tables):
        row[:len(blocks)] = blocks
    return table
