"""Slots for the states of recurrent steps: of each sequence one, however long it is. Integers only.

A slot is a block of a pool of its own, so that it is taken, shared, saved and found again as KV blocks are. What
differs is that a sequence writes to it in every step: one that others hold too, or that is kept as a snapshot, is
copied first. A state cannot be taken back: before drafts run, the sequence keeps the slot and writes to a copy.
"""

from numflow.engine.schedule.blocks import GONE, BlockAllocator, BlockTable
from numflow.network.windows import STATE


class SlotTable(BlockTable):
    """The slot of one sequence, if it has any.

    A snapshot is a slot that the prefix cache keeps: the state of a text that ends with a full block.
    before: the slot as it was before drafts ran, until it is known which of them were right.
    """

    __slots__ = ("before",)

    def __init__(self, allocator: BlockAllocator, block_size: int, window: int = STATE):
        super().__init__(allocator, block_size, window)
        self.before: list[int] = []

    @property
    def room(self) -> int:
        """Tokens that the slot is for."""
        return 1 << 62

    def count(self, tokens: int) -> int:
        """Slots of so many tokens."""
        return min(1, tokens)

    def place(self, position: int) -> int:
        """0: all tokens have one slot."""
        return 0

    def ended(self, at: int, length: int) -> int:
        """The slot, if the text ends with the block of place `at`; of earlier blocks the state is gone."""
        return self.blocks[0] if length == (at + 1) * self.block_size else GONE

    def reaches(self, length: int) -> int:
        """The last full block: its snapshot is all that a text needs to go on."""
        return max(0, length // self.block_size - 1)

    def slide(self, length: int, border: int = 0) -> None:
        """A state has no part that is not needed any more."""

    def shared(self, position: int) -> bool:
        """Whether the slot has another holder too, or is a snapshot."""
        return bool(self.blocks) and (self.allocator.holders(self.blocks[0]) > 1 or self.allocator.kept(self.blocks[0]))

    def own(self, position: int, worth: bool = True) -> tuple[int, int]:
        """Take a slot of its own in place of the shared one: (old slot, new slot)."""
        old, new = self.try_out()
        self.before = []
        self.allocator.release_later(old, worth)
        return old, new

    def try_out(self) -> tuple[int, int]:
        """Keep the slot, and write to another one until `decide`: (old slot, new slot)."""
        old, (new,) = self.blocks[0], self.allocator.allocate(1)
        self.before, self.blocks[0] = [old], new
        return old, new

    def decide(self, right: bool, worth: bool = True) -> None:
        """After `try_out`: go on with the new slot, or with the old one."""
        if self.before:
            if not right:
                self.before, self.blocks = self.blocks, self.before
            self.allocator.release(self.before, worth)
            self.before = []

    def release(self) -> None:
        """Give the slots back; may be called twice."""
        self.decide(True)
        super().release()

    def unshare(self, position: int) -> None:
        """Give up a snapshot, where there is no room for a copy of it."""
        if self.blocks and self.allocator.holders(self.blocks[0]) == 1 and self.allocator.kept(self.blocks[0]):
            self.allocator.forget(self.blocks[0])

    def hold(self, blocks: list[int], first: int = 0) -> None:
        """The last of these slots, held already; the places of others are gone."""
        self.blocks, self.first = [block for block in blocks if block != GONE], 0
