"""Prefix reuse: sequences take blocks and snapshots from the prefix cache, and insert their own. Integers only."""

from collections.abc import Hashable

from numflow.engine.schedule.blocks import GONE
from numflow.engine.schedule.limits import StepLimits
from numflow.engine.schedule.pools import Pool, can_allocate
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.sequence import Sequence, SequenceGroup
from numflow.network.windows import STATE


class Reuse:
    """The prefix cache as the scheduler uses it. prefix: None: nothing is reused.

    counts: "prefix_tokens" counts the tokens that need not run.
    """

    def __init__(self, prefix: PrefixCache | None, pools: list[Pool], block_size: int, limits: StepLimits,
                 counts: dict[str, int]):
        self.prefix, self.pools, self.block_size, self.limits, self.counts = prefix, pools, block_size, limits, counts
        self.recurrent = any(pool.window == STATE for pool in pools)

    def _cache_of(self, sequence: Sequence) -> PrefixCache | None:
        return self.prefix if sequence.group.cached else None

    def find(self, group: SequenceGroup) -> None:
        """Give new sequences their blocks in the prefix cache. The last token of a sequence always runs."""
        for sequence in group.sequences:
            if (prefix := self._cache_of(sequence)) is None or sequence.group.every_row:
                continue
            limit = (len(sequence.ids) - 1) // self.block_size
            node, blocks, sequence.shared_blocks = prefix.match(group.root, sequence.ids, limit, sequence.tables,
                                                                  group.adapter_start)
            for table, cached in zip(sequence.tables, blocks, strict=True):
                first = cached.count(GONE)
                table.assign([*cached[:first], *table.allocator.share(cached[first:])], first)
            sequence.node, sequence.cached_blocks = node, len(blocks[0])
            sequence.length = len(blocks[0]) * self.block_size

    def insert(self, sequence: Sequence, length: int) -> None:
        """Insert the full blocks of the first `length` tokens of a sequence; the state too if `length` is a block
        boundary."""
        if (prefix := self._cache_of(sequence)) is None:
            return
        for index in range(sequence.cached_blocks, length // self.block_size):
            blocks = [table.full_block(index, length) for table in sequence.tables]
            sequence.node = prefix.insert(sequence.node, sequence.ids, index, blocks, sequence.group.adapter_start)
            sequence.cached_blocks = index + 1

    def max_chunk(self, sequence: Sequence) -> int:
        """Maximum tokens of a prompt in a step. Snapshots of a state are taken where the text diverges from another
        text and at its last block boundary, so chunks end there."""
        chunk = self.limits.chunk
        if self.recurrent and self._cache_of(sequence) is not None and not sequence.group.every_row:
            for block in (sequence.shared_blocks, (len(sequence.ids) - 1) // self.block_size):
                distance = block * self.block_size - sequence.length
                chunk = min(chunk, distance) if distance > 0 else chunk
        return chunk

    def next_block(self, sequence: Sequence) -> Hashable:
        """Take blocks that other sequences inserted into the prefix cache since this sequence started; returns the key
        of the next block, None if no other sequence can use it (see choose_chunks). Sequences with a recurrent state
        take no blocks: a block alone lacks the state."""
        start = sequence.length
        if (prefix := self._cache_of(sequence)) is None or sequence.group.every_row or start % self.block_size \
                or self.recurrent:
            return None
        next_block = self._take_cached(sequence, prefix)
        if sequence.length > start:
            self._extend(sequence, [sequence.tokens_needed(table, self.limits.chunk) for table in sequence.tables])
        return next_block

    def _take_cached(self, sequence: Sequence, prefix: PrefixCache) -> Hashable:
        size = self.block_size
        while (sequence.length + size < len(sequence.ids)
               and sequence.cached_blocks == (index := sequence.length // size)):
            key = sequence.node, sequence.ids, index, sequence.group.adapter_start
            found = prefix.find(*key)
            if found is None:
                return prefix.key(*key)
            tokens = min(len(sequence.ids), (index + 2) * size)  # the tokens that are left to run need a block too
            if GONE in found[1] or not self._extend(sequence, [tokens] * len(sequence.tables)):
                return None
            sequence.node, blocks = found
            for table, block in zip(sequence.tables, blocks, strict=True):
                if block != table.blocks[index]:
                    table.allocator.share([block])
                    table.allocator.release([table.blocks[index]])
                    table.blocks[index] = block
            sequence.length, sequence.cached_blocks = sequence.length + size, index + 1
            self.count(sequence, 1)
            for table in sequence.tables:
                table.slide(sequence.length, sequence.shared_blocks)
        return None

    def _extend(self, sequence: Sequence, tokens: list[int]) -> bool:
        """Extend each table of a sequence to `tokens` tokens, if the blocks can be allocated."""
        missing = [table.missing(count) for table, count in zip(sequence.tables, tokens, strict=True)]
        if any(missing) and not can_allocate(self.pools, missing, missing, self.block_size):
            return False
        for table, count in zip(sequence.tables, tokens, strict=True):
            table.extend(count)
        return True

    def count(self, sequence: Sequence, blocks: int) -> None:
        """Count reused blocks."""
        self.counts["prefix_tokens"] += blocks * self.block_size
        sequence.group.reused = min(sequence.group.reused + blocks * self.block_size, len(sequence.group.prompt))
