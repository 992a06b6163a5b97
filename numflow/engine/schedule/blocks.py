"""KV blocks as integers: who holds which. Knows nothing of models or arrays."""

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from numflow.errors import RequestError
from numflow.network.windows import first_key

GROW_TOKENS = 256  # KV memory grows by at least this many tokens at a time, unless less is known to be enough
GONE = -1  # in a table: a block that left the window


class BlockAllocator:
    """Hands out block ids 0 .. capacity - 1. A block is free again when the last of its holders has released it.

    A free block whose content is worth keeping (`keep`) stays as it is until no other block is left; the one that was
    released first goes first. Those released as not `worth` it go before all others, also where it could grow.

    limit:     most blocks there may be; None: as many as `on_grow` can provide.
    common:    the memory that it shares with other allocators (pools.py), None if it has its own.
    pinned:    content below this id is still to be read by moves that are planned, though nobody may hold it.
    due:       blocks that are about to be taken: what it does not need beyond them, others may have.
    keep_up_to: up to this capacity it rather grows than overwrites what is kept.
    on_grow:   called with a new capacity before it is used; raises MemoryError if there is no memory for it.
    on_forget: called with a block whose content is lost.
    """

    def __init__(self, capacity: int = 0, limit: int | None = None):
        self.capacity, self.limit, self.keep_up_to = 0, limit, 0
        self.common: Any = None
        self.due = self.pinned = 0
        self.on_grow: Callable[[int], None] = lambda capacity: None
        self.on_forget: Callable[[int], None] = lambda block: None
        self._free: list[int] = []  # a heap: the lowest ids are taken first, so that memory can shrink
        self._idle: dict[int, None] = {}  # free ones with content, the first to go first
        self._stale: dict[int, None] = {}  # and those that go before them
        self._kept: set[int] = set()
        self._holders: Counter[int] = Counter()
        self._leaving: list[tuple[int, bool]] = []
        self.grow(capacity)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._stale) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that somebody holds, shared ones counted once."""
        return len(self._holders)

    @property
    def idle(self) -> int:
        """Free blocks whose content is kept."""
        return len(self._stale) + len(self._idle)

    @property
    def least(self) -> int:
        """The capacity that it could shrink to."""
        return max(max(self._holders, default=-1) + 1, self.used + self.due)

    def holders(self, block: int) -> int:
        """Number of holders of a block."""
        return self._holders.get(block, 0)

    def kept(self, block: int) -> bool:
        """Whether the content of a block is kept."""
        return block in self._kept

    def grow(self, capacity: int) -> None:
        """Raise the number of blocks; never lowers it."""
        self._free += range(self.capacity, capacity)
        heapify(self._free)
        self.capacity = max(capacity, self.capacity)

    def shrink(self, capacity: int) -> None:
        """Lower the number of blocks, not below `least`; what blocks beyond it held is forgotten."""
        for block in [block for block in (*self._stale, *self._idle) if block >= capacity]:
            self.forget(block)
        self._free = [block for block in self._free if block < capacity]
        heapify(self._free)
        self.capacity = min(capacity, self.capacity)

    def room(self, count: int, wanted: int = 0, block_size: int = 1) -> bool:
        """Whether `count` blocks can be had, after growing if need be and allowed.

        wanted: blocks that may be needed in time, for which it grows at once in reasonable steps.
        """
        cheap = len(self._free) + len(self._stale)
        if count > self.free or (count > cheap and self.capacity < self.keep_up_to):
            step = max(count, GROW_TOKENS // block_size, self.capacity // 2)
            kept = len(self._idle) if self.capacity < self.keep_up_to else 0
            target = self.used + kept + max(count, min(step, wanted))
            if self.limit is not None:
                target = min(target, self.limit)
            if self.common is not None:
                target = min(target, self.common.most(self))
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
        blocks = [heappop(self._free) if self._free else self.forget() for _ in range(count)]
        self._holders.update(blocks)
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """The same blocks for one more holder, who must not write to them. Kept ones need not have a holder.

        Raises:
            ValueError: a block that nobody holds and nobody kept (a bug of the caller).
        """
        known = self._holders.keys()
        self._check(blocks, known | self._idle.keys() | self._stale.keys() if self.idle else known)
        for block in blocks:
            self._idle.pop(block, None)
            self._stale.pop(block, None)
        self._holders.update(blocks)
        return list(blocks)

    def keep(self, block: int) -> None:
        """The content of a block that somebody holds is worth keeping when it is free."""
        self._kept.add(block)

    def unkeep(self, block: int) -> None:
        """Drop the content of a block, free or not, from those kept; `on_forget` is not called."""
        self._kept.discard(block)
        if block in self._idle or block in self._stale:
            self._idle.pop(block, None)
            self._stale.pop(block, None)
            heappush(self._free, block)

    def latest(self) -> list[int]:
        """Free blocks whose content is kept, those that were released last first."""
        return [*reversed(self._idle), *reversed(self._stale)]

    def drop(self, block: int) -> None:
        """Lose the content of a block that nobody holds."""
        if block in self._idle or block in self._stale:
            heappush(self._free, self.forget(block))

    def forget_idle(self) -> None:
        """Lose the content of all free blocks."""
        while self.idle:
            heappush(self._free, self.forget())

    def release(self, blocks: list[int], worth: bool = True) -> None:
        """Give blocks back; of those kept the last ones are the first to be overwritten. worth: whether memory may grow
        for the sake of what is kept.

        Raises:
            ValueError: a block that nobody holds (a bug of the caller).
        """
        self._check(blocks, self._holders.keys())
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._kept:
                    (self._idle if worth else self._stale)[block] = None
                else:
                    heappush(self._free, block)

    def release_later(self, block: int, worth: bool = True) -> None:
        """Give a block back whose content is still to be copied: it is free after `settle`, or at once for others who
        hold it."""
        if self.holders(block) > 1:
            self.release([block], worth)
        else:
            self._leaving.append((block, worth))

    def settle(self) -> None:
        """Planned copies are made."""
        leaving, self._leaving = self._leaving, []
        for block, worth in leaving:
            self.release([block], worth)

    def forget(self, block: int | None = None) -> int:
        """Lose the content of a block, by default of the free one that goes first: it is kept for nobody."""
        if block is None:
            block = next(iter(self._stale or self._idle))
        self._stale.pop(block, None)
        self._idle.pop(block, None)
        self._kept.discard(block)
        self.on_forget(block)
        return block

    @staticmethod
    def _check(blocks, known) -> None:
        if not known >= set(blocks) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {blocks} are not all in use")


class BlockTable:
    """The blocks of one sequence, in the order of its tokens.

    window: tokens that attention looks back at, itself included; 0: all. first: the blocks before this one left the
    window; their places hold GONE. swapped: blocks in the host's memory that have the content of those from `first` on
    while the sequence is swapped out; skipped: what `first` was then.
    """

    __slots__ = ("allocator", "block_size", "blocks", "first", "skipped", "swapped", "window")

    def __init__(self, allocator: BlockAllocator, block_size: int, window: int = 0):
        self.allocator, self.block_size, self.window = allocator, block_size, window
        self.blocks: list[int] = []
        self.first = self.skipped = 0
        self.swapped: list[int] = []

    @property
    def held(self) -> list[int]:
        """The blocks that are there."""
        return self.blocks[self.first:] if self.first else self.blocks

    @property
    def room(self) -> int:
        """Tokens that the blocks are for."""
        return len(self.blocks) * self.block_size

    def count(self, tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-tokens // self.block_size)

    def place(self, position: int) -> int:
        """Index of the block of a token's position."""
        return position // self.block_size

    def ended(self, at: int, length: int) -> int:
        """Block of place `at`, which a text of so many tokens has filled."""
        return self.blocks[at]

    def missing(self, tokens: int) -> int:
        """Blocks to allocate before `tokens` tokens fit."""
        return max(0, self.count(tokens) - len(self.blocks))

    def extend(self, tokens: int) -> None:
        """Hold enough blocks for `tokens` tokens."""
        missing = self.missing(tokens)
        if missing:
            self.blocks += self.allocator.allocate(missing)

    def truncate(self, tokens: int) -> None:
        """Give back the blocks beyond the first `tokens` tokens."""
        needed = max(self.first, self.count(tokens))
        if needed < len(self.blocks):
            self.allocator.release(self.blocks[needed:])
            del self.blocks[needed:]

    def reaches(self, length: int) -> int:
        """The first block that a text of so many tokens needs to go on, from its last border of blocks."""
        border = length // self.block_size * self.block_size
        return min(first_key(self.window, border), max(0, length - 1)) // self.block_size

    def slide(self, length: int, border: int = 0) -> None:
        """Give back what left the window of a text of so many tokens. border: blocks of its beginning that another
        text has too, whose last window may be of use again."""
        until = self.reaches(length)
        if until <= self.first:
            return
        begin = min(max(self.reaches(border * self.block_size), self.first), until)
        end = min(max(border, begin), until)
        self.allocator.release(self.blocks[self.first:begin], worth=False)
        self.allocator.release(self.blocks[begin:end])
        self.allocator.release(self.blocks[end:until], worth=False)
        self.blocks[self.first:until] = [GONE] * (until - self.first)
        self.first = until

    def shared(self, position: int) -> bool:
        """Whether the block of a token's position, if there is one already, has another holder too."""
        at = self.place(position)
        return at < len(self.blocks) and self.allocator.holders(self.blocks[at]) > 1

    def unshare(self, position: int) -> None:
        """Nothing: a block that is kept is full, and not written to; see slots.py."""

    def try_out(self) -> tuple[int, int] | None:
        """Before drafts run: keys and values behind those that were right are written over, nothing has to be done."""
        return None

    def decide(self, right: bool, worth: bool = True) -> None:
        """After drafts ran; see slots.py."""

    def own(self, position: int, worth: bool = True) -> tuple[int, int]:
        """Take a block of its own in place of the shared one at a position: (old block, new block). worth: as for
        `BlockAllocator.release`."""
        at = position // self.block_size
        old, (new,) = self.blocks[at], self.allocator.allocate(1)
        self.allocator.release([old], worth)
        self.blocks[at] = new
        return old, new

    def fork(self, count: int | None = None) -> "BlockTable":
        """A table that shares the first `count` blocks (None: all), which neither writes to any more."""
        twin = type(self)(self.allocator, self.block_size, self.window)
        twin.hold([*self.blocks[:self.first], *self.allocator.share(self.blocks[self.first:count])], self.first)
        return twin

    def hold(self, blocks: list[int], first: int = 0) -> None:
        """These blocks, held already, of which those before `first` are gone."""
        self.blocks, self.first = blocks, first

    def release(self) -> None:
        """Give all blocks back; may be called twice."""
        blocks = self.held
        self.blocks, self.first = [], 0
        self.allocator.release(blocks)
