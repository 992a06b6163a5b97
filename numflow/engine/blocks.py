"""KV blocks as integers: who holds which. Knows nothing of models or arrays."""

from numflow.errors import RequestError


class BlockAllocator:
    """Hands out block ids 0 .. capacity - 1; every id has one holder at most."""

    def __init__(self, capacity: int = 0):
        self.capacity = 0
        self._free: list[int] = []
        self._used: set[int] = set()
        self.grow(capacity)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._used)

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
        self._used.update(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give blocks back.

        Raises:
            ValueError: a block that nobody holds (a bug of the caller).
        """
        if not self._used.issuperset(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {blocks} are not all in use")
        self._used.difference_update(blocks)
        self._free.extend(reversed(blocks))


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

    def release(self) -> None:
        """Give all blocks back; may be called twice."""
        blocks, self.blocks = self.blocks, []
        self.allocator.release(blocks)
