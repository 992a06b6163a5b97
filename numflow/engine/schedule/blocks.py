"""KV blocks as integers: who holds which. Knows nothing of models or arrays."""

from collections import Counter
from collections.abc import Callable

from numflow.errors import RequestError

GROW_TOKENS = 256  # KV memory grows by at least this many tokens at a time, unless less is known to be enough


class BlockAllocator:
    """Hands out block ids 0 .. capacity - 1. A block is free again when the last of its holders has released it.

    A free block whose content is worth keeping (`keep`) stays as it is until no other block is left; the one that was
    released first goes first.

    limit:     most blocks there may be; None: as many as `on_grow` can provide.
    keep_up_to: up to this capacity it rather grows than overwrites what is kept.
    on_grow:   called with a new capacity before it is used; raises MemoryError if there is no memory for it.
    on_forget: called with a block whose content is lost.
    """

    def __init__(self, capacity: int = 0, limit: int | None = None):
        self.capacity, self.limit, self.keep_up_to = 0, limit, 0
        self.on_grow: Callable[[int], None] = lambda capacity: None
        self.on_forget: Callable[[int], None] = lambda block: None
        self._free: list[int] = []
        self._idle: dict[int, None] = {}  # free ones with content, the first to go first
        self._kept: set[int] = set()
        self._holders: Counter[int] = Counter()
        self.grow(capacity)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that somebody holds, shared ones counted once."""
        return len(self._holders)

    @property
    def idle(self) -> int:
        """Free blocks whose content is kept."""
        return len(self._idle)

    def holders(self, block: int) -> int:
        """How many hold a block."""
        return self._holders.get(block, 0)

    def grow(self, capacity: int) -> None:
        """Raise the number of blocks; never lowers it."""
        # Blocks are taken from the list's end: first those that were freed, then new ones from the lowest id.
        self._free[:0] = range(capacity - 1, self.capacity - 1, -1)
        self.capacity = max(capacity, self.capacity)

    def room(self, count: int, wanted: int = 0, block_size: int = 1) -> bool:
        """Whether `count` blocks can be had, after growing if need be and allowed.

        wanted: blocks that may be needed in time, for which it grows at once in reasonable steps.
        """
        if count > self.free or (count > len(self._free) and self.capacity < self.keep_up_to):
            step = max(count, GROW_TOKENS // block_size, self.capacity // 2)
            kept = self.idle if self.capacity < self.keep_up_to else 0
            target = self.used + kept + max(count, min(step, wanted))
            if self.limit is not None:
                target = min(target, self.limit)
            if target > self.capacity:
                try:
                    self.on_grow(target)
                    self.grow(target)
                except MemoryError:
                    return count <= self.free
        return count <= self.free

    def allocate(self, count: int) -> list[int]:
        """`count` block ids.

        Raises:
            RequestError: fewer are free; nothing is allocated then.
        """
        if count > self.free:
            raise RequestError(f"{count} KV blocks are needed and {self.free} of {self.capacity} are free")
        blocks = [self._free.pop() if self._free else self._forget() for _ in range(count)]
        self._holders.update(blocks)
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """The same blocks for one more holder, who must not write to them. Kept ones need not have a holder.

        Raises:
            ValueError: a block that nobody holds and nobody kept (a bug of the caller).
        """
        self._check(blocks, self._holders.keys() | self._idle.keys() if self._idle else self._holders.keys())
        for block in blocks:
            self._idle.pop(block, None)
        self._holders.update(blocks)
        return list(blocks)

    def keep(self, block: int) -> None:
        """The content of a block that somebody holds is worth keeping when it is free."""
        self._kept.add(block)

    def forget_idle(self) -> None:
        """Lose the content of all free blocks."""
        while self._idle:
            self._free.append(self._forget())

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; of those kept the last ones are the first to be overwritten.

        Raises:
            ValueError: a block that nobody holds (a bug of the caller).
        """
        self._check(blocks, self._holders.keys())
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._kept:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def _forget(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        self._kept.discard(block)
        self.on_forget(block)
        return block

    @staticmethod
    def _check(blocks, known) -> None:
        if not known >= set(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {blocks} are not all in use")


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    __slots__ = ("allocator", "block_size", "blocks")

    def __init__(self, allocator: BlockAllocator, block_size: int):
        self.allocator = allocator
        self.block_size = block_size
        self.blocks: list[int] = []

    def missing(self, tokens: int) -> int:
        """Blocks to allocate before `tokens` tokens fit."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))

    def extend(self, tokens: int) -> None:
        """Hold enough blocks for `tokens` tokens."""
        missing = self.missing(tokens)
        if missing:
            self.blocks += self.allocator.allocate(missing)

    def truncate(self, tokens: int) -> None:
        """Give back the blocks beyond the first `tokens` tokens."""
        needed = -(-tokens // self.block_size)
        if needed < len(self.blocks):
            self.allocator.release(self.blocks[needed:])
            del self.blocks[needed:]

    def shared(self, position: int) -> bool:
        """Whether the block of a token's position, if there is one already, has another holder too."""
        at = position // self.block_size
        return at < len(self.blocks) and self.allocator.holders(self.blocks[at]) > 1

    def own(self, position: int) -> tuple[int, int]:
        """Take a block of its own in place of the shared one at a position: (old block, new block)."""
        at = position // self.block_size
        old, (new,) = self.blocks[at], self.allocator.allocate(1)
        self.allocator.release([old])
        self.blocks[at] = new
        return old, new

    def fork(self, count: int | None = None) -> "BlockTable":
        """A table that shares the first `count` blocks (None: all), which neither writes to any more."""
        twin = BlockTable(self.allocator, self.block_size)
        twin.blocks = self.allocator.share(self.blocks[:count])
        return twin

    def release(self) -> None:
        """Give all blocks back; may be called twice."""
        blocks, self.blocks = self.blocks, []
        self.allocator.release(blocks)
