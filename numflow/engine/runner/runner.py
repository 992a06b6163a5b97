"""Sequences on a program: token ids in, output rows out. KV blocks are allocated as a text grows."""

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Ids
from functools import partial

import numpy as np

from numflow.decoding.choice import Choice
from numflow.engine.request.facts import ModelFacts
from numflow.engine.runner.batches import Batches, BatchPart
from numflow.engine.runner.fair_lock import FairLock
from numflow.engine.runner.kv_memory import MemoryPlan
from numflow.engine.runner.suspects import Suspects
from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.schedule.pools import MemoryBudget, Pool, can_allocate, text_bytes
from numflow.engine.schedule.sequence import NO_ADAPTER
from numflow.errors import NotFiniteError, OutOfMemoryError
from numflow.executor.contract import TraceRow
from numflow.network.by_length import variant
from numflow.network.windows import STATE, kinds

REWINDS = 32  # tokens that can be rolled back without recomputing others: more than the drafts of a step
ROW_VALUES = 1 << 25  # maximum number of output values of a run (128 MiB), for any vocabulary


class Runner:
    """A program with its KV blocks. Each batch runs under `lock`, so sequences of several threads may alternate.

    chunk:    rows of a prompt in one run, if prompts can be split (causal attention); else the context.
    pools:    pools of KV blocks by window of the layers; slots for states, if any, are the last pool.
    blocks:   allocator of the first pool. unit: bytes of a block of all layers (kv_memory.block_bytes).
    memory:   limit of the KV memory, None: all memory. suspects: tensors to search for NaN and infinity when logits are
              not finite.
    batches:  builder of the program's batches.
    """

    def __init__(self, network, program, chunk: int = 512):
        self.network = network
        self.program = program
        self.facts = facts = ModelFacts.of(network)
        self.context, self.vocabulary, self.has_encoder, self.causal = (
            facts.context, facts.vocabulary, facts.encoder, facts.causal)
        self.chunk = chunk if self.causal else self.context
        windows = kinds(network)
        sizes = {windows[0]: program.block_bytes} if len(windows) == 1 else program.window_bytes
        self.pools = [Pool(BlockAllocator(), window, sizes[window]) for window in windows]
        self.unit = sum(pool.size for pool in self.pools if pool.window != STATE) or self.pools[-1].size
        self.blocks = self.pools[0].allocator
        self.cross_blocks = BlockAllocator()
        self.batches = Batches(self.pools, self.context, self.has_encoder)
        self.lock = FairLock()
        self.memory: MemoryPlan | None = None
        self.suspects: Suspects | None = None
        self._reserved: list[int] = []  # number of blocks of each pool that the program has reserved
        for pool in self.pools:
            pool.allocator.on_grow = partial(self._grow, pool.allocator)
        self.cross_blocks.on_grow = partial(self._grow, self.cross_blocks)

    def explain(self, error: BaseException) -> BaseException:
        """The error of a model; for logits that are not finite, an error that names the tensor at fault, if windows."""
        return self.suspects.explain(error) if self.suspects and isinstance(error, NotFiniteError) else error

    def _grow(self, allocator: BlockAllocator, blocks: int) -> None:
        """Grow the program's KV memory to `blocks` blocks of an allocator.

        Raises:
            MemoryError: the memory cannot be allocated, or too little would be left.
        """
        if allocator.budget is not None:
            allocator.budget.shrink_others(allocator, blocks)
        capacities = [pool.allocator.capacity for pool in self.pools]
        counts = [max(blocks if pool.allocator is allocator else count, pool.allocator.pinned)
                  for pool, count in zip(self.pools, capacities)]
        cross_blocks = blocks if allocator is self.cross_blocks else self.cross_blocks.capacity
        if self.memory is not None:
            before = max(self._mean_blocks(capacities), self.cross_blocks.capacity)
            self.memory.check(before, max(self._mean_blocks(counts), cross_blocks) - before)
        self.reserve(counts, cross_blocks)

    def reserve(self, counts: Ids[int], cross_blocks: int) -> None:
        """Reserve the program's memory for `counts` blocks of the pools."""
        self._reserved = list(counts)
        if len(counts) == 1:
            self.program.reserve(counts[0], cross_blocks)
        else:
            by_window = {pool.window: count for pool, count in zip(self.pools, counts, strict=True)}
            self.program.reserve(counts[0], cross_blocks, by_window)

    def trim(self) -> None:
        """Free blocks that were only kept for planned moves; the moves have been made."""
        counts = [pool.allocator.capacity for pool in self.pools]
        for pool in self.pools:
            pool.allocator.pinned = 0
            pool.allocator.settle()
        if any(reserved > count for reserved, count in zip(self._reserved, counts)):
            self.reserve(counts, self.cross_blocks.capacity)

    def _mean_blocks(self, counts: Ids[int]) -> int:
        """Number of blocks of all layers with the same memory as `counts` blocks of the pools."""
        if len(counts) == 1 or not self.unit:
            return max(counts)
        return -(-sum(pool.size * count for pool, count in zip(self.pools, counts, strict=True)) // self.unit)

    @property
    def reserved(self) -> int:
        """Number of blocks of all layers with the same memory as the reserved blocks."""
        return self._mean_blocks([pool.allocator.capacity for pool in self.pools])

    def limit(self, blocks: int | None) -> None:
        """Limit the KV memory to `blocks` blocks of all layers, divided among the pools on demand."""
        shared = len(self.pools) > 1 and self.unit > 0
        budget = MemoryBudget(self.pools, blocks * self.unit) if blocks is not None and shared else None
        for pool in self.pools:
            pool.allocator.budget = budget
            pool.allocator.limit = blocks if budget is None else budget.nbytes // pool.size if pool.size else None
        self.cross_blocks.limit = blocks

    def shares(self, blocks: int, sequences: int) -> list[int]:
        """Division of the memory of `blocks` blocks among the pools: slots for `sequences` sequences, up to half of the
        memory, and KV blocks for the rest."""
        state = self.pools[-1] if self.pools[-1].window == STATE else None
        if state is None or not state.size:
            return [blocks] * len(self.pools)
        states_only = state.size == self.unit and len(self.pools) == 2 and not self.pools[0].size
        slots = blocks if states_only else min(sequences, blocks * self.unit // 2 // state.size)
        rest = blocks if states_only else blocks - -(-slots * state.size // self.unit)
        return [slots if pool is state else rest for pool in self.pools]

    def kv_bytes(self, used: bool = False) -> int:
        """Bytes of reserved keys, values and states, or of those held by requests (`used`)."""
        cross = self.program.cross_block_bytes if self.has_encoder else 0
        held = [(pool.allocator, pool.size) for pool in self.pools] + [(self.cross_blocks, cross)]
        return sum((allocator.used if used else allocator.capacity) * size for allocator, size in held)

    def longest(self, texts: int) -> int:
        """Maximum tokens of each of `texts` texts that run together, by context and KV memory."""
        size, limit, budget = self.program.block_size, self.blocks.limit, self.blocks.budget
        if limit is None:
            return self.context
        if budget is None:
            return min(self.context, limit // texts * size)
        low, high = 0, self.context
        while low < high:
            middle = (low + high + 1) // 2
            fits = texts * text_bytes(self.pools, middle, self.chunk, size) <= budget.nbytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def variant(self, reach: int) -> Hashable:
        """Variant of the keys and values of a text of up to `reach` tokens: only texts of equal variants share them."""
        return variant(self.network, min(reach, self.context))

    def open(self, limit: int, encoder_ids: np.ndarray | None = None, reach: int = 0,
             adapter: int = NO_ADAPTER, adapter_start: int = 0) -> "OpenSequence":
        """Open a new sequence of at most `limit` tokens; the encoder reads `encoder_ids` first, if given."""
        sequence = OpenSequence(self, limit, reach, adapter, adapter_start)
        if encoder_ids is not None:
            try:
                self.encode([BatchPart(sequence, encoder_ids, np.zeros(0, np.int32))], None)
            except BaseException:
                sequence.close()
                raise
        return sequence

    def encode(self, parts: Ids[BatchPart], output: str | None = "encoder_hidden") -> np.ndarray:
        """Run the encoder on whole texts, each for an empty sequence. Returns rows as `run`.

        The sequences keep the cross-attention keys and values. The encoder's own keys and values use scratch blocks.
        """
        scratch = [BlockTable(self.blocks, self.program.block_size) for _ in parts]
        with self.lock:
            try:
                counts = [len(part.ids) for part in parts]
                self._extend(self.pools[:1], [(table,) for table in scratch], counts, counts)
                cross = Pool(self.cross_blocks)
                self._extend([cross], [(part.sequence.cross,) for part in parts], counts, counts)
                for part in parts:
                    part.sequence.encoded = len(part.ids)
                return _copied(self.program.run(self.batches.of(parts, scratch), "encode", output))
            finally:
                for table in scratch:
                    table.release()

    def run(self, parts: Ids[BatchPart], output: str | None) -> np.ndarray:
        """Run one batch. Returns the requested rows of `output`, part by part, float32 [R, N]; None: R = 0."""
        with self.lock:
            self._extend(self.pools, [part.sequence.tables for part in parts],
                          [part.sequence.length + len(part.ids) for part in parts],
                          [part.sequence.limit for part in parts])
            result = _copied(self.program.run(self.batches.of(parts), "main", output))
            for part in parts:
                part.sequence.advance_length(len(part.ids))
            return result

    def execute(self, parts: Ids[BatchPart], entry: str, output: str | None, tables: Ids[BlockTable] | None = None):
        """Run the program on parts with allocated blocks. tables: used instead of the sequences' block tables."""
        return self.program.run(self.batches.of(parts, tables), entry, output)

    def sample(self, parts: Ids[BatchPart], choices: Ids[Choice]) -> np.ndarray:
        """Run the main entry and sample in the program: tokens int32 [R]."""
        return self.program.sample(self.batches.of(parts), choices)

    def decode(self, parts: Ids[BatchPart], steps: int, choices: Ids[Choice] | None = None) -> np.ndarray:
        """Run `steps` steps of the main entry, each of one token of each part: tokens int32 [steps, n]; see
        Program.decode."""
        return self.program.decode(self.batches.of(parts), steps, choices)

    def trace(self, sequence, ids) -> list[TraceRow]:
        """As `run` for one token, with a row per step of the network."""
        with self.lock:
            self._extend(self.pools, [sequence.tables], [sequence.length + len(ids)], [sequence.limit])
            return self.program.trace(self.batches.of([BatchPart(sequence, ids, np.zeros(1, np.int32))]))

    def walk(self, sequence, ids, first: int = 0, given=None) -> list[tuple[int, list[np.ndarray]]]:
        """As `run` for one token, with the results of the steps; see Program.walk."""
        with self.lock:
            self._extend(self.pools, [sequence.tables], [sequence.length + len(ids)], [sequence.limit])
            batch = self.batches.of([BatchPart(sequence, ids, np.zeros(1, np.int32))])
            return list(self.program.walk(batch, "main", first, given))

    def _extend(self, pools: Ids[Pool], tables: Ids[Ids[BlockTable]], tokens: Ids[int], limits: Ids[int]) -> None:
        """Extend the block tables of each text (one for each pool) to `tokens` tokens; the KV memory grows in steps of
        up to `limits` tokens."""
        size = self.program.block_size
        missing = [sum(map(_missing, of_pool, tokens)) for of_pool in zip(*tables, strict=True)]
        wanted = [sum(max(0, pool.max_blocks(limit, self.chunk, size) - len(of_text[index].held))
                      for of_text, limit in zip(tables, limits, strict=True)) for index, pool in enumerate(pools)]
        if any(missing) and not can_allocate(pools, missing, wanted, size):
            raise OutOfMemoryError(f"no memory for the keys and values of {sum(tokens)} tokens")
        for of_text, count in zip(tables, tokens, strict=True):
            for table in of_text:
                table.extend(count)
                if table.window == STATE and table.shared(0):  # a marked state (OpenSequence.mark)
                    old, new = table.own(0)
                    self.program.copy_blocks([old], [new], STATE)
                    table.allocator.settle()


def _missing(table: BlockTable, tokens: int) -> int:
    """Number of blocks that a table has to allocate for `tokens` tokens."""
    return table.missing(tokens) + (table.window == STATE and table.shared(0))


def _copied(result) -> np.ndarray:
    """Copy of a result: the program's next run overwrites its buffer."""
    return np.empty((0, 0), np.float32) if result is None else np.array(result)


class OpenSequence:
    """One text in KV memory: `length` tokens have run, at most `limit` will. Use it in a `with`.

    encoded: tokens that the encoder has read for the text. reach: maximum length of the whole request, which selects
    rotary frequencies that depend on the length; 0: `limit`. marked: length to which `rewind` can always return; None:
    none. adapter: index of the adapter of its rows, which has an effect from position `adapter_start` on.
    """

    def __init__(self, runner: Runner, limit: int, reach: int = 0, adapter: int = NO_ADAPTER,
                 adapter_start: int = 0):
        self.runner, self.adapter, self.adapter_start = runner, adapter, adapter_start
        self.limit, self.reach = limit, reach or limit
        self.length = 0
        self.encoded = 0
        self.marked: int | None = None
        self.tables = tuple(pool.table(runner.program.block_size) for pool in runner.pools)
        self._marked_state: BlockTable | None = None
        self.cross = BlockTable(runner.cross_blocks, runner.program.block_size)

    @property
    def table(self) -> BlockTable:
        """Block table of the first pool."""
        return self.tables[0]

    def advance_length(self, count: int) -> None:
        """Add `count` tokens that have run to the length; release blocks that left the window."""
        self.length += count
        for table in self.tables:
            table.slide(self.length - REWINDS if self.marked is None else min(self.length, self.marked))

    def mark(self) -> None:
        """Mark the present length, so that `rewind` can always return to it."""
        with self.runner.lock:
            self._forget_mark()
            self.marked = self.length
            if self.tables[-1].window == STATE:
                self._marked_state = self.tables[-1].fork()

    def _forget_mark(self) -> None:
        if self._marked_state is not None:
            self._marked_state.release()
        self.marked = self._marked_state = None

    def rewind(self, length: int) -> int:
        """Roll back to the first `length` tokens. Returns the remaining length: smaller if a recurrent state can only
        return to a mark; 0 if blocks of the window that the next token needs were released."""
        if length < self.length and self.tables[-1].window == STATE:
            length = self._restore_mark(length)
        if any(table.first_needed(length) < table.first for table in self.tables):
            with self.runner.lock:
                self._forget_mark()
                for table in self.tables:
                    table.release()
            length = 0
        self.length = length
        return length

    def _restore_mark(self, length: int) -> int:
        """Restore the marked state, if the mark is not after `length`."""
        with self.runner.lock:
            self.tables[-1].release()
            if self._marked_state is None or self.marked is None or self.marked > length:
                return 0
            self.tables[-1].assign(self._marked_state.allocator.share(self._marked_state.blocks))
            return self.marked

    def last(self, ids: Ids, output: str = "logits") -> np.ndarray:
        """Run `ids` in chunks; returns the output row of the last token, float32 [N]."""
        rest = self.advance(np.asarray(ids, np.int32))
        return self.runner.run([BatchPart(self, rest, np.array([len(rest) - 1], np.int32))], output)[0]

    def advance(self, ids: np.ndarray) -> np.ndarray:
        """Run all chunks of `ids` but the last; returns the ids of the last chunk."""
        chunk = self.runner.chunk
        while len(ids) > chunk:
            self.runner.run([BatchPart(self, ids[:chunk], np.zeros(0, np.int32))], None)
            ids = ids[chunk:]
        return ids

    def rows(self, ids: np.ndarray, output: str = "logits", types=None,
             every: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """Run `ids` in chunks; yields (start, float32 [n, N]): the output rows start, start + every, ..."""
        width = self.runner.network.outputs[output].width
        chunk = max(1, min(self.runner.chunk // every, ROW_VALUES // width)) * every if self.runner.causal else len(ids)
        for start in range(0, len(ids), chunk):
            part = ids[start:start + chunk]
            part_types = None if types is None else types[start:start + chunk]
            yield start, self.runner.run([BatchPart(self, part, np.arange(0, len(part), every), part_types)], output)

    def close(self) -> None:
        """Release the KV blocks; may be called twice."""
        with self.runner.lock:
            self._forget_mark()
            for table in self.tables:
                table.release()
            self.cross.release()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
