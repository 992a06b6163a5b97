"""A program of 20 lines for the scheduler alone: KV blocks are lists of tokens, the next token follows from all."""

from itertools import chain

from numflow.engine.schedule.blocks import BlockAllocator
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.scheduler import Scheduler

SIZE = 4


def following(history):
    """The token that comes after these."""
    return hash(tuple(history)) % 3


class Machine:
    """Carries out a scheduler's plans, and checks that every token finds before it what it must."""

    def __init__(self, limits, blocks=None, prefix=True, host=None):
        device = BlockAllocator(limit=blocks)
        device.keep_up_to = blocks or 8
        self.memory, self.parked = {}, {}
        self.scheduler = Scheduler(device, BlockAllocator(limit=blocks), SIZE, limits,
                                   PrefixCache(device, SIZE) if prefix else None, BlockAllocator(limit=host))

    def step(self):
        """One step; returns its plan."""
        plan = self.scheduler.plan()
        for block, host in plan.saves:
            self.parked[host] = list(self.memory[block])
        for host, block in plan.loads:
            self.memory[block] = list(self.parked[host])
        for source, target in plan.copies:
            self.memory[target] = list(self.memory[source])
        for group, scratch in plan.encodes:
            assert len(scratch.blocks) == len(group.cross.blocks) == -(-group.encoder // SIZE)
            scratch.release()
        for span in plan.spans:
            self.run(span)
        return plan

    def run(self, span):
        lane, blocks = span.lane, span.lane.table.blocks
        tokens = [*lane.ids, *span.drafts]
        for at in range(span.start, span.start + span.count):
            content = self.memory.setdefault(blocks[at // SIZE], [None] * SIZE)
            content[at % SIZE] = tokens[at]
            holders = self.scheduler.blocks.holders(blocks[at // SIZE])
            assert holders == 1, f"block {blocks[at // SIZE]}, which {holders} tables hold, is written at place {at}"
        end = span.start + span.count
        found = list(chain.from_iterable(self.memory[block] for block in blocks[:-(-end // SIZE)]))[:end]
        assert found == tokens[:end], f"a token at {end} sees {found}, not its own {tokens[:end]}"
