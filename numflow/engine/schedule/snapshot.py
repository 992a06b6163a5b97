"""Snapshot of a scheduler as plain data of bounded size: blocks with reference counts, requests, the prefix tree."""

from itertools import islice
from typing import Any

from numflow.engine.schedule.blocks import GONE
from numflow.engine.schedule.pools import Pool
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.scheduler import Scheduler
from numflow.engine.schedule.sequence import SequenceGroup

# Maximum entries: of a pool, of the scheduler, of a request, of the tree.
BLOCKS, REQUESTS, SEQUENCES, NODES = 2048, 64, 16, 1024
KEPT = -1  # a free block with cached content


def snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """Blocks of each pool, requests and prefix tree; no text and no tokens. No step may run meanwhile.

    Blocks of a pool: reference count of each, 0: free, KEPT: free with cached content. tree: nodes with their parent;
    a parent that is no node, such as 0, is the root of all texts or of one cache key.
    """
    groups = [(group, True) for group in scheduler.running] + [(group, False) for group in scheduler.waiting]
    return {"block_tokens": scheduler.block_size, "pools": [_pool(pool) for pool in scheduler.pools],
            "requests": [_request(group, running) for group, running in islice(groups, REQUESTS)],
            "requests_in_all": len(groups), "tree": [] if scheduler.prefix is None else _tree(scheduler.prefix),
            "tree_in_all": 0 if scheduler.prefix is None else len(scheduler.prefix),
            "evicted": 0 if scheduler.prefix is None else scheduler.prefix.evicted, "counts": dict(scheduler.counts)}


def _pool(pool: Pool) -> dict[str, Any]:
    allocator = pool.allocator
    return {"window": pool.window, "bytes": pool.size, "capacity": allocator.capacity, "used": allocator.used,
            "kept": allocator.cached,
            "blocks": [allocator.holders(block) or (KEPT if allocator.is_cached(block) else 0)
                       for block in range(min(allocator.capacity, BLOCKS))]}


def _request(group: SequenceGroup, running: bool) -> dict[str, Any]:
    return {"number": group.arrival, "running": running, "prompt": len(group.prompt), "limit": group.limit,
            "reused": group.reused, "sequences": [
                {"tokens": len(sequence.ids), "cached": sequence.length, "swapped": len(sequence.swapped),
                 "blocks": [block for block in sequence.table.blocks[:BLOCKS] if block != GONE]}
                for sequence in group.sequences[:SEQUENCES]]}


def _tree(prefix: PrefixCache) -> list[dict[str, Any]]:
    """Nodes in the order of insertion, parents before children."""
    return [{"node": node.id, "before": parent if isinstance(parent, int) else 0, "block": node.blocks[0],
             "held": node.blocks[0] != GONE and prefix.allocators[0].holders(node.blocks[0])}
            for node, parent in ((node, node.key[0]) for node in islice(prefix.nodes, NODES))]
