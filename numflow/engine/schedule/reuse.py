"""Reuse of what has run: sequences hold blocks and snapshots of the prefix cache and leave it theirs. Integers only."""

from collections.abc import Hashable

from numflow.engine.schedule.blocks import GONE
from numflow.engine.schedule.limits import StepLimits
from numflow.engine.schedule.pools import Pool, room
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.sequence import Sequence, SequenceGroup
from numflow.network.windows import STATE


class Reuse:
    """The prefix cache as a scheduler uses it; without one (None) nothing is reused.

    counts: "prefix_tokens" grows by the tokens that need not run.
    """

    def __init__(self, prefix: PrefixCache | None, pools: list[Pool], block_size: int, limits: StepLimits,
                 counts: dict[str, int]):
        self.prefix, self.pools, self.block_size, self.limits, self.counts = prefix, pools, block_size, limits, counts
        self.recurrent = any(pool.window == STATE for pool in pools)

    def _of(self, sequence: Sequence) -> PrefixCache | None:
        return self.prefix if sequence.group.cached else None

    def find(self, group: SequenceGroup) -> None:
        """Let new sequences hold what the prefix cache has of them; their last token runs in any case."""
        for sequence in group.sequences:
            if (prefix := self._of(sequence)) is None or sequence.group.every_row:
                continue
            most = (len(sequence.ids) - 1) // self.block_size
            node, blocks, sequence.border = prefix.match(group.root, sequence.ids, most, sequence.tables)
            for table, own in zip(sequence.tables, blocks, strict=True):
                first = own.count(GONE)
                table.hold([*own[:first], *table.allocator.share(own[first:])], first)
            sequence.node, sequence.registered, sequence.length = node, len(blocks[0]), len(blocks[0]) * self.block_size

    def keep(self, sequence: Sequence, length: int) -> None:
        """Remember the full blocks of a sequence that has run so many tokens, and its state if it ends with one."""
        if (prefix := self._of(sequence)) is None:
            return
        for at in range(sequence.registered, length // self.block_size):
            blocks = [table.ended(at, length) for table in sequence.tables]
            sequence.node = prefix.insert(sequence.node, sequence.ids, at, blocks)
            sequence.registered = at + 1

    def piece(self, sequence: Sequence) -> int:
        """Tokens of a prompt that may run in a step. Snapshots of a state are taken where the text parts from another
        one and at the last border of its blocks, so pieces end there."""
        most = self.limits.chunk
        if self.recurrent and self._of(sequence) is not None and not sequence.group.every_row:
            for border in (sequence.border, (len(sequence.ids) - 1) // self.block_size):
                ahead = border * self.block_size - sequence.length
                most = min(most, ahead) if ahead > 0 else most
        return most

    def next_block(self, sequence: Sequence) -> Hashable:
        """Take over blocks of the prefix cache that came into being since the sequence started; see choose_chunks.
        A state belongs to the text before it: nothing is taken over without."""
        start = sequence.length
        if (prefix := self._of(sequence)) is None or sequence.group.every_row or start % self.block_size \
                or self.recurrent:
            return None
        upcoming = self._take_over(sequence, prefix)
        if sequence.length > start:
            self._extend(sequence, [sequence.due(table, self.limits.chunk) for table in sequence.tables])
        return upcoming

    def _take_over(self, sequence: Sequence, prefix: PrefixCache) -> Hashable:
        size = self.block_size
        while sequence.length + size < len(sequence.ids) and sequence.registered == (at := sequence.length // size):
            found = prefix.find(sequence.node, sequence.ids, at)
            if found is None:
                return sequence.node, tuple(sequence.ids[sequence.length:sequence.length + size])
            further = min(len(sequence.ids), (at + 2) * size)  # what is left to run needs a block too
            if GONE in found[1] or not self._extend(sequence, [further] * len(sequence.tables)):
                return None
            sequence.node, blocks = found
            for table, block in zip(sequence.tables, blocks, strict=True):
                if block != table.blocks[at]:
                    table.allocator.share([block])
                    table.allocator.release([table.blocks[at]])
                    table.blocks[at] = block
            sequence.length, sequence.registered = sequence.length + size, at + 1
            self.count(sequence, 1)
            for table in sequence.tables:
                table.slide(sequence.length, sequence.border)
        return None

    def _extend(self, sequence: Sequence, tokens: list[int]) -> bool:
        """Let each table of a sequence hold so many tokens, if there is room."""
        missing = [table.missing(count) for table, count in zip(sequence.tables, tokens, strict=True)]
        if any(missing) and not room(self.pools, missing, missing, self.block_size):
            return False
        for table, count in zip(sequence.tables, tokens, strict=True):
            table.extend(count)
        return True

    def count(self, sequence: Sequence, blocks: int) -> None:
        """Count blocks that need not run."""
        self.counts["prefix_tokens"] += blocks * self.block_size
        sequence.group.reused = min(sequence.group.reused + blocks * self.block_size, len(sequence.group.prompt))
