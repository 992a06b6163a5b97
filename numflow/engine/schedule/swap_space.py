"""Keys and values of requests that had to make place, in the host's memory: which block lies where. Integers only."""

from collections.abc import Mapping

from numflow.engine.schedule.blocks import GONE, BlockAllocator, BlockTable
from numflow.engine.schedule.sequence import Group, Lane, Plan


class Parking:
    """The second tier of KV memory, for the blocks of one pool. `host` hands out its blocks."""

    def __init__(self, host: BlockAllocator, block_size: int, pool: int = 0):
        self.host, self.block_size, self.pool = host, block_size, pool
        self._leaving: list[list[int]] = []  # loaded in the last plan: not to be overwritten within it

    def _tables(self, group: Group) -> list[tuple[Lane, BlockTable]]:
        return [(lane, lane.tables[self.pool]) for lane in group.lanes]

    def _wanted(self, group: Group) -> list[tuple[BlockTable, list[int]]]:
        """Of each lane, the blocks of what it has run."""
        return [(table, table.blocks[table.first:-(-lane.length // self.block_size)])
                for lane, table in self._tables(group)]

    def room(self, group: Group) -> bool:
        """Whether there is something to save, and room for it."""
        blocks = {block for _, own in self._wanted(group) for block in own}
        return bool(blocks) and self.host.room(len(blocks), len(blocks), self.block_size)

    def park(self, group: Group, plan: Plan, origin: Mapping[int, int]) -> bool:
        """Plan to save what the lanes have run; blocks that they share are saved once. False if there is no room.

        origin: for blocks that are still to be copied, where the content is now.
        """
        if not self.room(group):
            return False
        wanted = self._wanted(group)
        blocks = list(dict.fromkeys(block for _, own in wanted for block in own))
        place = dict(zip(blocks, self.host.allocate(len(blocks))))
        plan.moves(self.pool).saves += [(origin.get(block, block), place[block]) for block in blocks]
        for table, own in wanted:
            table.parked, table.skipped = self.host.share([place[block] for block in own]), table.first
        self.host.release(list(place.values()))
        return True

    def needed(self, group: Group, chunk: int) -> int:
        """Blocks that fetching a group takes, with those that its lanes need to go on."""
        tables = self._tables(group)
        parked = len({block for _, table in tables for block in table.parked})
        last = [table.parked[at] for lane, table in tables
                if (at := lane.length // self.block_size - table.skipped) < len(table.parked)]
        copies = len(last) - len(set(last))
        return parked + copies + sum(
            max(0, -(-lane.due(table, chunk) // self.block_size) - table.skipped - len(table.parked))
            for lane, table in tables)

    def fetch(self, group: Group, blocks: BlockAllocator, plan: Plan) -> None:
        """Plan to load what was saved into `blocks` that the lanes take for it."""
        tables = self._tables(group)
        parked = list(dict.fromkeys(block for _, table in tables for block in table.parked))
        place = dict(zip(parked, blocks.allocate(len(parked))))
        plan.moves(self.pool).loads += [(block, place[block]) for block in parked]
        for _, table in tables:
            own = blocks.share([place[block] for block in table.parked])
            table.hold([GONE] * table.skipped + own, table.skipped)
            self._leaving.append(table.parked)
            table.parked = []
        blocks.release(list(place.values()))

    def settle(self) -> None:
        """The last plan was carried out: what it loaded is free here."""
        for blocks in self._leaving:
            self.host.release(blocks)
        self._leaving.clear()

    def forget(self, lane: Lane) -> None:
        """A lane's blocks here are free again."""
        table = lane.tables[self.pool]
        parked, table.parked = table.parked, []
        self.host.release(parked)
