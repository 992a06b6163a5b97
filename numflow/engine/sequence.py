"""Sequences on a program: token ids in, rows of its output back, with KV blocks taken as the text grows."""

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.decoding.choice import Choice
from numflow.engine.memory import MemoryPlan
from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.turns import Turns
from numflow.errors import OutOfMemoryError, RequestError
from numflow.network.by_length import variant
from numflow.ops import Batch, TraceRow

ROW_VALUES = 1 << 25  # at most this many output values at once (128 MiB), whatever the vocabulary


@dataclass
class Part:
    """What one sequence adds to a batch: its next tokens.

    sequence: a Sequence, or what has its length, table, cross, encoded and reach (a Lane of the scheduler).
    ids: i32 [n]. rows: i32, which of the n rows are wanted. types: i32 [n] token types, None for zeros.
    """

    sequence: Any
    ids: np.ndarray
    rows: np.ndarray
    types: np.ndarray | None = None


class Runner:
    """Owns a program and its KV blocks. Each batch runs under `lock`, so sequences of several threads may alternate.

    chunk: rows of a prompt that run at once, where the network lets a prompt be cut (causal attention).
    memory: what keys and values may take, None: all that there is.
    """

    def __init__(self, network, program, chunk: int = 512):
        self.network = network
        self.program = program
        self.context = network.facts["context"]
        self.vocabulary = network.facts["vocabulary"]
        self.has_encoder = "encode" in network.entries
        self.causal = network.facts["type"] != "encoder"
        self.chunk = chunk if self.causal else self.context
        self.blocks = BlockAllocator()
        self.cross_blocks = BlockAllocator()
        self.lock = Turns()
        self.memory: MemoryPlan | None = None
        self.blocks.on_grow = lambda blocks: self._grow(blocks, self.cross_blocks.capacity)
        self.cross_blocks.on_grow = lambda blocks: self._grow(self.blocks.capacity, blocks)

    def _grow(self, blocks: int, cross_blocks: int) -> None:
        """Let the program hold more KV blocks.

        Raises:
            MemoryError: there is no memory for them, or too little would be left.
        """
        if self.memory is not None:
            there = max(self.blocks.capacity, self.cross_blocks.capacity)
            self.memory.check(there, max(blocks, cross_blocks) - there)
        self.program.reserve(blocks, cross_blocks)

    def check(self, ids, what: str = "prompt") -> np.ndarray:
        """Ids as i32 [n].

        Raises:
            RequestError: no ids, not whole numbers, out of the vocabulary, or more than the context.
        """
        try:
            array = np.asarray(ids)
        except ValueError as error:  # a ragged list
            raise RequestError(f"{what} should be a list of token ids: {error}") from None
        if array.size == 0:
            raise RequestError(f"{what} is empty: at least one token is needed")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise RequestError(f"{what} should be a list of token ids, is {array.dtype} {list(array.shape)}")
        outside = array[(array < 0) | (array >= self.vocabulary)]
        if len(outside):
            raise RequestError(f"{what} has token id {outside[0]}; the vocabulary is 0 .. {self.vocabulary - 1}")
        if len(array) > self.context:
            raise RequestError(f"{what} has {len(array)} tokens; the model's context is {self.context} tokens")
        return array.astype(np.int32)

    def variant(self, reach: int) -> Hashable:
        """What keys and values of a text that may come to hold so many tokens depend on beside its tokens."""
        return variant(self.network, min(reach, self.context))

    def open(self, limit: int, encoder_ids: np.ndarray | None = None, reach: int = 0) -> "Sequence":
        """A new sequence of at most `limit` tokens, after the encoder has read `encoder_ids`, if given."""
        sequence = Sequence(self, limit, reach)
        if encoder_ids is not None:
            try:
                self.encode([Part(sequence, encoder_ids, np.zeros(0, np.int32))], None)
            except BaseException:
                sequence.close()
                raise
        return sequence

    def encode(self, parts: Ids[Part], output: str | None = "encoder_hidden") -> np.ndarray:
        """Let the encoder read whole texts, each for its sequence, which is still empty. Returns what `run` does.

        The texts' keys and values for the decoder stay with the sequences; the encoder's own lie in blocks that are
        free again afterwards.
        """
        scratch = [BlockTable(self.blocks, self.program.block_size) for _ in parts]
        with self.lock:
            try:
                counts = [len(part.ids) for part in parts]
                self._reserve(scratch, counts, counts)
                self._reserve([part.sequence.cross for part in parts], counts, counts)
                for part in parts:
                    part.sequence.encoded = len(part.ids)
                return _copied(self.program.run(self._batch(parts, scratch), "encode", output))
            finally:
                for table in scratch:
                    table.release()

    def run(self, parts: Ids[Part], output: str | None) -> np.ndarray:
        """One batch. Returns the wanted rows of `output`, part by part, float32 [R, N]; R = 0 if it is None."""
        with self.lock:
            self._reserve([part.sequence.table for part in parts],
                          [part.sequence.length + len(part.ids) for part in parts],
                          [part.sequence.limit for part in parts])
            result = _copied(self.program.run(self._batch(parts), "main", output))
            for part in parts:
                part.sequence.length += len(part.ids)
            return result

    def execute(self, parts: Ids[Part], entry: str, output: str | None, tables: Ids[BlockTable] | None = None):
        """One run of the program on parts whose blocks are there; tables: blocks instead of the sequences' own."""
        return self.program.run(self._batch(parts, tables), entry, output)

    def sample(self, parts: Ids[Part], choices: Ids[Choice]) -> np.ndarray:
        """As `execute` on the main entry, but the program picks the tokens: int32 [R]."""
        return self.program.sample(self._batch(parts), choices)

    def trace(self, sequence, ids) -> list[TraceRow]:
        """As `run` for one token, with a row per step of the network."""
        with self.lock:
            self._reserve([sequence.table], [sequence.length + len(ids)], [sequence.limit])
            return self.program.trace(self._batch([Part(sequence, ids, np.zeros(1, np.int32))]))

    def _batch(self, parts: Ids[Part], tables: Ids[BlockTable] | None = None) -> Batch:
        """The parts side by side, without padding. tables: instead of the sequences' own."""
        counts = [len(part.ids) for part in parts]
        starts = np.cumsum([0, *counts], dtype=np.int32)
        sequences = [part.sequence for part in parts]
        batch = Batch(
            tokens=np.concatenate([part.ids for part in parts], dtype=np.int32),
            positions=np.concatenate([s.length + np.arange(n, dtype=np.int32) for s, n in zip(sequences, counts)]),
            starts=starts, blocks=_rows_of([table.blocks for table in tables or [s.table for s in sequences]]),
            logit_rows=np.concatenate([start + part.rows for start, part in zip(starts, parts)], dtype=np.int32),
            types=np.concatenate([np.zeros(n, np.int32) if part.types is None else part.types
                                  for n, part in zip(counts, parts)]),
            # An encoder reads whole texts. No text holds more than the context: its last token is not run.
            limits=np.array(counts if tables else [min(s.reach, self.context) for s in sequences], np.int32))
        if self.has_encoder:
            batch.cross_blocks = _rows_of([sequence.cross.blocks for sequence in sequences])
            batch.cross_lengths = np.array([sequence.encoded for sequence in sequences], np.int32)
        return batch

    def _reserve(self, tables: Ids[BlockTable], tokens: Ids[int], limits: Ids[int]) -> None:
        """Let each table hold its tokens; the program's KV memory grows in steps of up to `limits` tokens."""
        missing, wanted = (sum(map(BlockTable.missing, tables, counts)) for counts in (tokens, limits))
        if missing and not tables[0].allocator.room(missing, wanted, tables[0].block_size):
            raise OutOfMemoryError(f"no memory for the keys and values of {sum(tokens)} tokens")
        for table, count in zip(tables, tokens):
            table.extend(count)


