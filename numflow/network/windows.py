"""Windows of attention: which caches need the last tokens of a text only.

Caches are grouped by their window, and each group has block tables and KV blocks of its own, so that blocks which left
a window are free for others. A window is what a query sees, itself included; 0 stands for the whole text.
"""

from collections.abc import Mapping

from numflow.ops import Cache, Network, Step, param

CHUNK, BLOCK = 512, 64  # tokens of a prompt that run at once, and of a KV block, where nobody says otherwise
STATE = -1  # among the kinds of memory, which are named by their windows


def cache_windows(network: Network) -> dict[str, int]:
    """The window of each self-attention cache: the widest of those who read it, 0 where one of them reads it whole.

    Attention to both sides reads texts that are in the batch as a whole, so nothing is gained by leaving keys out.
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
    """The latest keys that a query of an attention may see, itself included; 0 for all. A chunk has no more of them.
    Of a `pool` the tokens that it adds up."""
    if step.op == "pool":
        return param(step, "every") * param(step, "series")
    return min(filter(None, (param(step, "window"), param(step, "chunk"))), default=0)


def windows(network: Network) -> tuple[int, ...]:
    """The windows that there are, in rising order: whole texts first. (0,) for a network without self-attention."""
    return tuple(sorted(set(cache_windows(network).values()))) or (0,)


def kinds(network: Network) -> tuple[int, ...]:
    """The kinds of memory that sequences have: the windows, then STATE where steps are recurrent."""
    return (*windows(network), STATE) if network.states else windows(network)


def first_key(window: int, position: int) -> int:
    """The first position that a query at `position` sees through a window."""
    return max(0, position - window + 1) if window else 0


def most_blocks(window: int, tokens: int, chunk: int, block_size: int) -> int:
    """KV blocks that a text of so many tokens holds at most, where up to `chunk` of them run at once."""
    whole = -(-tokens // block_size)
    if not window:
        return whole
    # The window lies before a border of blocks (at least the last token does); the chunk begins in the block behind it.
    return min(whole, -(-(max(window, 2) - 1) // block_size) + (block_size + chunk - 2) // block_size + 1)


def kept_tokens(window: int, tokens: int, texts: int = 1, chunk: int = CHUNK) -> int:
    """Cached tokens for so many texts of `tokens` together, with blocks as they are by default, while so many tokens of
    each run at once."""
    return min(tokens, texts * BLOCK * most_blocks(window, tokens, chunk, BLOCK)) if window else tokens


def rows_per_token(cache: Cache, block: int = BLOCK) -> float:
    """Rows of a cache for each token that it has room for: of entries as many in a block as windows may end there."""
    return -(-block // cache.every) / block if cache.every else 1


def token_bytes(cache: Cache, element_bytes: float) -> float:
    """Bytes of a cached token, in numbers of so many bytes; of entries in float32 its part of one."""
    each = 4 if cache.every else element_bytes
    return cache.kv_heads * (cache.k_dim + cache.v_dim) * each * rows_per_token(cache)


def table_name(window: int) -> str:
    """Name of a group's block table among the arrays of a checked batch."""
    return f"blocks {window}" if window else "blocks"


def counts(given: Mapping[int, int] | None, blocks: int, network: Network) -> dict[int, int]:
    """Blocks, or slots, of each kind of memory: those given, `blocks` where none are."""
    return {kind: (given or {}).get(kind, blocks) for kind in kinds(network)}
