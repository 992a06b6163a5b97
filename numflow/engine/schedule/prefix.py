"""Prefix cache: full KV blocks, found by all tokens from the beginning of the text. Integers only."""

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from numflow.engine.schedule.blocks import GONE, BlockAllocator, BlockTable

START: Hashable = 0  # the root node: the empty text
Key = tuple[Hashable, tuple[Hashable, ...]]


class AdapterStart(NamedTuple):
    """Position of the first token of a text on which an adapter has an effect, and the adapter's serial number.

    Keys and values of earlier tokens are those of the base model.
    """

    position: int
    serial: int


class Node:
    """A text that ends with a full block.

    id: number of the node. key: its key in the tree. blocks: its last block in each pool, GONE where evicted.
    children: number of nodes that continue the text.
    """

    __slots__ = ("blocks", "children", "id", "key")

    def __init__(self, node_id: int, key: Key, pools: int):
        self.id, self.key, self.blocks, self.children = node_id, key, [GONE] * pools, 0


class PrefixCache:
    """Tree of KV blocks (radix tree with one block per edge). A node is a text that ends with a full block. The key of
    a node is its parent and the tokens of the block themselves, not a hash: two texts cannot be confused. The key of
    the block in which an adapter starts (`start`) ends with an AdapterStart, so texts share only the blocks before it.

    Free blocks stay in the tree until their allocator evicts them (least recently used first). There is one allocator
    for each pool (pools.Pool). A text can continue from a node if, in a pool with a window, the blocks of the last
    window are cached, and in other pools all blocks are cached.

    evicted: number of evicted blocks of the first pool.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, *more: BlockAllocator):
        self.allocators, self.block_size = (allocator, *more), block_size
        self._nodes: dict[Key, Node] = {}
        self._by_id: dict[Hashable, Node] = {}
        self._node_of_block: list[dict[int, Node]] = [{} for _ in self.allocators]
        self._last_id = self.evicted = 0
        for pool, allocator in enumerate(self.allocators):
            allocator.on_evict = partial(self._evict, pool)

    def __len__(self) -> int:
        """Number of blocks of the first pool in the tree."""
        return len(self._node_of_block[0])

    def node(self, block: int) -> Node:
        """Node of a cached block of the first pool."""
        return self._node_of_block[0][block]

    def parent(self, node: Node) -> Node | None:
        """Parent of a node, None for a child of the root."""
        return self._by_id.get(node.key[0])

    def erase(self, node: Hashable) -> None:
        """Remove a text from its end towards the root, up to the first node that has held blocks or other children."""
        found = self._by_id.get(node)
        while found is not None and not found.children:
            parent = self.parent(found)
            for allocator, block in zip(self.allocators, found.blocks, strict=True):
                if block != GONE and allocator.holders(block):
                    return
            for allocator, block in zip(self.allocators, list(found.blocks), strict=True):
                if block != GONE:
                    allocator.discard(block)
            found = parent

    @property
    def nodes(self) -> Iterable[Node]:
        """All nodes, parents before children."""
        return self._by_id.values()

    def key(self, node: Hashable, ids: Sequence[int], block: int, start: AdapterStart | None = None) -> Key:
        """Key of the child of `node` for block number `block` of `ids`."""
        tokens = tuple(ids[block * self.block_size:(block + 1) * self.block_size])
        return node, tokens if start is None or start.position // self.block_size != block else (*tokens, start)

    def is_marked(self, node: Node) -> bool:
        """Whether an adapter starts in the block of a node."""
        return len(node.key[1]) > self.block_size

    def find(self, node: Hashable, ids: Sequence[int], block: int,
             start: AdapterStart | None = None) -> tuple[Hashable, list[int]] | None:
        """Child of `node` for block number `block` of `ids`: (node, KV block of each pool), None if not cached."""
        found = self._nodes.get(self.key(node, ids, block, start))
        return None if found is None else (found.id, found.blocks)

    def match(self, node: Hashable, ids: Sequence[int], max_blocks: int,
              tables: Sequence[BlockTable],
              start: AdapterStart | None = None) -> tuple[Hashable, list[list[int]], int]:
        """Longest cached prefix of `ids` that a text can continue from, of at most `max_blocks` blocks.

        Returns its node; its blocks for each of `tables`, GONE before the window; and the number of leading blocks
        whose tokens another text in the tree has too.
        """
        path: list[list[int]] = []
        best, length = node, 0
        begins = [0] * len(tables)  # for each table, the first block of the run of cached blocks up to here
        while len(path) < max_blocks and (found := self.find(node, ids, len(path), start)) is not None:
            node, blocks = found
            path.append(blocks)
            begins = [len(path) if block == GONE else begin for block, begin in zip(blocks, begins, strict=True)]
            if all(begin <= table.first_needed(len(path) * self.block_size) for begin, table in zip(begins, tables)):
                best, length = node, len(path)
        firsts = [table.first_needed(length * self.block_size) for table in tables]
        return best, [[GONE if index < first else blocks[pool] for index, blocks in enumerate(path[:length])]
                      for pool, first in enumerate(firsts)], len(path)

    def insert(self, node: Hashable, ids: Sequence[int], index: int, blocks: Sequence[int],
               start: AdapterStart | None = None) -> Hashable:
        """Insert block number `index` of `ids` below `node`. blocks: the KV block of each pool. Returns the new node.
        Blocks that the node has already stay."""
        key = self.key(node, ids, index, start)
        found = self._nodes.get(key)
        if found is None:
            self._last_id += 1
            found = self._nodes[key] = self._by_id[self._last_id] = Node(self._last_id, key, len(self.allocators))
            if node in self._by_id:
                self._by_id[node].children += 1
        for pool, block in enumerate(blocks):
            if found.blocks[pool] == GONE != block and block not in self._node_of_block[pool]:
                found.blocks[pool], self._node_of_block[pool][block] = block, found
                self.allocators[pool].cache(block)
        return found.id

    def _evict(self, pool: int, block: int) -> None:
        found = self._node_of_block[pool].pop(block)
        self.evicted += pool == 0
        found.blocks[pool] = GONE
        node: Node | None = found
        while node is not None and not node.children and set(node.blocks) == {GONE}:  # a leaf without blocks
            del self._nodes[node.key], self._by_id[node.id]
            node = self._by_id.get(node.key[0])
            if node is not None:
                node.children -= 1

    def clear(self) -> None:
        """Remove everything from the tree."""
        for allocator, blocks in zip(self.allocators, self._node_of_block, strict=True):
            for block in blocks:
                allocator.uncache(block)
            blocks.clear()
        self._nodes.clear()
        self._by_id.clear()