def _copied(result) -> np.ndarray:
    """The program's buffer is used again by its next run."""
    return np.empty((0, 0), np.float32) if result is None else np.array(result)


def _rows_of(tables: Ids[list[int]]) -> np.ndarray:
    """i32 [B, M]; -1, which no block has, beyond a sequence's own."""
    table = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, blocks in zip(table, tables):
        row[:len(blocks)] = blocks
    return table


class Sequence:
    """One text in KV memory: `length` tokens have been run, at most `limit` will be. Use it in a `with`.

    encoded: tokens that the encoder has read for it. reach: tokens of the request that it is a part of, which choose
    what depends on the length; 0: the limit.
    """

    def __init__(self, runner: Runner, limit: int, reach: int = 0):
        self.runner = runner
        self.limit, self.reach = limit, reach or limit
        self.length = 0
        self.encoded = 0
        self.table = BlockTable(runner.blocks, runner.program.block_size)
        self.cross = BlockTable(runner.cross_blocks, runner.program.block_size)

    def last(self, ids: Ids, output: str = "logits") -> np.ndarray:
        """Run `ids` in chunks; float32 [N], the output's row of the last one."""
        rest = self.advance(np.asarray(ids, np.int32))
        return self.runner.run([Part(self, rest, np.array([len(rest) - 1], np.int32))], output)[0]

    def advance(self, ids: np.ndarray) -> np.ndarray:
        """Run all `ids` but the last chunk, which is returned."""
        chunk = self.runner.chunk
        while len(ids) > chunk:
            self.runner.run([Part(self, ids[:chunk], np.zeros(0, np.int32))], None)
            ids = ids[chunk:]
        return ids

    def rows(self, ids: np.ndarray, output: str = "logits", types=None,
             every: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """Run `ids` in chunks; yields (start, float32 [n, N]), the output's rows start, start + every, ..."""
        width = self.runner.network.outputs[output].width
        chunk = max(1, min(self.runner.chunk // every, ROW_VALUES // width)) * every if self.runner.causal else len(ids)
        for start in range(0, len(ids), chunk):
            part = ids[start:start + chunk]
            part_types = None if types is None else types[start:start + chunk]
            yield start, self.runner.run([Part(self, part, np.arange(0, len(part), every), part_types)], output)

    def close(self) -> None:
        """Give the KV blocks back; may be called twice."""
        with self.runner.lock:
            self.table.release()
            self.cross.release()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
