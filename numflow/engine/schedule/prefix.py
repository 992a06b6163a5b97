"""The prefix cache: full KV blocks found again by the tokens that lead to them. Integers only."""

from collections.abc import Hashable, Iterable, Sequence
from functools import partial

from numflow.engine.schedule.blocks import GONE, BlockAllocator, BlockTable

START: Hashable = 0  # the node before all text
Key = tuple[Hashable, tuple[int, ...]]


class Node:
    """A text that ends with a full block: its number, its key in the tree, a block of each pool (GONE: none any more),
    and how many texts are known that go on after it."""

    __slots__ = ("blocks", "following", "key", "number")

    def __init__(self, number: int, key: Key, pools: int):
        self.number, self.key, self.blocks, self.following = number, key, [GONE] * pools, 0


class PrefixCache:
    """A tree of blocks. A node is a text that ends with a full block; its key is the node before it and the block's
    tokens, so texts that differ anywhere never meet, and no two texts can be mistaken for each other.

    Blocks that nobody holds stay in the tree until their allocator needs them (least recently used first). There is an
    allocator for each pool (common.Pool). Where one has a window, a text can go on from a node if the blocks of the
    last window are there; of the others, all.

    evicted: blocks of the first pool whose content was lost to others.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, *more: BlockAllocator):
        self.allocators, self.block_size = (allocator, *more), block_size
        self._nodes: dict[Key, Node] = {}
        self._by_number: dict[Hashable, Node] = {}
        self._of_block: list[dict[int, Node]] = [{} for _ in self.allocators]
        self._last = self.evicted = 0
        for pool, own in enumerate(self.allocators):
            own.on_forget = partial(self._forget, pool)

    def __len__(self) -> int:
        """Blocks in the tree, of the first pool."""
        return len(self._of_block[0])

    def node(self, block: int) -> Node:
        """The node of a block of the first pool that is in the tree."""
        return self._of_block[0][block]

    def parent(self, node: Node) -> Node | None:
        """The text that a node goes on from; None: the beginning."""
        return self._by_number.get(node.key[0])

    def erase(self, node: Hashable) -> None:
        """Forget a text from its end on, as far as nobody holds its blocks and no other text goes on after them."""
        found = self._by_number.get(node)
        while found is not None and not found.following:
            above = self.parent(found)
            for allocator, block in zip(self.allocators, found.blocks, strict=True):
                if block != GONE and allocator.holders(block):
                    return
            for allocator, block in zip(self.allocators, list(found.blocks), strict=True):
                if block != GONE:
                    allocator.drop(block)
            found = above

    @property
    def nodes(self) -> Iterable[Node]:
        """All nodes, each after the one before it."""
        return self._by_number.values()

    def find(self, node: Hashable, ids: Sequence[int], block: int) -> tuple[Hashable, list[int]] | None:
        """(node, KV block of each pool) of the text that goes on after `node` with the tokens of `ids` in place
        `block`."""
        size = self.block_size
        found = self._nodes.get((node, tuple(ids[block * size:(block + 1) * size])))
        return None if found is None else (found.number, found.blocks)

    def match(self, node: Hashable, ids: Sequence[int], most: int,
              tables: Sequence[BlockTable]) -> tuple[Hashable, list[list[int]], int]:
        """The longest beginning of `ids` that a text can go on from, of at most `most` blocks: its node, its blocks for
        each of these tables, GONE before their windows; and how many blocks another text has in common with it."""
        path: list[list[int]] = []
        best, at = node, 0
        begins = [0] * len(tables)  # of each table, since where all blocks are there
        while len(path) < most and (found := self.find(node, ids, len(path))) is not None:
            node, blocks = found
            path.append(blocks)
            begins = [len(path) if block == GONE else begin for block, begin in zip(blocks, begins, strict=True)]
            if all(begin <= table.reaches(len(path) * self.block_size) for begin, table in zip(begins, tables)):
                best, at = node, len(path)
        firsts = [table.reaches(at * self.block_size) for table in tables]
        return best, [[GONE if place < first else blocks[pool] for place, blocks in enumerate(path[:at])]
                      for pool, first in enumerate(firsts)], len(path)

    def insert(self, node: Hashable, ids: Sequence[int], at: int, blocks: Sequence[int]) -> Hashable:
        """Remember that `blocks`, one of each pool, hold tokens at * block_size .. of `ids`. Returns the node; older
        blocks stay."""
        key = node, tuple(ids[at * self.block_size:(at + 1) * self.block_size])
        found = self._nodes.get(key)
        if found is None:
            self._last += 1
            found = self._nodes[key] = self._by_number[self._last] = Node(self._last, key, len(self.allocators))
            if node in self._by_number:
                self._by_number[node].following += 1
        for pool, block in enumerate(blocks):
            if found.blocks[pool] == GONE != block and block not in self._of_block[pool]:
                found.blocks[pool], self._of_block[pool][block] = block, found
                self.allocators[pool].keep(block)
        return found.number

    def _forget(self, pool: int, block: int) -> None:
        found = self._of_block[pool].pop(block)
        self.evicted += pool == 0
        found.blocks[pool] = GONE
        node: Node | None = found
        while node is not None and not node.following and set(node.blocks) == {GONE}:  # nothing leads on from it
            del self._nodes[node.key], self._by_number[node.number]
            node = self._by_number.get(node.key[0])
            if node is not None:
                node.following -= 1

    def clear(self) -> None:
        """Find nothing of what is in the tree any more."""
        for allocator, blocks in zip(self.allocators, self._of_block, strict=True):
            for block in blocks:
                allocator.unkeep(block)
            blocks.clear()
        self._nodes.clear()
        self._by_number.clear()
