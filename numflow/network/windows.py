"""Attention windows: caches that need only the last tokens of a text.

Caches are grouped by window. Each group has its own block tables and KV blocks, so that blocks outside the window are
freed. A window is the number of keys that a query sees, its own included; 0 stands for the whole text.
"""

from collections.abc import Mapping

from numflow.ops import Cache, Network, Step, param

CHUNK, BLOCK = 512, 64  # defaults: tokens of a prompt that run at once, and tokens of a KV block
STATE = -1  # kind of memory for states; other kinds are windows


def cache_windows(network: Network) -> dict[str, int]:
    """The window of each self-attention cache: the widest of its readers, 0 if one reads the whole text.

    Bidirectional attention needs the whole text in the batch and counts as 0.
    """
    found: dict[str, int] = {}
    for entry, steps in network.entries.items():
        for step in steps:
            if step.op not in ("attention", "pool") or network.caches[name := param(step, "cache")].kind != "self":
                continue
            window = reach(step) if entry == "main" and (step.op == "pool" or param(step, "causal")) else 0
            found[name] = max(window, found.get(name, window)) if window and found.get(name, window) else 0
    return {name: found.get(name, 0) for name, cache in network.caches.items() if cache.kind == "self"}


def reach(step: Step) -> int:
    """The number of latest keys that a query may see, its own included; 0 for all. For `pool`: the tokens it sums."""
    if step.op == "pool":
        return param(step, "every") * param(step, "series")
    return min(filter(None, (param(step, "window"), param(step, "chunk"))), default=0)


def windows(network: Network) -> tuple[int, ...]:
    """All windows of a network in rising order, 0 (whole texts) first; (0,) without self-attention."""
    return tuple(sorted(set(cache_windows(network).values()))) or (0,)


def kinds(network: Network) -> tuple[int, ...]:
    """The kinds of memory of sequences: the windows, then STATE if there are recurrent steps."""
    return (*windows(network), STATE) if network.states else windows(network)


def first_key(window: int, position: int) -> int:
    """The first position that a query at `position` sees through a window."""
    return max(0, position - window + 1) if window else 0


def most_blocks(window: int, tokens: int, chunk: int, block_size: int) -> int:
    """Maximal number of KV blocks for a text of so many tokens, of which up to `chunk` run at once."""
    whole = -(-tokens // block_size)
    if not window:
        return whole
    # Worst case: the window ends at the end of a block, and the chunk begins in the next block.
    return min(whole, -(-(max(window, 2) - 1) // block_size) + (block_size + chunk - 2) // block_size + 1)


def kept_tokens(window: int, tokens: int, texts: int = 1, chunk: int = CHUNK) -> int:
    """Cached tokens for so many texts of `tokens` in total, with the default block size and `chunk` tokens at once."""
    return min(tokens, texts * BLOCK * most_blocks(window, tokens, chunk, BLOCK)) if window else tokens


def rows_per_token(cache: Cache, block: int = BLOCK) -> float:
    """Rows of a cache per token of capacity: 1, or for entries the number of windows that may end in a block /
    block."""
    return -(-block // cache.every) / block if cache.every else 1


def token_bytes(cache: Cache, element_bytes: float) -> float:
    """Bytes of a cached token with elements of `element_bytes`; entries are float32, and a token has a part of one."""
    each = 4 if cache.every else element_bytes
    return cache.kv_heads * (cache.k_dim + cache.v_dim) * each * rows_per_token(cache)


def table_name(window: int) -> str:
    """Name of a window's block table among the arrays of a checked batch."""
    return f"blocks {window}" if window else "blocks"


def counts(given: Mapping[int, int] | None, blocks: int, network: Network) -> dict[int, int]:
    """Number of blocks, or slots, of each kind of memory: as given, else `blocks`."""
    return {kind: (given or {}).get(kind, blocks) for kind in kinds(network)}
