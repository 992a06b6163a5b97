"""Texts of a prefix cache taken out of it as data, and put back."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from numflow.engine.run.core import Core
from numflow.engine.run.places import KeptText
from numflow.engine.schedule.blocks import GONE
from numflow.engine.schedule.pools import room
from numflow.engine.schedule.prefix import START, Node
from numflow.engine.sessions.session_file import PIECE_BLOCKS, SessionFile, TextTree


@dataclass(frozen=True)
class HeldTree:
    """A tree of texts whose blocks are held. blocks: of each pool, the KV block of each of the tree's rows."""

    core: Core
    tree: TextTree
    blocks: Sequence[Sequence[int]]

    def read(self, pool: int, begin: int, end: int) -> np.ndarray:
        """Content of blocks `begin` .. `end` - 1 of a pool, uint8 [n, size]."""
        with self.core.runner.lock:
            return self.core.runner.program.save_blocks(list(self.blocks[pool][begin:end]), *self.core.hosts[pool].only)


def can_be_saved(root: Hashable) -> bool:
    """Whether the texts below a root are the base model's own: not of an adapter, nor behind an encoder."""
    base = root[0] if isinstance(root, tuple) and len(root) == 2 else root  # beside a variant of positions
    return isinstance(base, tuple) and len(base) == 3 and base[0] == START and base[2] == ()


@contextmanager
def held_text(core: Core, text: KeptText) -> Iterator[HeldTree]:
    """One text as far as the prefix cache has it, held for a block."""
    prefix, pools = core.scheduler.prefix, core.runner.pools
    assert prefix is not None
    size = prefix.block_size
    with core.runner.lock:
        ids = text.ids.tolist()
        tables = [pool.table(size) for pool in pools]
        _, blocks, _ = prefix.match(text.root, ids, len(ids) // size, tables)
        rows = [np.array([at for at, block in enumerate(own) if block != GONE], np.int32) for own in blocks]
        held = [[own[at] for at in found] for own, found in zip(blocks, rows, strict=True)]
        for pool, own in zip(pools, held, strict=True):
            pool.allocator.share(own)
    count = len(blocks[0])
    tree = TextTree([text.root], np.arange(-1, count - 1, dtype=np.int32), text.ids[:count * size].reshape(-1, size),
                    rows, text.ids)
    with _released(core, held):
        yield HeldTree(core, tree, held)


@contextmanager
def held_cache(core: Core, nbytes: int) -> Iterator[HeldTree]:
    """The prefix cache of the base model's texts, the latest first, in so many bytes at most, held for a
    block."""
    prefix, pools = core.scheduler.prefix, core.runner.pools
    assert prefix is not None
    with core.runner.lock:
        chosen = dict[int, Node]()  # by number; a node comes behind those that lead to it
        for block in pools[0].allocator.latest():
            path, node = list[Node](), cast("Node | None", prefix.node(block))
            while node is not None and node.number not in chosen:
                path.append(node)
                last, node = node, prefix.parent(node)
            cost = sum(pool.size for one in path for pool, own in zip(pools, one.blocks) if own != GONE)
            if not path or (node is None and not can_be_saved(last.key[0])):
                continue
            if cost > nbytes:
                break
            nbytes -= cost
            chosen |= {one.number: one for one in reversed(path)}
        nodes = list(chosen.values())
        rows = [np.array([at for at, node in enumerate(nodes) if node.blocks[pool] != GONE], np.int32)
                for pool in range(len(pools))]
        held = [[nodes[at].blocks[pool] for at in own] for pool, own in enumerate(rows)]
        for pool, blocks in zip(pools, held, strict=True):
            pool.allocator.share(blocks)
    places = {number: at for at, number in enumerate(chosen)}
    roots = list(dict.fromkeys(node.key[0] for node in nodes if node.key[0] not in places))
    parents = [places[above] if (above := node.key[0]) in places else -1 - roots.index(above) for node in nodes]
    ids = np.array([node.key[1] for node in nodes], np.int32).reshape(len(nodes), prefix.block_size)
    with _released(core, held):
        yield HeldTree(core, TextTree(roots, np.array(parents, np.int32), ids, rows), held)


@contextmanager
def _released(core: Core, held: Sequence[Sequence[int]]) -> Iterator[None]:
    """Give blocks back after a block."""
    try:
        yield
    finally:
        with core.runner.lock:
            for pool, blocks in zip(core.runner.pools, held, strict=True):
                pool.allocator.release(list(blocks))


def put_back(core: Core, file: SessionFile) -> bool:
    """Let the prefix cache have the texts of a file. False: there is no room for them.

    Raises:
        RequestError: the file is damaged; nothing of it is taken then.
    """
    prefix, pools, tree = core.scheduler.prefix, core.runner.pools, file.tree
    assert prefix is not None
    counts = [len(rows) for rows in tree.rows]
    with core.runner.lock:
        if not room(pools, counts, counts, prefix.block_size):
            return False
        taken = [pool.allocator.allocate(count) for pool, count in zip(pools, counts, strict=True)]
    with _released(core, taken):
        for at, (pool, blocks) in enumerate(zip(pools, taken, strict=True)):
            for begin in range(0, len(blocks), PIECE_BLOCKS):
                some = blocks[begin:begin + PIECE_BLOCKS]
                data = file.block_data(at, pool.size, begin, begin + len(some))
                with core.runner.lock:
                    core.runner.program.load_blocks(some, data, *core.hosts[at].only)
        with core.runner.lock:
            _insert(core, tree, taken)
    return True


def _insert(core: Core, tree: TextTree, taken: Sequence[Sequence[int]]) -> None:
    """Remember the nodes of a tree, whose blocks these are."""
    prefix = core.scheduler.prefix
    assert prefix is not None
    own = [dict(zip(rows.tolist(), blocks)) for rows, blocks in zip(tree.rows, taken, strict=True)]
    numbers = list[Hashable]()
    for at, parent in enumerate(tree.parents.tolist()):
        above = numbers[parent] if parent >= 0 else tree.roots[-1 - parent]
        numbers.append(prefix.insert(above, tree.ids[at].tolist(), 0, [blocks.get(at, GONE) for blocks in own]))
