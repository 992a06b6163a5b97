"""Pools of KV blocks that share one memory budget: layers with a window, layers with full attention, and slots for
the states of recurrent layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.schedule.slots import SlotTable
from numflow.network.windows import STATE, most_blocks


@dataclass(eq=False)
class Pool:
    """KV blocks of all layers with the same window, or slots (window STATE). size: bytes of a block."""

    allocator: BlockAllocator
    window: int = 0
    size: int = 0

    def table(self, block_size: int) -> BlockTable:
        """An empty block table."""
        return (SlotTable if self.window == STATE else BlockTable)(self.allocator, block_size, self.window)

    def max_blocks(self, tokens: int, chunk: int, block_size: int) -> int:
        """Maximum number of blocks that a text of `tokens` tokens holds at a time."""
        return min(1, tokens) if self.window == STATE else most_blocks(self.window, tokens, chunk, block_size)


def text_bytes(pools: Sequence[Pool], tokens: int, chunk: int, block_size: int) -> int:
    """Maximum number of bytes of blocks that a text of `tokens` tokens holds at a time."""
    return sum(pool.size * pool.max_blocks(tokens, chunk, block_size) for pool in pools)


class MemoryBudget:
    """`nbytes` bytes shared by the blocks of several pools. A pool may take the memory that others do not need now."""

    def __init__(self, pools: Sequence[Pool], nbytes: int):
        self.pools, self.nbytes = pools, nbytes

    def max_blocks(self, allocator: BlockAllocator) -> int:
        """Maximum capacity of an allocator, if the other pools shrink as far as possible."""
        others = sum(pool.size * pool.allocator.min_capacity for pool in self.pools if pool.allocator is not allocator)
        this = next(pool for pool in self.pools if pool.allocator is allocator)
        return max(allocator.capacity, (self.nbytes - others) // this.size) if this.size else 1 << 62

    def shrink_others(self, allocator: BlockAllocator, capacity: int) -> None:
        """Shrink the other pools as far as necessary for an allocator to have `capacity` blocks."""
        capacities = [capacity if pool.allocator is allocator else pool.allocator.capacity for pool in self.pools]
        excess = sum(pool.size * count for pool, count in zip(self.pools, capacities)) - self.nbytes
        for pool in sorted(self.pools,
                           key=lambda pool: -pool.size * (pool.allocator.capacity - pool.allocator.min_capacity)):
            if excess <= 0:
                return
            if pool.allocator is not allocator and pool.size:
                released = min(-(-excess // pool.size), pool.allocator.capacity - pool.allocator.min_capacity)
                pool.allocator.shrink(pool.allocator.capacity - released)
                excess -= released * pool.size


@contextmanager
def reserve(pools: Sequence[Pool], counts: Sequence[int]) -> Iterator[None]:
    """Reserve `counts` blocks of the pools in a `with`: no pool gives their memory to another pool."""
    for pool, count in zip(pools, counts, strict=True):
        pool.allocator.reserved = count
    try:
        yield
    finally:
        for pool in pools:
            pool.allocator.reserved = 0


def can_allocate(pools: Sequence[Pool], counts: Sequence[int], wanted: Sequence[int], block_size: int) -> bool:
    """Whether `counts` blocks of the pools can be allocated together; see BlockAllocator.can_allocate."""
    with reserve(pools, counts):
        requests = zip(pools, counts, wanted, strict=True)
        return all(pool.allocator.can_allocate(count, more, block_size) for pool, count, more in requests) \
            and all(count <= pool.allocator.free for pool, count in zip(pools, counts, strict=True))
