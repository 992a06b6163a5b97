"""Sequences on a program: token ids in, rows of its output back, with KV blocks taken as the text grows."""

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
from numflow.engine.schedule.pools import CommonMemory, Pool, room, text_bytes
from numflow.engine.schedule.sequence import NO_ADAPTER
from numflow.errors import NotFiniteError, OutOfMemoryError
from numflow.executor.contract import TraceRow
from numflow.network.by_length import variant
from numflow.network.windows import STATE, kinds

REWINDS = 32  # tokens that are taken back without running others again: more than are drafted at a time
ROW_VALUES = 1 << 25  # at most this many output values at once (128 MiB), whatever the vocabulary


class Runner:
    """Owns a program and its KV blocks. Each batch runs under `lock`, so sequences of several threads may alternate.

    chunk: rows of a prompt that run at once, where the network lets a prompt be cut (causal attention).
    pools: its KV blocks, by the window of the layers that they are for, and its slots for states, if there are any, as
    the last pool; blocks: the blocks of the first. unit: bytes of what memory is counted in (kv_memory.block_bytes).
    memory: what keys and values may take, None: all that there is. suspects: tensors that logits may be no numbers by.
    batches: makes what the program runs.
    """

    def __init__(self, network, program, chunk: int = 512):
        self.network = network
        self.program = program
        self.facts = facts = ModelFacts.of(network)
        self.context, self.vocabulary, self.has_encoder, self.causal = (
            facts.context, facts.vocabulary, facts.encoder, facts.causal)
        self.chunk = chunk if self.causal else self.context
        found = kinds(network)
        sizes = {found[0]: program.block_bytes} if len(found) == 1 else program.window_bytes
        self.pools = [Pool(BlockAllocator(), window, sizes[window]) for window in found]
        self.unit = sum(pool.size for pool in self.pools if pool.window != STATE) or self.pools[-1].size
        self.blocks = self.pools[0].allocator
        self.cross_blocks = BlockAllocator()
        self.batches = Batches(self.pools, self.context, self.has_encoder)
        self.lock = FairLock()
        self.memory: MemoryPlan | None = None
        self.suspects: Suspects | None = None
        self._there: list[int] = []  # blocks of each pool in the program's memory
        for pool in self.pools:
            pool.allocator.on_grow = partial(self._grow, pool.allocator)
        self.cross_blocks.on_grow = partial(self._grow, self.cross_blocks)

    def explained(self, error: BaseException) -> BaseException:
        """An error of the model; of logits that are no numbers one that names the tensor they come from, if one is."""
        return self.suspects.explained(error) if self.suspects and isinstance(error, NotFiniteError) else error

    def _grow(self, allocator: BlockAllocator, blocks: int) -> None:
        """Let the program hold so many KV blocks of an allocator.

        Raises:
            MemoryError: there is no memory for them, or too little would be left.
        """
        if allocator.common is not None:
            allocator.common.make_way(allocator, blocks)
        there = [pool.allocator.capacity for pool in self.pools]
        counts = [max(blocks if pool.allocator is allocator else count, pool.allocator.pinned)
                  for pool, count in zip(self.pools, there)]
        cross_blocks = blocks if allocator is self.cross_blocks else self.cross_blocks.capacity
        if self.memory is not None:
            before = max(self._average(there), self.cross_blocks.capacity)
            self.memory.check(before, max(self._average(counts), cross_blocks) - before)
        self.reserve(counts, cross_blocks)

    def reserve(self, counts: Ids[int], cross_blocks: int) -> None:
        """Let the program hold so many blocks of each pool."""
        self._there = list(counts)
        if len(counts) == 1:
            self.program.reserve(counts[0], cross_blocks)
        else:
            own = {pool.window: count for pool, count in zip(self.pools, counts, strict=True)}
            self.program.reserve(counts[0], cross_blocks, own)

    def trim(self) -> None:
        """Planned moves are made: what was there for their sake only is given back."""
        counts = [pool.allocator.capacity for pool in self.pools]
        for pool in self.pools:
            pool.allocator.pinned = 0
            pool.allocator.settle()
        if any(there > count for there, count in zip(self._there, counts)):
            self.reserve(counts, self.cross_blocks.capacity)

    def _average(self, counts: Ids[int]) -> int:
        """Blocks of all layers that take as much memory as so many of each pool."""
        if len(counts) == 1 or not self.unit:
            return max(counts)
        return -(-sum(pool.size * count for pool, count in zip(self.pools, counts, strict=True)) // self.unit)

    @property
    def reserved(self) -> int:
        """Blocks of all layers that take as much memory as those that are reserved."""
        return self._average([pool.allocator.capacity for pool in self.pools])

    def limit(self, blocks: int | None) -> None:
        """Let keys and values take no more than so many blocks of all layers, shared out as pools need them."""
        shared = len(self.pools) > 1 and self.unit > 0
        common = CommonMemory(self.pools, blocks * self.unit) if blocks is not None and shared else None
        for pool in self.pools:
            pool.allocator.common = common
            pool.allocator.limit = blocks if common is None else common.nbytes // pool.size if pool.size else None
        self.cross_blocks.limit = blocks

    def shares(self, blocks: int, sequences: int) -> list[int]:
        """Blocks of each pool if memory for so many of all layers is reserved at once: slots for so many sequences, up
        to half of it, and as many KV blocks as the rest holds."""
        state = self.pools[-1] if self.pools[-1].window == STATE else None
        if state is None or not state.size:
            return [blocks] * len(self.pools)
        alone = state.size == self.unit and len(self.pools) == 2 and not self.pools[0].size
        slots = blocks if alone else min(sequences, blocks * self.unit // 2 // state.size)
        left = blocks if alone else blocks - -(-slots * state.size // self.unit)
        return [slots if pool is state else left for pool in self.pools]

    def kv_bytes(self, used: bool = False) -> int:
        """Bytes of keys and values, and of states, that are reserved, or of those that requests hold."""
        cross = self.program.cross_block_bytes if self.has_encoder else 0
        held = [(pool.allocator, pool.size) for pool in self.pools] + [(self.cross_blocks, cross)]
        return sum((allocator.used if used else allocator.capacity) * size for allocator, size in held)

    def longest(self, texts: int) -> int:
        """Tokens of each of so many texts side by side that the context and the memory for keys and values hold."""
        size, limit, common = self.program.block_size, self.blocks.limit, self.blocks.common
        if limit is None:
            return self.context
        if common is None:
            return min(self.context, limit // texts * size)
        least, most = 0, self.context
        while least < most:
            middle = (least + most + 1) // 2
            fits = texts * text_bytes(self.pools, middle, self.chunk, size) <= common.nbytes
            least, most = (middle, most) if fits else (least, middle - 1)
        return least

    def variant(self, reach: int) -> Hashable:
        """Variant of the keys and values of a text of up to so many tokens: texts of equal variants may share them."""
        return variant(self.network, min(reach, self.context))

    def open(self, limit: int, encoder_ids: np.ndarray | None = None, reach: int = 0,
             adapter: int = NO_ADAPTER) -> "OpenSequence":
        """A new sequence of at most `limit` tokens, after the encoder has read `encoder_ids`, if given."""
        sequence = OpenSequence(self, limit, reach, adapter)
        if encoder_ids is not None:
            try:
                self.encode([BatchPart(sequence, encoder_ids, np.zeros(0, np.int32))], None)
            except BaseException:
                sequence.close()
                raise
        return sequence

    def encode(self, parts: Ids[BatchPart], output: str | None = "encoder_hidden") -> np.ndarray:
        """Let the encoder read whole texts, each for its sequence, which is still empty. Returns what `run` does.

        The texts' keys and values for the decoder stay with the sequences; the encoder's own lie in blocks that are
        free again afterwards.
        """
        scratch = [BlockTable(self.blocks, self.program.block_size) for _ in parts]
        with self.lock:
            try:
                counts = [len(part.ids) for part in parts]
                self._reserve(self.pools[:1], [(table,) for table in scratch], counts, counts)
                cross = Pool(self.cross_blocks)
                self._reserve([cross], [(part.sequence.cross,) for part in parts], counts, counts)
                for part in parts:
                    part.sequence.encoded = len(part.ids)
                return _copied(self.program.run(self.batches.of(parts, scratch), "encode", output))
            finally:
                for table in scratch:
                    table.release()

    def run(self, parts: Ids[BatchPart], output: str | None) -> np.ndarray:
        """One batch. Returns the wanted rows of `output`, part by part, float32 [R, N]; R = 0 if it is None."""
        with self.lock:
            self._reserve(self.pools, [part.sequence.tables for part in parts],
                          [part.sequence.length + len(part.ids) for part in parts],
                          [part.sequence.limit for part in parts])
            result = _copied(self.program.run(self.batches.of(parts), "main", output))
            for part in parts:
                part.sequence.went_on(len(part.ids))
            return result

    def execute(self, parts: Ids[BatchPart], entry: str, output: str | None, tables: Ids[BlockTable] | None = None):
        """One run of the program on parts whose blocks are there; tables: blocks instead of the sequences' own."""
        return self.program.run(self.batches.of(parts, tables), entry, output)

    def sample(self, parts: Ids[BatchPart], choices: Ids[Choice]) -> np.ndarray:
        """As `execute` on the main entry, but the program picks the tokens: int32 [R]."""
        return self.program.sample(self.batches.of(parts), choices)

    def decode(self, parts: Ids[BatchPart], steps: int, choices: Ids[Choice] | None = None) -> np.ndarray:
        """Tokens int32 [steps, n] of so many steps on the main entry, of one token of each part; see Program.decode."""
        return self.program.decode(self.batches.of(parts), steps, choices)

    def trace(self, sequence, ids) -> list[TraceRow]:
        """As `run` for one token, with a row per step of the network."""
        with self.lock:
            self._reserve(self.pools, [sequence.tables], [sequence.length + len(ids)], [sequence.limit])
            return self.program.trace(self.batches.of([BatchPart(sequence, ids, np.zeros(1, np.int32))]))

    def walk(self, sequence, ids, first: int = 0, given=None) -> list[tuple[int, list[np.ndarray]]]:
        """As `run` for one token, with what the steps leave in memory; see Program.walk."""
        with self.lock:
            self._reserve(self.pools, [sequence.tables], [sequence.length + len(ids)], [sequence.limit])
            batch = self.batches.of([BatchPart(sequence, ids, np.zeros(1, np.int32))])
            return list(self.program.walk(batch, "main", first, given))

    def _reserve(self, pools: Ids[Pool], tables: Ids[Ids[BlockTable]], tokens: Ids[int], limits: Ids[int]) -> None:
        """Let the tables of each text, one for each pool, hold its tokens; the program's KV memory grows in steps of up
        to `limits` tokens."""
        size = self.program.block_size
        missing = [sum(map(_missing, some, tokens)) for some in zip(*tables, strict=True)]
        wanted = [sum(max(0, pool.most(limit, self.chunk, size) - len(own[at].held))
                      for own, limit in zip(tables, limits, strict=True)) for at, pool in enumerate(pools)]
        if any(missing) and not room(pools, missing, wanted, size):
            raise OutOfMemoryError(f"no memory for the keys and values of {sum(tokens)} tokens")
        for own, count in zip(tables, tokens, strict=True):
            for table in own:
                table.extend(count)
                if table.window == STATE and table.shared(0):  # a marked state (OpenSequence.mark)
                    old, new = table.own(0)
                    self.program.copy_blocks([old], [new], STATE)
                    table.allocator.settle()


def _missing(table: BlockTable, tokens: int) -> int:
    """Blocks that a table has to take for so many tokens."""
    return table.missing(tokens) + (table.window == STATE and table.shared(0))


def _copied(result) -> np.ndarray:
    """The program's buffer is used again by its next run."""
    return np.empty((0, 0), np.float32) if result is None else np.array(result)


class OpenSequence:
    """One text in KV memory: `length` tokens have been run, at most `limit` will be. Use it in a `with`.

    encoded: tokens that the encoder has read for it. reach: tokens of the request that it is a part of, which choose
    what depends on the length; 0: the limit. marked: tokens that it can be taken back to (`rewind`) whatever comes;
    None: none. adapter: number of the adapter that its rows have.
    """

    def __init__(self, runner: Runner, limit: int, reach: int = 0, adapter: int = NO_ADAPTER):
        self.runner, self.adapter = runner, adapter
        self.limit, self.reach = limit, reach or limit
        self.length = 0
        self.encoded = 0
        self.marked: int | None = None
        self.tables = tuple(pool.table(runner.program.block_size) for pool in runner.pools)
        self._marked_state: BlockTable | None = None
        self.cross = BlockTable(runner.cross_blocks, runner.program.block_size)

    @property
    def table(self) -> BlockTable:
        """The blocks of the first pool."""
        return self.tables[0]

    def went_on(self, count: int) -> None:
        """So many tokens have been run: what no token to come sees is given back."""
        self.length += count
        for table in self.tables:
            table.slide(self.length - REWINDS if self.marked is None else min(self.length, self.marked))

    def mark(self) -> None:
        """Let `rewind` come back to the tokens that there are now, whatever comes."""
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
        """Forget the tokens behind the first `length`. Returns how many are left: fewer where a state can be taken back
        to a mark only, none where the blocks of a window were given back that the next token would see."""
        if length < self.length and self.tables[-1].window == STATE:
            length = self._back_to_mark(length)
        if any(table.reaches(length) < table.first for table in self.tables):
            with self.runner.lock:
                self._forget_mark()
                for table in self.tables:
                    table.release()
            length = 0
        self.length = length
        return length

    def _back_to_mark(self, length: int) -> int:
        """Take up the state that was marked, if that was not behind `length`."""
        with self.runner.lock:
            self.tables[-1].release()
            if self._marked_state is None or self.marked is None or self.marked > length:
                return 0
            self.tables[-1].hold(self._marked_state.allocator.share(self._marked_state.blocks))
            return self.marked

    def last(self, ids: Ids, output: str = "logits") -> np.ndarray:
        """Run `ids` in chunks; float32 [N], the output's row of the last one."""
        rest = self.advance(np.asarray(ids, np.int32))
        return self.runner.run([BatchPart(self, rest, np.array([len(rest) - 1], np.int32))], output)[0]

    def advance(self, ids: np.ndarray) -> np.ndarray:
        """Run all `ids` but the last chunk, which is returned."""
        chunk = self.runner.chunk
        while len(ids) > chunk:
            self.runner.run([BatchPart(self, ids[:chunk], np.zeros(0, np.int32))], None)
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
            yield start, self.runner.run([BatchPart(self, part, np.arange(0, len(part), every), part_types)], output)

    def close(self) -> None:
        """Give the KV blocks back; may be called twice."""
        with self.runner.lock:
            self._forget_mark()
            for table in self.tables:
                table.release()
            self.cross.release()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
