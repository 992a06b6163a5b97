"""Keys and values of requests that had to make place, in the host's memory: which block lies where. Integers only."""

from numflow.engine.schedule.blocks import BlockAllocator
from numflow.engine.schedule.lane import Group, Lane, Plan


class Parking:
    """The second tier of KV memory. `host` hands out its blocks."""

    def __init__(self, host: BlockAllocator, block_size: int):
        self.host, self.block_size = host, block_size
        self._leaving: list[list[int]] = []  # loaded in the last plan: not to be overwritten within it

    def park(self, group: Group, plan: Plan, origin: dict[int, int]) -> bool:
        """Plan to save what the lanes have run; blocks that they share are saved once. False if there is no room.

        origin: for blocks that are still to be copied, where the content is now.
        """
        wanted = {lane: lane.table.blocks[:-(-lane.length // self.block_size)] for lane in group.lanes}
        blocks = list(dict.fromkeys(block for own in wanted.values() for block in own))
        if not blocks or not self.host.room(len(blocks), len(blocks), self.block_size):
            return False
        place = dict(zip(blocks, self.host.allocate(len(blocks))))
        plan.saves += [(origin.get(block, block), place[block]) for block in blocks]
        for lane, own in wanted.items():
            lane.parked = self.host.share([place[block] for block in own])
        self.host.release(list(place.values()))
        return True

    def needed(self, group: Group) -> int:
        """Blocks that fetching a group takes, with those that its lanes need to go on."""
        parked = len({block for lane in group.lanes for block in lane.parked})
        last = [lane.parked[at] for lane in group.lanes if (at := lane.length // self.block_size) < len(lane.parked)]
        copies = len(last) - len(set(last))
        return parked + copies + sum(max(0, -(-len(lane.ids) // self.block_size) - len(lane.parked))
                                     for lane in group.lanes)

    def fetch(self, group: Group, blocks: BlockAllocator, plan: Plan) -> None:
        """Plan to load what was saved into `blocks` that the lanes take for it."""
        parked = list(dict.fromkeys(block for lane in group.lanes for block in lane.parked))
        place = dict(zip(parked, blocks.allocate(len(parked))))
        plan.loads += [(block, place[block]) for block in parked]
        for lane in group.lanes:
            lane.table.blocks = blocks.share([place[block] for block in lane.parked])
            self._leaving.append(lane.parked)
            lane.parked = []
        blocks.release(list(place.values()))

    def settle(self) -> None:
        """The last plan was carried out: what it loaded is free here."""
        for blocks in self._leaving:
            self.host.release(blocks)
        self._leaving.clear()

    def forget(self, lane: Lane) -> None:
        """A lane's blocks here are free again."""
        parked, lane.parked = lane.parked, []
        self.host.release(parked)
