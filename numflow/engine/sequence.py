"""Sequences on a program: token ids in, rows of its output back, with KV blocks taken as the text grows."""

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Ids

import numpy as np

from numflow.engine.blocks import BlockAllocator, BlockTable
from numflow.errors import RequestError
from numflow.ops import Batch, TraceRow

GROW_TOKENS = 256  # KV memory is reserved for at least this many more tokens at a time
ROW_VALUES = 1 << 25  # at most this many output values at once (128 MiB), whatever the vocabulary


class Runner:
    """Owns a program and its KV blocks. Each batch runs under a lock, so sequences of several threads may alternate.

    chunk: rows of a prompt that run at once, where the network lets a prompt be cut (causal attention).
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
        self._lock = threading.Lock()

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

    def open(self, limit: int, encoder_ids: np.ndarray | None = None) -> "Sequence":
        """A new sequence of at most `limit` tokens, after the encoder has read `encoder_ids`, if given."""
        sequence = Sequence(self, limit)
        if encoder_ids is not None:
            try:
                self._encode(sequence, encoder_ids, np.zeros(0, np.int32), None)
            except BaseException:
                sequence.close()
                raise
        return sequence

    def encode(self, ids: np.ndarray) -> np.ndarray:
        """Hidden states of the encoder, float32 [len(ids), D]."""
        with Sequence(self, len(ids)) as sequence:
            return self._encode(sequence, ids, np.arange(len(ids), dtype=np.int32), "encoder_hidden")

    def _encode(self, sequence, ids, rows, output):
        """Fill the sequence's cross cache; the encoder's own keys lie in blocks that are free again afterwards."""
        scratch = BlockTable(self.blocks, self.program.block_size)
        with self._lock:
            try:
                self._reserve(scratch, len(ids), len(ids))
                self._reserve(sequence.cross, len(ids), len(ids))
                sequence.encoded = len(ids)
                result = self.program.run(self._batch(ids, 0, scratch, rows, sequence), "encode", output)
                return np.empty((0, 0), np.float32) if result is None else np.array(result)
            finally:
                scratch.release()

    def run(self, sequence, ids, rows, output, types=None) -> np.ndarray:
        """One batch: the next `ids` of a sequence. Returns rows of `output`, float32 [R, N]; R = 0 if it is None."""
        with self._lock:
            self._reserve(sequence.table, sequence.length + len(ids), sequence.limit)
            batch = self._batch(ids, sequence.length, sequence.table, rows, sequence)
            batch.types = np.zeros(len(ids), np.int32) if types is None else types
            result = self.program.run(batch, "main", output)
            sequence.length += len(ids)
            return np.empty((0, 0), np.float32) if result is None else np.array(result)  # its buffer is used again

    def trace(self, sequence, ids) -> list[TraceRow]:
        """As `run` for one token, with a row per step of the network."""
        with self._lock:
            self._reserve(sequence.table, sequence.length + len(ids), sequence.limit)
            batch = self._batch(ids, sequence.length, sequence.table, np.zeros(1, np.int32), sequence)
            return self.program.trace(batch)

    def _batch(self, ids, start, table, rows, sequence) -> Batch:
        batch = Batch(tokens=np.ascontiguousarray(ids, np.int32),
                      positions=np.arange(start, start + len(ids), dtype=np.int32),
                      starts=np.array([0, len(ids)], np.int32), blocks=np.array([table.blocks], np.int32),
                      logit_rows=rows, types=np.zeros(len(ids), np.int32))
        if sequence.encoded:
            batch.cross_blocks = np.array([sequence.cross.blocks], np.int32)
            batch.cross_lengths = np.array([sequence.encoded], np.int32)
        return batch

    def _reserve(self, table: BlockTable, tokens: int, limit: int) -> None:
        """Let `table` hold `tokens` tokens, growing the program's KV memory in steps of up to `limit` tokens."""
        allocator, missing = table.allocator, table.missing(tokens)
        if missing > allocator.free:
            step = max(missing, GROW_TOKENS // table.block_size, allocator.capacity // 2)
            capacity = allocator.used + max(missing, min(step, table.missing(limit)))
            sizes = {id(a): a.capacity for a in (self.blocks, self.cross_blocks)} | {id(allocator): capacity}
            try:
                self.program.reserve(*sizes.values())
            except MemoryError:
                raise RequestError(f"no memory for the keys and values of {tokens} tokens") from None
            allocator.grow(capacity)
        table.extend(tokens)


class Sequence:
    """One text in KV memory: `length` tokens have been run, at most `limit` will be. Use it in a `with`."""

    def __init__(self, runner: Runner, limit: int):
        self.runner = runner
        self.limit = limit
        self.length = 0
        self.encoded = 0
        self.table = BlockTable(runner.blocks, runner.program.block_size)
        self.cross = BlockTable(runner.cross_blocks, runner.program.block_size)

    def last(self, ids: Ids, output: str = "logits") -> np.ndarray:
        """Run `ids` in chunks; float32 [N], the output's row of the last one."""
        chunk = self.runner.chunk
        final = (len(ids) - 1) // chunk * chunk
        for start in range(0, final, chunk):
            self.runner.run(self, ids[start:start + chunk], np.zeros(0, np.int32), None)
        part = ids[final:]
        return self.runner.run(self, part, np.array([len(part) - 1], np.int32), output)[0]

    def rows(self, ids: np.ndarray, output: str = "logits", types=None) -> Iterator[tuple[int, np.ndarray]]:
        """Run `ids` in chunks; yields (start, float32 [n, N]), the output's rows start .. start + n."""
        width = self.runner.network.outputs[output].width
        chunk = max(1, min(self.runner.chunk, ROW_VALUES // width)) if self.runner.causal else len(ids)
        for start in range(0, len(ids), chunk):
            part = ids[start:start + chunk]
            part_types = None if types is None else types[start:start + chunk]
            yield start, self.runner.run(self, part, np.arange(len(part), dtype=np.int32), output, part_types)

    def close(self) -> None:
        """Give the KV blocks back; may be called twice."""
        with self.runner._lock:
            self.table.release()
            self.cross.release()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
