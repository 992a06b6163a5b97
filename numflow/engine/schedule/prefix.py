"""The prefix cache: full KV blocks found again by the tokens that lead to them. Integers only."""

from collections.abc import Hashable, Sequence

from numflow.engine.schedule.blocks import BlockAllocator

START: Hashable = 0  # the node before all text


class PrefixCache:
    """A tree of blocks. A node is a text that ends with a full block; its key is the node before it and the block's
    tokens, so texts that differ anywhere never meet, and no two texts can be mistaken for each other.

    Blocks that nobody holds stay in the tree until the allocator needs them (least recently used first).
    """

    def __init__(self, allocator: BlockAllocator, block_size: int):
        self.allocator, self.block_size = allocator, block_size
        self._nodes: dict[tuple[Hashable, tuple[int, ...]], tuple[int, int]] = {}  # -> (node, block)
        self._key_of: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        self._last = 0
        allocator.on_forget = self._forget

    def __len__(self) -> int:
        """Blocks in the tree."""
        return len(self._nodes)

    def find(self, node: Hashable, ids: Sequence[int], block: int) -> tuple[int, int] | None:
        """(node, KV block) of the text that goes on after `node` with the tokens of `ids` in place `block`."""
        size = self.block_size
        return self._nodes.get((node, tuple(ids[block * size:(block + 1) * size])))

    def match(self, node: Hashable, ids: Sequence[int], most: int) -> tuple[Hashable, list[int]]:
        """The longest beginning of `ids` that is there, of at most `most` blocks: its node and its blocks."""
        blocks: list[int] = []
        while len(blocks) < most and (found := self.find(node, ids, len(blocks))) is not None:
            node = found[0]
            blocks.append(found[1])
        return node, blocks

    def insert(self, node: Hashable, ids: Sequence[int], at: int, block: int) -> int:
        """Remember that `block` holds tokens at * block_size .. of `ids`. Returns the node; an older block stays."""
        key = node, tuple(ids[at * self.block_size:(at + 1) * self.block_size])
        found = self._nodes.get(key)
        if found is not None:
            return found[0]
        self._last += 1
        self._nodes[key], self._key_of[block] = (self._last, block), key
        self.allocator.keep(block)
        return self._last

    def _forget(self, block: int) -> None:
        del self._nodes[self._key_of.pop(block)]

    def clear(self) -> None:
        """Find nothing of what is in the tree any more; its blocks go when they are needed."""
        self._last += 1
        for block, key in self._key_of.items():
            gone = ("gone", self._last, block), ()  # no text begins after this node
            self._nodes[gone] = self._nodes.pop(key)
            self._key_of[block] = gone
