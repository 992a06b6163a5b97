"""Batches of a program: parts of several sequences, and updates of the previous batch for the next decoding step."""

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
    """Part of one sequence in a batch: its next n tokens.

    sequence: an OpenSequence, or an object with the same length, tables, cross, encoded, reach, adapter and
    adapter_start (a Sequence of the scheduler).
    ids: n token ids. rows: i32, indices of the rows to return. types: i32 [n] token types, None for zeros.
    given: further inputs of the network, f32 [n, W] by name.
    """

    sequence: Any
    ids: Ids[int] | np.ndarray
    rows: np.ndarray
    types: np.ndarray | None = None
    given: dict[str, np.ndarray] | None = None

    @property
    def plain(self) -> bool:
        """Whether the part is one token whose row is returned, without types and further inputs."""
        return len(self.ids) == len(self.rows) == 1 and self.types is None and not self.given


class EncodedText:
    """Sequence of an encoder's text in a batch: no tokens have run yet."""

    __slots__ = ("adapter", "adapter_start", "cross", "encoded", "length")

    def __init__(self, group: SequenceGroup):
        self.length, self.cross, self.encoded, self.adapter = 0, group.cross, group.encoder, group.adapter
        self.adapter_start = 0


class Batches:
    """Builder of a program's batches.

    If a step has one token of each of the same sequences in the same blocks as the previous step, the previous batch is
    updated (Batch.go_on) instead of building and checking a new one.

    pools: pools of the runner. context: maximum tokens of a text. has_encoder: whether batches have cross-attention.
    """

    def __init__(self, pools: Ids[Pool], context: int, has_encoder: bool):
        self._pools, self._context, self._has_encoder = pools, context, has_encoder
        self._last: Batch | None = None
        self._sequences: list[tuple[Any, list[list[int]]]] = []  # sequences of the last batch with their blocks

    def of(self, parts: Ids[BatchPart], tables: Ids[BlockTable] | None = None) -> Batch:
        """Batch of parts, without padding. tables: block tables used instead of the sequences' tables."""
        if tables is None and self._last is not None and self._is_next_step(parts, self._last):
            self._last.go_on([part.ids[0] for part in parts])
            return self._last
        batch = self._build(parts, tables)
        self._last, self._sequences = None, []
        if tables is None and not self._has_encoder and all(part.plain for part in parts):
            self._last = batch
            self._sequences = [(part.sequence, [list(table.blocks) for table in part.sequence.tables])
                               for part in parts]
        return batch

    def _is_next_step(self, parts: Ids[BatchPart], last: Batch) -> bool:
        """Whether the parts are the next decoding step of the last batch."""
        if len(parts) != len(self._sequences):
            return False
        for part, (sequence, blocks), position in zip(parts, self._sequences, last.positions.tolist()):
            if part.sequence is not sequence or sequence.length != position + 1 or not part.plain:
                return False
            for table, last_blocks in zip(sequence.tables, blocks):
                if table.blocks != last_blocks:
                    return False
        return True

    def _build(self, parts: Ids[BatchPart], tables: Ids[BlockTable] | None) -> Batch:
        counts = [len(part.ids) for part in parts]
        starts = np.cumsum([0, *counts], dtype=np.int32)
        sequences = [part.sequence for part in parts]
        by_pool: Iterable = [tables] if tables else zip(*(sequence.tables for sequence in sequences), strict=True)
        blocks = [_block_array([table.blocks for table in of_pool]) for of_pool in by_pool]
        narrow = {pool.window: rows for pool, rows in zip(self._pools, blocks) if pool.window and not tables}
        slots = narrow.pop(STATE, None)
        batch = Batch(
            tokens=np.concatenate([np.asarray(part.ids, np.int32) for part in parts]),
            positions=np.concatenate([s.length + np.arange(n, dtype=np.int32) for s, n in zip(sequences, counts)]),
            starts=starts, blocks=blocks[0], windows=narrow or None, slots=None if slots is None else slots[:, 0],
            logit_rows=np.concatenate([start + part.rows for start, part in zip(starts, parts)], dtype=np.int32),
            types=np.concatenate([np.zeros(n, np.int32) if part.types is None else part.types
                                  for n, part in zip(counts, parts)]),
            # An encoder reads whole texts. A text never exceeds the context: its last token does not run.
            limits=np.array(counts if tables else [min(s.reach, self._context) for s in sequences], np.int32))
        if any(sequence.adapter >= 0 for sequence in sequences):
            batch.adapters = np.array([sequence.adapter for sequence in sequences], np.int32)
            if any(sequence.adapter_start for sequence in sequences):
                batch.adapter_starts = np.array([sequence.adapter_start for sequence in sequences], np.int32)
        given = [part.given for part in parts if part.given]
        if given:
            batch.given = {name: np.concatenate([rows[name] for rows in given]) for name in given[0]}
        if self._has_encoder:
            batch.cross_blocks = _block_array([sequence.cross.blocks for sequence in sequences])
            batch.cross_lengths = np.array([sequence.encoded for sequence in sequences], np.int32)
        return batch


def _block_array(tables: Ids[list[int]]) -> np.ndarray:
    """Block tables as i32 [B, M], padded with -1."""
    table = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, blocks in zip(table, tables):
        row[:len(blocks)] = blocks
    return table
