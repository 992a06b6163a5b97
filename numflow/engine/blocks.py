"""KV blocks as integers: who holds which. Knows nothing of models or arrays."""

from collections import Counter

from numflow.errors import RequestError


class BlockAllocator:
    """Hands out block ids 0 .. capacity - 1. A block is free again when the last of its holders has released it."""

    def __init__(self, capacity: int = 0):
        self.capacity = 0
        self._free: list[int] = []
        self._holders: Counter[int] = Counter()
        self.grow(capacity)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds, shared ones counted once."""
        return len(self._holders)

    def grow(self, capacity: int) -> None:
        """Raise the number of blocks; never lowers it."""
        # Blocks are taken from the list's end: first those that were freed, then new ones from the lowest id.
        self._free[:0] = range(capacity - 1, self.capacity - 1, -1)
        self.capacity = max(capacity, self.capacity)

    def allocate(self, count: int) -> list[int]:
        """`count` block ids.

        Raises:
            RequestError: fewer are free; nothing is allocated then.
        """
        if count > self.free:
            raise RequestError(f"{count} KV blocks are needed and {self.free} of {self.capacity} are free")
        blocks = [self._free.pop() for _ in range(count)]
        self._holders.update(blocks)
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """The same blocks for one more holder, who must not write to them.

        Raises:
            ValueError: a block that nobody holds (a bug of the caller).
        """
        self._check(blocks)
        self._holders.update(blocks)
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block that nobody holds (a bug of the caller).
        """
        self._check(blocks)
        self._holders.subtract(blocks)
        unused = [block for block in blocks if not self._holders[block]]
        for block in unused:
            del self._holders[block]
        self._free.extend(reversed(unused))

    def _check(self, blocks) -> None:
        if not self._holders.keys() >= set(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {blocks} are not all in use")


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    def __init__(self, allocator: BlockAllocator, block_size: int):
        self.allocator = allocator
        self.block_size = block_size
        self.blocks: list[int] = []

    def missing(self, tokens: int) -> int:
        """Blocks to allocate before `tokens` tokens fit."""
        return max(0, -(-tokens // self.block_size) - len(self.blocks))

    def extend(self, tokens: int) -> None:
        """Hold enough blocks for `tokens` tokens."""
        self.blocks += self.allocator.allocate(self.missing(tokens))

    def fork(self, count: int | None = None) -> "BlockTable":
        """A table that shares the first `count` blocks (None: all), which neither writes to any more."""
        twin = BlockTable(self.allocator, self.block_size)
        twin.blocks = self.allocator.share(self.blocks[:count])
        return twin

    def release(self) -> None:
        """Give all blocks back; may be called twice."""
        blocks, self.blocks = self.blocks, []
        self.allocator.release(blocks)
