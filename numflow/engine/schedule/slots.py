"""Slots for the states of recurrent layers: one slot per sequence, for any length. Integers only.

A slot is a block of a separate pool: slots are allocated, shared, swapped and cached as KV blocks are. Unlike a full KV
block, a slot is written in every step, so a slot that is shared or cached as a snapshot is copied first. A state cannot
be rolled back: before drafts run, the sequence saves the slot and writes to a copy.
"""

from numflow.engine.schedule.blocks import GONE, BlockAllocator, BlockTable
from numflow.network.windows import STATE


class SlotTable(BlockTable):
    """Slot of one sequence, if one is allocated.

    A snapshot is a slot in the prefix cache: the state of a text that ends with a full block.
    saved: the slot from before the drafts, until the drafts are accepted or rejected.
    """

    __slots__ = ("saved",)

    def __init__(self, allocator: BlockAllocator, block_size: int, window: int = STATE):
        super().__init__(allocator, block_size, window)
        self.saved: list[int] = []

    @property
    def capacity(self) -> int:
        """Tokens that the slot can hold: no limit."""
        return 1 << 62

    def count(self, tokens: int) -> int:
        """Number of slots for `tokens` tokens."""
        return min(1, tokens)

    def block_index(self, position: int) -> int:
        """0: all tokens have one slot."""
        return 0

    def full_block(self, index: int, length: int) -> int:
        """The slot, if the text ends with the block at `index`, else GONE: states of earlier blocks are lost."""
        return self.blocks[0] if length == (index + 1) * self.block_size else GONE

    def first_needed(self, length: int) -> int:
        """Index of the last full block: a text needs only its snapshot to go on."""
        return max(0, length // self.block_size - 1)

    def slide(self, length: int, shared_blocks: int = 0) -> None:
        """Do nothing: the whole state is still needed."""

    def shared(self, position: int) -> bool:
        """Whether the slot has a reference count above 1, or is a snapshot."""
        return bool(self.blocks) and (self.allocator.holders(self.blocks[0]) > 1
                                      or self.allocator.is_cached(self.blocks[0]))

    def own(self, position: int, reusable: bool = True) -> tuple[int, int]:
        """Copy on write: replace the shared slot by a new one: (old slot, new slot)."""
        old, new = self.begin_drafts()
        self.saved = []
        self.allocator.release_later(old, reusable)
        return old, new

    def begin_drafts(self) -> tuple[int, int]:
        """Save the slot, and write to a new one until `end_drafts`: (old slot, new slot)."""
        old, (new,) = self.blocks[0], self.allocator.allocate(1)
        self.saved, self.blocks[0] = [old], new
        return old, new

    def end_drafts(self, accepted: bool, reusable: bool = True) -> None:
        """After `begin_drafts`: go on with the new slot if the drafts were accepted, else with the saved one."""
        if self.saved:
            if not accepted:
                self.saved, self.blocks = self.blocks, self.saved
            self.allocator.release(self.saved, reusable)
            self.saved = []

    def release(self) -> None:
        """Release the slots; may be called twice."""
        self.end_drafts(True)
        super().release()

    def drop_snapshot(self, position: int) -> None:
        """Evict the snapshot in the slot, where there is no memory for a copy."""
        if self.blocks and self.allocator.holders(self.blocks[0]) == 1 and self.allocator.is_cached(self.blocks[0]):
            self.allocator.evict(self.blocks[0])

    def assign(self, blocks: list[int], first: int = 0) -> None:
        """Set the slot: the one entry of `blocks` that is not GONE. The caller holds the slot already."""
        self.blocks, self.first = [block for block in blocks if block != GONE], 0
