"""A fake program for tests of the scheduler: KV blocks are lists of tokens, a state is the list of all tokens so far,
and the next token depends on all tokens."""

from functools import partial
from itertools import chain

from numflow.engine.schedule.blocks import GONE, BlockAllocator
from numflow.engine.schedule.pools import MemoryBudget, Pool
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.scheduler import Scheduler
from numflow.network.windows import STATE, first_key

SIZE = 4


def following(history):
    """The token that comes after these."""
    return hash(tuple(history)) % 3


class Machine:
    """Executes a scheduler's plans, and checks that every token attends to the right tokens.

    windows: of the layers, each with a pool of blocks, and STATE; where there are several, `blocks` are shared out.
    """

    def __init__(self, limits, blocks=None, prefix=True, host=None, windows=(0,)):
        self.pools = [Pool(BlockAllocator(limit=blocks), window, 2 + at) for at, window in enumerate(windows)]
        devices = [pool.allocator for pool in self.pools]
        for device in devices:
            device.cache_up_to = blocks or 8
        if blocks is not None and len(windows) > 1:
            budget = MemoryBudget(self.pools, blocks * sum(pool.size for pool in self.pools))
            for pool in self.pools:
                pool.allocator.budget, pool.allocator.limit = budget, budget.nbytes // pool.size
                pool.allocator.on_grow = partial(budget.shrink_others, pool.allocator)
        self.memories, self.hosts = [{} for _ in windows], [{} for _ in windows]
        self.scheduler = Scheduler(self.pools, BlockAllocator(limit=blocks), SIZE, limits,
                                   PrefixCache(devices[0], SIZE, *devices[1:]) if prefix else None,
                                   [BlockAllocator(limit=host) for _ in windows])

    @property
    def memory(self):
        """Memory of the first pool."""
        return self.memories[0]

    def step(self):
        """One step; returns its plan."""
        plan = self.scheduler.plan()
        for pool, moves in plan.moving.items():
            memory, swapped = self.memories[pool], self.hosts[pool]
            there = max(self.pools[pool].allocator.capacity, self.pools[pool].allocator.pinned)
            assert all(block < there for block, _ in (*moves.saves, *moves.copies)), "memory went before it was saved"
            for block, host in moves.saves:
                swapped[host] = list(memory[block])
            for host, block in moves.loads:
                memory[block] = list(swapped[host])
            for source, target in moves.copies:
                memory[target] = list(memory[source])
            self.pools[pool].allocator.settle()
        for group, scratch in plan.encodes:
            assert len(scratch.blocks) == len(group.cross.blocks) == -(-group.encoder // SIZE)
            scratch.release()
        for chunk in plan.chunks:
            for pool in range(len(self.pools)):
                (self.recur if self.pools[pool].window == STATE else self.run)(chunk, pool)
        return plan

    def recur(self, chunk, number):
        sequence, memory, allocator = chunk.sequence, self.memories[number], self.pools[number].allocator
        (slot,), tokens = sequence.tables[number].blocks, [*sequence.ids, *chunk.drafts]
        assert allocator.holders(slot) == 1 and not allocator.is_cached(slot), f"slot {slot} is not the sequence's own"
        found = memory[slot] if chunk.start else []
        assert found == tokens[:chunk.start], f"a token at {chunk.start} finds {found}, not its own {tokens}"
        memory[slot] = tokens[:chunk.start + chunk.count]

    def run(self, chunk, number):
        sequence, blocks = chunk.sequence, chunk.sequence.tables[number].blocks
        memory, pool = self.memories[number], self.pools[number]
        tokens = [*sequence.ids, *chunk.drafts]
        for at in range(chunk.start, chunk.start + chunk.count):
            assert 0 <= blocks[at // SIZE] < pool.allocator.capacity
            content = memory.setdefault(blocks[at // SIZE], [None] * SIZE)
            content[at % SIZE] = tokens[at]
            holders = pool.allocator.holders(blocks[at // SIZE])
            assert holders == 1, f"block {blocks[at // SIZE]}, which {holders} tables hold, is written at place {at}"
        end, gone = chunk.start + chunk.count, first_key(pool.window, chunk.start) // SIZE
        assert GONE not in blocks[gone:], "a block has gone too early"
        most = max(1 + len(chunk.drafts), self.scheduler.limits.chunk)
        assert len(sequence.tables[number].held) <= pool.max_blocks(sequence.group.limit, most, SIZE)
        found = list(chain.from_iterable(memory[block] for block in blocks[gone:-(-end // SIZE)]))[:end - gone * SIZE]
        expected = tokens[gone * SIZE:end]
        assert found == expected, f"a token at {end} sees {found}, not its own {expected}"
