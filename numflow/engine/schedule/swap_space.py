"""Swap space: the host blocks that hold keys and values of preempted requests. Integers only."""

from collections.abc import Mapping

from numflow.engine.schedule.blocks import GONE, BlockAllocator, BlockTable
from numflow.engine.schedule.sequence import Sequence, SequenceGroup, StepPlan


class SwapSpace:
    """The second tier of KV memory, for the blocks of one pool. `host` hands out its blocks."""

    def __init__(self, host: BlockAllocator, block_size: int, pool: int = 0):
        self.host, self.block_size, self.pool = host, block_size, pool
        self._leaving: list[list[int]] = []  # loaded in the last plan: not to be overwritten within it

    def _tables(self, group: SequenceGroup) -> list[tuple[Sequence, BlockTable]]:
        return [(sequence, sequence.tables[self.pool]) for sequence in group.sequences]

    def _wanted(self, group: SequenceGroup) -> list[tuple[BlockTable, list[int]]]:
        """Of each sequence, the blocks of what it has run."""
        return [(table, table.blocks[table.first:table.count(sequence.length)])
                for sequence, table in self._tables(group)]

    def room(self, group: SequenceGroup) -> bool:
        """Whether there is something to save, and room for it."""
        blocks = {block for _, own in self._wanted(group) for block in own}
        return bool(blocks) and self.host.room(len(blocks), len(blocks), self.block_size)

    def swap_out(self, group: SequenceGroup, plan: StepPlan, origin: Mapping[int, int]) -> bool:
        """Plan to save what the sequences have run; blocks that they share are saved once. False if there is no room.

        origin: for blocks that are still to be copied, where the content is now.
        """
        if not self.room(group):
            return False
        wanted = self._wanted(group)
        blocks = list(dict.fromkeys(block for _, own in wanted for block in own))
        place = dict(zip(blocks, self.host.allocate(len(blocks))))
        plan.moves(self.pool).saves += [(origin.get(block, block), place[block]) for block in blocks]
        for table, own in wanted:
            table.swapped, table.skipped = self.host.share([place[block] for block in own]), table.first
        self.host.release(list(place.values()))
        return True

    def needed(self, group: SequenceGroup, chunk: int) -> int:
        """Blocks that swapping in a group takes, with those that its sequences need to go on."""
        tables = self._tables(group)
        swapped = len({block for _, table in tables for block in table.swapped})
        last = [table.swapped[at] for sequence, table in tables
                if (at := table.place(sequence.length) - table.skipped) < len(table.swapped)]
        copies = len(last) - len(set(last))
        return swapped + copies + sum(
            max(0, table.count(sequence.due(table, chunk)) - table.skipped - len(table.swapped))
            for sequence, table in tables)

    def swap_in(self, group: SequenceGroup, blocks: BlockAllocator, plan: StepPlan) -> None:
        """Plan to load what was saved into `blocks` that the sequences take for it."""
        tables = self._tables(group)
        swapped = list(dict.fromkeys(block for _, table in tables for block in table.swapped))
        place = dict(zip(swapped, blocks.allocate(len(swapped))))
        plan.moves(self.pool).loads += [(block, place[block]) for block in swapped]
        for _, table in tables:
            own = blocks.share([place[block] for block in table.swapped])
            table.hold([GONE] * table.skipped + own, table.skipped)
            self._leaving.append(table.swapped)
            table.swapped = []
        blocks.release(list(place.values()))

    def settle(self) -> None:
        """The last plan was carried out: what it loaded is free here."""
        for blocks in self._leaving:
            self.host.release(blocks)
        self._leaving.clear()

    def forget(self, sequence: Sequence) -> None:
        """A sequence's blocks here are free again."""
        table = sequence.tables[self.pool]
        swapped, table.swapped = table.swapped, []
        self.host.release(swapped)
