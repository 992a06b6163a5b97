"""Memory that KV blocks of several kinds share: layers with a window, layers that see the whole text, and slots for the
states of recurrent steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.schedule.slots import SlotTable
from numflow.network.windows import STATE, most_blocks


@dataclass(eq=False)
class Pool:
    """The KV blocks of the layers with one window, or the slots of STATE. size: bytes of a block."""

    allocator: BlockAllocator
    window: int = 0
    size: int = 0

    def table(self, block_size: int) -> BlockTable:
        """An empty table."""
        return (SlotTable if self.window == STATE else BlockTable)(self.allocator, block_size, self.window)

    def most(self, tokens: int, chunk: int, block_size: int) -> int:
        """Blocks that a text of so many tokens may hold at a time."""
        return min(1, tokens) if self.window == STATE else most_blocks(self.window, tokens, chunk, block_size)


def text_bytes(pools: Sequence[Pool], tokens: int, chunk: int, block_size: int) -> int:
    """Bytes of the blocks that a text of so many tokens may hold at a time."""
    return sum(pool.size * pool.most(tokens, chunk, block_size) for pool in pools)


class CommonMemory:
    """So many bytes for the blocks of several pools. What one does not need now, another one may have."""

    def __init__(self, pools: Sequence[Pool], nbytes: int):
        self.pools, self.nbytes = pools, nbytes

    def most(self, allocator: BlockAllocator) -> int:
        """Blocks that an allocator may have, if the others give away all that they can."""
        others = sum(pool.size * pool.allocator.least for pool in self.pools if pool.allocator is not allocator)
        own = next(pool for pool in self.pools if pool.allocator is allocator)
        return max(allocator.capacity, (self.nbytes - others) // own.size) if own.size else 1 << 62

    def make_way(self, allocator: BlockAllocator, capacity: int) -> None:
        """Let the others shrink as far as they must if one of them is to have so many blocks."""
        capacities = [capacity if pool.allocator is allocator else pool.allocator.capacity for pool in self.pools]
        over = sum(pool.size * count for pool, count in zip(self.pools, capacities)) - self.nbytes
        for pool in sorted(self.pools, key=lambda pool: -pool.size * (pool.allocator.capacity - pool.allocator.least)):
            if over <= 0:
                return
            if pool.allocator is not allocator and pool.size:
                fewer = min(-(-over // pool.size), pool.allocator.capacity - pool.allocator.least)
                pool.allocator.shrink(pool.allocator.capacity - fewer)
                over -= fewer * pool.size


@contextmanager
def due(pools: Sequence[Pool], counts: Sequence[int]) -> Iterator[None]:
    """While blocks of all pools are asked for: none gives away what is to be taken from it."""
    for pool, count in zip(pools, counts, strict=True):
        pool.allocator.due = count
    try:
        yield
    finally:
        for pool in pools:
            pool.allocator.due = 0


def room(pools: Sequence[Pool], counts: Sequence[int], wanted: Sequence[int], block_size: int) -> bool:
    """Whether so many blocks of each pool can be had, all of them together; see BlockAllocator.room."""
    with due(pools, counts):
        asked = zip(pools, counts, wanted, strict=True)
        return all(pool.allocator.room(count, more, block_size) for pool, count, more in asked) \
            and all(count <= pool.allocator.free for pool, count in zip(pools, counts, strict=True))
