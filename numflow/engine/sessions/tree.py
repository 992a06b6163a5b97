"""Export of texts from a prefix cache as data, and import."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from numflow.engine.run.core import Core
from numflow.engine.run.text_slots import SlotText
from numflow.engine.schedule.blocks import GONE
from numflow.engine.schedule.pools import can_allocate
from numflow.engine.schedule.prefix import START, Node
from numflow.engine.sessions.session_file import PIECE_BLOCKS, SessionFile, TextTree


@dataclass(frozen=True)
class HeldTree:
    """A tree of texts with held blocks. blocks: for each pool, the KV block of each row of the tree."""

    core: Core
    tree: TextTree
    blocks: Sequence[Sequence[int]]

    def read(self, pool: int, begin: int, end: int) -> np.ndarray:
        """Content of blocks `begin` .. `end` - 1 of a pool, uint8 [n, size]."""
        with self.core.runner.lock:
            return self.core.runner.program.save_blocks(list(self.blocks[pool][begin:end]), *self.core.hosts[pool].only)


def can_be_saved(root: Hashable) -> bool:
    """Whether the texts below a root depend on the base model alone: no adapter, no encoder."""
    base = root[0] if isinstance(root, tuple) and len(root) == 2 else root  # a pair: root, variant of positions
    return isinstance(base, tuple) and len(base) == 3 and base[0] == START and base[2] == ()


@contextmanager
def held_text(core: Core, text: SlotText) -> Iterator[HeldTree]:
    """Hold the blocks of one text in the prefix cache during a `with`."""
    prefix, pools = core.scheduler.prefix, core.runner.pools
    assert prefix is not None
    size = prefix.block_size
    with core.runner.lock:
        ids = text.ids.tolist()
        tables = [pool.table(size) for pool in pools]
        _, blocks, _ = prefix.match(text.root, ids, len(ids) // size, tables)
        rows = [np.array([index for index, block in enumerate(path) if block != GONE], np.int32) for path in blocks]
        held = [[path[index] for index in indices] for path, indices in zip(blocks, rows, strict=True)]
        for pool, pool_blocks in zip(pools, held, strict=True):
            pool.allocator.share(pool_blocks)
    count = len(blocks[0])
    tree = TextTree([text.root], np.arange(-1, count - 1, dtype=np.int32), text.ids[:count * size].reshape(-1, size),
                    rows, text.ids)
    with _released(core, held):
        yield HeldTree(core, tree, held)


@contextmanager
def held_cache(core: Core, nbytes: int) -> Iterator[HeldTree]:
    """Hold cached texts of the base model during a `with`: most recently used first, up to `nbytes` bytes."""
    prefix, pools = core.scheduler.prefix, core.runner.pools
    assert prefix is not None
    with core.runner.lock:
        chosen = dict[int, Node]()  # by id, parents before children
        for block in pools[0].allocator.cached_blocks():
            path, node = list[Node](), cast("Node | None", prefix.node(block))
            while node is not None and node.id not in chosen:
                path.append(node)
                last, node = node, prefix.parent(node)
            cost = sum(pool.size for on_path in path for pool, block in zip(pools, on_path.blocks) if block != GONE)
            if not path or (node is None and not can_be_saved(last.key[0])) or any(map(prefix.is_marked, path)):
                continue
            if cost > nbytes:
                break
            nbytes -= cost
            chosen |= {on_path.id: on_path for on_path in reversed(path)}
        nodes = list(chosen.values())
        rows = [np.array([index for index, node in enumerate(nodes) if node.blocks[pool] != GONE], np.int32)
                for pool in range(len(pools))]
        held = [[nodes[index].blocks[pool] for index in indices] for pool, indices in enumerate(rows)]
        for pool, blocks in zip(pools, held, strict=True):
            pool.allocator.share(blocks)
    index_of = {node_id: index for index, node_id in enumerate(chosen)}
    roots = list(dict.fromkeys(node.key[0] for node in nodes if node.key[0] not in index_of))
    parents = [index_of[parent] if (parent := node.key[0]) in index_of else -1 - roots.index(parent) for node in nodes]
    ids = np.array([node.key[1] for node in nodes], np.int32).reshape(len(nodes), prefix.block_size)
    with _released(core, held):
        yield HeldTree(core, TextTree(roots, np.array(parents, np.int32), ids, rows), held)


@contextmanager
def _released(core: Core, held: Sequence[Sequence[int]]) -> Iterator[None]:
    """Release held blocks at the end of a `with`."""
    try:
        yield
    finally:
        with core.runner.lock:
            for pool, blocks in zip(core.runner.pools, held, strict=True):
                pool.allocator.release(list(blocks))


def put_back(core: Core, file: SessionFile) -> bool:
    """Insert the texts of a file into the prefix cache. False: their blocks cannot be allocated.

    Raises:
        RequestError: the file is damaged; nothing is inserted then.
    """
    prefix, pools, tree = core.scheduler.prefix, core.runner.pools, file.tree
    assert prefix is not None
    counts = [len(rows) for rows in tree.rows]
    with core.runner.lock:
        if not can_allocate(pools, counts, counts, prefix.block_size):
            return False
        taken = [pool.allocator.allocate(count) for pool, count in zip(pools, counts, strict=True)]
    with _released(core, taken):
        for index, (pool, blocks) in enumerate(zip(pools, taken, strict=True)):
            for begin in range(0, len(blocks), PIECE_BLOCKS):
                part = blocks[begin:begin + PIECE_BLOCKS]
                data = file.block_data(index, pool.size, begin, begin + len(part))
                with core.runner.lock:
                    core.runner.program.load_blocks(part, data, *core.hosts[index].only)
        with core.runner.lock:
            _insert(core, tree, taken)
    return True


def _insert(core: Core, tree: TextTree, taken: Sequence[Sequence[int]]) -> None:
    """Insert the nodes of a tree. taken: for each pool, the blocks of the rows of the tree."""
    prefix = core.scheduler.prefix
    assert prefix is not None
    block_of = [dict(zip(rows.tolist(), blocks)) for rows, blocks in zip(tree.rows, taken, strict=True)]
    nodes = list[Hashable]()
    for index, parent in enumerate(tree.parents.tolist()):
        above = nodes[parent] if parent >= 0 else tree.roots[-1 - parent]
        nodes.append(prefix.insert(above, tree.ids[index].tolist(), 0, [pool.get(index, GONE) for pool in block_of]))
