"""Bytes of rows of keys and values by their type (numflow/quant/kv.py)."""

from numflow.cpu.memory.buffers import padded
from numflow.ops import Cache
from numflow.quant.kv import BLOCK, CODED, KV_TYPES, PLAIN

F32, F16, BF16, Q8, Q6, Q5, Q4, Q3H, Q3, Q2 = range(len(KV_TYPES))  # the kind of a type; few bits behind BF16
KINDS = {name: kind for kind, name in enumerate(KV_TYPES)}


def width(kind: str, columns: int) -> int:
    """Columns of a row of keys in the attention's arithmetic."""
    each = BLOCK if kind in CODED else 2 if kind == "bf16" else 1
    return -(-columns // each) * each


def widths(cache: Cache, kv_k: str, kv_v: str) -> tuple[int, int]:
    """Columns of a key and of a value in the attention's arithmetic.

    Of values that are a prefix of keys, whole vectors, or blocks where keys are rotated by blocks; keys are as wide.
    """
    keys, values = width(kv_k, cache.k_dim), width(kv_k if cache.prefix else kv_v, padded(cache.value_dim))
    return max(keys, values) if cache.prefix else keys, values


def sizes(cache: Cache, kv_k: str, kv_v: str) -> tuple[int, int]:
    """Bytes that are stored of a key and of a value of one head."""
    keys, values = widths(cache, kv_k, kv_v)
    return row_bytes(kv_k, keys), 0 if cache.prefix else row_bytes(kv_v, values)


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of `columns` columns, as `width` has them."""
    return columns // BLOCK * CODED[kind].block_bytes if kind in CODED else columns * PLAIN[kind]
