"""Sizes of rows of keys and values by their type (numflow/quant/kv.py)."""

from numflow.cpu.memory.buffers import padded
from numflow.ops import Cache
from numflow.quant.kv import BLOCK, CODED, KV_TYPES, PLAIN

F32, F16, BF16, Q8, Q6, Q5, Q4, Q3H, Q3, Q2 = range(len(KV_TYPES))  # kind by type; kinds above BF16 are quantised
KINDS = {name: kind for kind, name in enumerate(KV_TYPES)}


def width(kind: str, columns: int) -> int:
    """Columns of a row of keys in the attention's arithmetic: padded to blocks or pairs."""
    multiple = BLOCK if kind in CODED else 2 if kind == "bf16" else 1
    return -(-columns // multiple) * multiple


def widths(cache: Cache, kv_k: str, kv_v: str) -> tuple[int, int]:
    """Columns of a key and of a value in the attention's arithmetic.

    Values that are a prefix of keys are padded to whole vectors, or to whole blocks if keys are rotated by blocks; keys
    are at least as wide.
    """
    keys, values = width(kv_k, cache.k_dim), width(kv_k if cache.prefix else kv_v, padded(cache.value_dim))
    return max(keys, values) if cache.prefix else keys, values


def sizes(cache: Cache, kv_k: str, kv_v: str) -> tuple[int, int]:
    """Stored bytes of a key and of a value of one head."""
    keys, values = widths(cache, kv_k, kv_v)
    return row_bytes(kv_k, keys), 0 if cache.prefix else row_bytes(kv_v, values)


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of `columns` columns, padded as by `width`."""
    return columns // BLOCK * CODED[kind].block_bytes if kind in CODED else columns * PLAIN[kind]
