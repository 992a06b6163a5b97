"""Swap space: host blocks with the keys and values of preempted requests. Integers only."""

from collections.abc import Mapping

from numflow.engine.schedule.blocks import GONE, BlockAllocator, BlockTable
from numflow.engine.schedule.sequence import Sequence, SequenceGroup, StepPlan


class SwapSpace:
    """Second tier of KV memory, for the blocks of one pool. host: allocator of the host blocks."""

    def __init__(self, host: BlockAllocator, block_size: int, pool: int = 0):
        self.host, self.block_size, self.pool = host, block_size, pool
        self._releasing: list[list[int]] = []  # loaded by the current plan: not to be overwritten within it

    def _tables(self, group: SequenceGroup) -> list[tuple[Sequence, BlockTable]]:
        return [(sequence, sequence.tables[self.pool]) for sequence in group.sequences]

    def _run_blocks(self, group: SequenceGroup) -> list[tuple[BlockTable, list[int]]]:
        """The table of each sequence, and its blocks of tokens that have run."""
        return [(table, table.blocks[table.first:table.count(sequence.length)])
                for sequence, table in self._tables(group)]

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """Whether there are blocks to save, and host blocks for them."""
        blocks = {block for _, blocks in self._run_blocks(group) for block in blocks}
        return bool(blocks) and self.host.can_allocate(len(blocks), len(blocks), self.block_size)

    def swap_out(self, group: SequenceGroup, plan: StepPlan, origin: Mapping[int, int]) -> bool:
        """Plan to save the blocks of a group; shared blocks are saved once. False if too few host blocks are free.

        origin: for the target of a copy that is still to be made, the block that has the content now.
        """
        if not self.can_swap_out(group):
            return False
        run_blocks = self._run_blocks(group)
        blocks = list(dict.fromkeys(block for _, table_blocks in run_blocks for block in table_blocks))
        host_of = dict(zip(blocks, self.host.allocate(len(blocks))))
        plan.moves(self.pool).saves += [(origin.get(block, block), host_of[block]) for block in blocks]
        for table, table_blocks in run_blocks:
            table.swapped, table.skipped = self.host.share([host_of[block] for block in table_blocks]), table.first
        self.host.release(list(host_of.values()))
        return True

    def needed(self, group: SequenceGroup, chunk: int) -> int:
        """Number of blocks that swapping in a group takes, including those for its next tokens."""
        tables = self._tables(group)
        swapped = len({block for _, table in tables for block in table.swapped})
        last = [table.swapped[index] for sequence, table in tables
                if (index := table.block_index(sequence.length) - table.skipped) < len(table.swapped)]
        copies = len(last) - len(set(last))
        return swapped + copies + sum(
            max(0, table.count(sequence.tokens_needed(table, chunk)) - table.skipped - len(table.swapped))
            for sequence, table in tables)

    def swap_in(self, group: SequenceGroup, blocks: BlockAllocator, plan: StepPlan) -> None:
        """Plan to load the saved blocks of a group into blocks allocated from `blocks`."""
        tables = self._tables(group)
        swapped = list(dict.fromkeys(block for _, table in tables for block in table.swapped))
        block_of = dict(zip(swapped, blocks.allocate(len(swapped))))
        plan.moves(self.pool).loads += [(block, block_of[block]) for block in swapped]
        for _, table in tables:
            loaded = blocks.share([block_of[block] for block in table.swapped])
            table.assign([GONE] * table.skipped + loaded, table.skipped)
            self._releasing.append(table.swapped)
            table.swapped = []
        blocks.release(list(block_of.values()))

    def settle(self) -> None:
        """Release the host blocks that the last plan loaded; the plan has been executed."""
        for blocks in self._releasing:
            self.host.release(blocks)
        self._releasing.clear()

    def forget(self, sequence: Sequence) -> None:
        """Release the host blocks of a sequence."""
        table = sequence.tables[self.pool]
        swapped, table.swapped = table.swapped, []
        self.host.release(swapped)
