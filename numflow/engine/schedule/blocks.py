"""KV block allocator and block tables. Integers only: no models, no arrays."""

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from numflow.errors import RequestError
from numflow.network.windows import first_key

GROW_TOKENS = 256  # KV memory grows by at least this many tokens at a time, unless fewer are enough
GONE = -1  # entry of a block table: the block left the attention window


class BlockAllocator:
    """Allocate KV block ids 0 .. capacity - 1, with reference counts.

    A block becomes free when its reference count drops to 0. A free block with cached content (`cache`) keeps the
    content until no other free block is left; then the least recently released block is evicted. Blocks released with
    `reusable=False` are evicted before all others, even if the allocator could grow instead.

    limit:     maximum capacity; None: as many blocks as `on_grow` can provide.
    budget:    MemoryBudget shared with other allocators (pools.py); None: memory of this allocator alone.
    pinned:    planned moves still read blocks with ids below this one, even if the reference count is 0.
    reserved:  blocks that are about to be allocated. Other allocators may take the memory of all further free blocks.
    cache_up_to: below this capacity the allocator grows before it evicts cached content.
    on_grow:   called with a new capacity before the capacity is used; raises MemoryError if there is no memory for it.
    on_evict:  called with a block whose cached content is evicted.
    """

    def __init__(self, capacity: int = 0, limit: int | None = None):
        self.capacity, self.limit, self.cache_up_to = 0, limit, 0
        self.budget: Any = None
        self.reserved = self.pinned = 0
        self.on_grow: Callable[[int], None] = lambda capacity: None
        self.on_evict: Callable[[int], None] = lambda block: None
        self._free: list[int] = []  # a heap: the lowest ids are allocated first, so that memory can shrink
        self._lru: dict[int, None] = {}  # free blocks with cached content, least recently released first
        self._evict_first: dict[int, None] = {}  # free blocks with cached content that are evicted before those of _lru
        self._cached: set[int] = set()
        self._holders: Counter[int] = Counter()
        self._releasing: list[tuple[int, bool]] = []
        self.grow(capacity)

    @property
    def free(self) -> int:
        """Number of free blocks, those with cached content included."""
        return len(self._free) + len(self._evict_first) + len(self._lru)

    @property
    def used(self) -> int:
        """Number of blocks with a reference count above 0."""
        return len(self._holders)

    @property
    def cached(self) -> int:
        """Number of free blocks with cached content."""
        return len(self._evict_first) + len(self._lru)

    @property
    def min_capacity(self) -> int:
        """Capacity that the allocator could shrink to."""
        return max(max(self._holders, default=-1) + 1, self.used + self.reserved)

    def holders(self, block: int) -> int:
        """Reference count of a block."""
        return self._holders.get(block, 0)

    def is_cached(self, block: int) -> bool:
        """Whether the content of a block is cached."""
        return block in self._cached

    def grow(self, capacity: int) -> None:
        """Raise the capacity; a smaller capacity has no effect."""
        self._free += range(self.capacity, capacity)
        heapify(self._free)
        self.capacity = max(capacity, self.capacity)

    def shrink(self, capacity: int) -> None:
        """Lower the capacity, not below `min_capacity`; cached blocks beyond the new capacity are evicted."""
        for block in [block for block in (*self._evict_first, *self._lru) if block >= capacity]:
            self.evict(block)
        self._free = [block for block in self._free if block < capacity]
        heapify(self._free)
        self.capacity = min(capacity, self.capacity)

    def can_allocate(self, count: int, wanted: int = 0, block_size: int = 1) -> bool:
        """Whether `count` blocks can be allocated, after growing if necessary and allowed.

        wanted: blocks that may be needed later: the allocator grows towards this number in larger steps.
        """
        without_eviction = len(self._free) + len(self._evict_first)
        if count > self.free or (count > without_eviction and self.capacity < self.cache_up_to):
            step = max(count, GROW_TOKENS // block_size, self.capacity // 2)
            cached = len(self._lru) if self.capacity < self.cache_up_to else 0
            target = self.used + cached + max(count, min(step, wanted))
            if self.limit is not None:
                target = min(target, self.limit)
            if self.budget is not None:
                target = min(target, self.budget.max_blocks(self))
            if target > self.capacity:
                try:
                    self.on_grow(target)
                    self.grow(target)
                except MemoryError:
                    return count <= self.free
        return count <= self.free

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks; returns their ids.

        Raises:
            RequestError: fewer blocks are free; nothing is allocated then.
        """
        if count > self.free:
            raise RequestError(f"{count} KV blocks are needed and {self.free} of {self.capacity} are free")
        blocks = [heappop(self._free) if self._free else self.evict() for _ in range(count)]
        self._holders.update(blocks)
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """Increment the reference counts of blocks. A shared block must not be written to. A cached block may be free.

        Raises:
            ValueError: a block is neither held nor cached (a bug of the caller).
        """
        held = self._holders.keys()
        self._check(blocks, held | self._lru.keys() | self._evict_first.keys() if self.cached else held)
        for block in blocks:
            self._lru.pop(block, None)
            self._evict_first.pop(block, None)
        self._holders.update(blocks)
        return list(blocks)

    def cache(self, block: int) -> None:
        """Cache the content of a held block: the content stays when the block becomes free."""
        self._cached.add(block)

    def uncache(self, block: int) -> None:
        """Stop caching the content of a block, free or not; `on_evict` is not called."""
        self._cached.discard(block)
        if block in self._lru or block in self._evict_first:
            self._lru.pop(block, None)
            self._evict_first.pop(block, None)
            heappush(self._free, block)

    def cached_blocks(self) -> list[int]:
        """Free blocks with cached content, most recently released first."""
        return [*reversed(self._lru), *reversed(self._evict_first)]

    def discard(self, block: int) -> None:
        """Evict the cached content of a free block."""
        if block in self._lru or block in self._evict_first:
            heappush(self._free, self.evict(block))

    def evict_all(self) -> None:
        """Evict the cached content of all free blocks."""
        while self.cached:
            heappush(self._free, self.evict())

    def release(self, blocks: list[int], reusable: bool = True) -> None:
        """Decrement the reference counts of blocks. Cached blocks at the end of the list are evicted first.

        reusable: whether the cached content is worth growing the memory instead of evicting it.

        Raises:
            ValueError: a block is not held (a bug of the caller).
        """
        self._check(blocks, self._holders.keys())
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._cached:
                    (self._lru if reusable else self._evict_first)[block] = None
                else:
                    heappush(self._free, block)

    def release_later(self, block: int, reusable: bool = True) -> None:
        """Release a block whose content is still to be copied: in `settle`, or at once if others hold the block."""
        if self.holders(block) > 1:
            self.release([block], reusable)
        else:
            self._releasing.append((block, reusable))

    def settle(self) -> None:
        """Release the blocks of `release_later`, after the planned copies are made."""
        releasing, self._releasing = self._releasing, []
        for block, reusable in releasing:
            self.release([block], reusable)

    def evict(self, block: int | None = None) -> int:
        """Evict the cached content of a block, by default of the free block that is next to go. Returns the block."""
        if block is None:
            block = next(iter(self._evict_first or self._lru))
        self._evict_first.pop(block, None)
        self._lru.pop(block, None)
        self._cached.discard(block)
        self.on_evict(block)
        return block

    @staticmethod
    def _check(blocks, held) -> None:
        if not held >= set(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {blocks} are not all in use")


class BlockTable:
    """Block table of one sequence: its KV blocks in the order of its tokens.

    window:  tokens that attention looks back at, the current one included; 0: all tokens.
    first:   index of the first block inside the window; entries before this index are GONE.
    swapped: host blocks with the content of the blocks from `first` on, while the sequence is swapped out.
    skipped: `first` at the time of swapping out.
    """

    __slots__ = ("allocator", "block_size", "blocks", "first", "skipped", "swapped", "window")

    def __init__(self, allocator: BlockAllocator, block_size: int, window: int = 0):
        self.allocator, self.block_size, self.window = allocator, block_size, window
        self.blocks: list[int] = []
        self.first = self.skipped = 0
        self.swapped: list[int] = []

    @property
    def held(self) -> list[int]:
        """Blocks inside the window: all entries but GONE."""
        return self.blocks[self.first:] if self.first else self.blocks

    @property
    def capacity(self) -> int:
        """Tokens that the blocks can hold."""
        return len(self.blocks) * self.block_size

    def count(self, tokens: int) -> int:
        """Number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_size)

    def block_index(self, position: int) -> int:
        """Index in the table of the block with a token's position."""
        return position // self.block_size

    def full_block(self, index: int, length: int) -> int:
        """Block at `index` of the table, which a text of `length` tokens has filled."""
        return self.blocks[index]

    def missing(self, tokens: int) -> int:
        """Number of blocks to allocate before `tokens` tokens fit."""
        return max(0, self.count(tokens) - len(self.blocks))

    def extend(self, tokens: int) -> None:
        """Allocate blocks until `tokens` tokens fit."""
        missing = self.missing(tokens)
        if missing:
            self.blocks += self.allocator.allocate(missing)

    def truncate(self, tokens: int) -> None:
        """Release the blocks beyond the first `tokens` tokens."""
        needed = max(self.first, self.count(tokens))
        if needed < len(self.blocks):
            self.allocator.release(self.blocks[needed:])
            del self.blocks[needed:]

    def first_needed(self, length: int) -> int:
        """Index of the first block that a text of `length` tokens needs to go on from its last block boundary."""
        boundary = length // self.block_size * self.block_size
        return min(first_key(self.window, boundary), max(0, length - 1)) // self.block_size

    def slide(self, length: int, shared_blocks: int = 0) -> None:
        """Release the blocks that left the window of a text of `length` tokens. shared_blocks: leading blocks that
        another text has too: the last window of these blocks may be reused."""
        until = self.first_needed(length)
        if until <= self.first:
            return
        begin = min(max(self.first_needed(shared_blocks * self.block_size), self.first), until)
        end = min(max(shared_blocks, begin), until)
        self.allocator.release(self.blocks[self.first:begin], reusable=False)
        self.allocator.release(self.blocks[begin:end])
        self.allocator.release(self.blocks[end:until], reusable=False)
        self.blocks[self.first:until] = [GONE] * (until - self.first)
        self.first = until

    def shared(self, position: int) -> bool:
        """Whether the block with a token's position is allocated and has a reference count above 1."""
        index = self.block_index(position)
        return index < len(self.blocks) and self.allocator.holders(self.blocks[index]) > 1

    def drop_snapshot(self, position: int) -> None:
        """Do nothing: a cached KV block is full and is not written to. Slots differ (slots.py)."""

    def begin_drafts(self) -> tuple[int, int] | None:
        """Do nothing before drafts run: later tokens overwrite rejected drafts. Slots differ (slots.py)."""
        return None

    def end_drafts(self, accepted: bool, reusable: bool = True) -> None:
        """Do nothing after drafts ran. Slots differ (slots.py)."""

    def own(self, position: int, reusable: bool = True) -> tuple[int, int]:
        """Copy on write: replace the shared block at a position by a new one: (old block, new block).

        reusable: as for `BlockAllocator.release`.
        """
        index = position // self.block_size
        old, (new,) = self.blocks[index], self.allocator.allocate(1)
        self.allocator.release([old], reusable)
        self.blocks[index] = new
        return old, new

    def fork(self, count: int | None = None) -> "BlockTable":
        """Fork: a new table that shares the first `count` blocks (None: all). Neither table may write to them."""
        twin = type(self)(self.allocator, self.block_size, self.window)
        twin.assign([*self.blocks[:self.first], *self.allocator.share(self.blocks[self.first:count])], self.first)
        return twin

    def assign(self, blocks: list[int], first: int = 0) -> None:
        """Set the blocks of the table. The caller holds these blocks already; those before index `first` are GONE."""
        self.blocks, self.first = blocks, first

    def release(self) -> None:
        """Release all blocks; may be called twice."""
        blocks = self.held
        self.blocks, self.first = [], 0
        self.allocator.release(blocks)
