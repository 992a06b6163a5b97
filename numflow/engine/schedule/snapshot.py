"""A scheduler at this moment, as plain data of bounded size: blocks and their holders, requests, the prefix tree."""

from itertools import islice
from typing import Any

from numflow.engine.schedule.blocks import GONE
from numflow.engine.schedule.pools import Pool
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.scheduler import Scheduler
from numflow.engine.schedule.sequence import SequenceGroup

BLOCKS, REQUESTS, SEQUENCES, NODES = 2048, 64, 16, 1024  # told at most, of a pool, of all, of a request, of the tree
KEPT = -1  # a block that nobody holds, whose content may be found again


def snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """Blocks of each pool, requests and prefix tree; no text and no token of anybody. Nothing may step meanwhile.

    blocks of a pool: holders of each, 0: free, KEPT. tree: nodes with the node before them, 0 is the beginning of all
    texts, or of those of one key, if no node has that number.
    """
    groups = [(group, True) for group in scheduler.running] + [(group, False) for group in scheduler.waiting]
    return {"block_tokens": scheduler.block_size, "pools": [_pool(pool) for pool in scheduler.pools],
            "requests": [_request(group, running) for group, running in islice(groups, REQUESTS)],
            "requests_in_all": len(groups), "tree": [] if scheduler.prefix is None else _tree(scheduler.prefix),
            "tree_in_all": 0 if scheduler.prefix is None else len(scheduler.prefix),
            "evicted": 0 if scheduler.prefix is None else scheduler.prefix.evicted, "counts": dict(scheduler.counts)}


def _pool(pool: Pool) -> dict[str, Any]:
    own = pool.allocator
    return {"window": pool.window, "bytes": pool.size, "capacity": own.capacity, "used": own.used, "kept": own.idle,
            "blocks": [own.holders(block) or (KEPT if own.kept(block) else 0)
                       for block in range(min(own.capacity, BLOCKS))]}


def _request(group: SequenceGroup, running: bool) -> dict[str, Any]:
    return {"number": group.arrival, "running": running, "prompt": len(group.prompt), "limit": group.limit,
            "reused": group.reused, "sequences": [
                {"tokens": len(one.ids), "cached": one.length, "swapped": len(one.swapped),
                 "blocks": [block for block in one.table.blocks[:BLOCKS] if block != GONE]}
                for one in group.sequences[:SEQUENCES]]}


def _tree(prefix: PrefixCache) -> list[dict[str, Any]]:
    """Nodes in the order in which they came, each after the one before it."""
    return [{"node": node.number, "before": before if isinstance(before, int) else 0, "block": node.blocks[0],
             "held": node.blocks[0] != GONE and prefix.allocators[0].holders(node.blocks[0])}
            for node, before in ((node, node.key[0]) for node in islice(prefix.nodes, NODES))]
