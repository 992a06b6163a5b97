"""How much memory rows of keys and values take by their type (numflow/quant/kv.py)."""

from numflow.quant.kv import BLOCK, CODED, KV_TYPES

F32, F16, Q8, Q6, Q5, Q4, Q3H, Q3, Q2 = range(len(KV_TYPES))  # the kind of a type
KINDS = {name: kind for kind, name in enumerate(KV_TYPES)}


def width(kind: str, columns: int) -> int:
    """Columns of a row of keys in the attention's arithmetic."""
    return -(-columns // BLOCK) * BLOCK if kind in CODED else columns


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of `columns` columns, as `width` has them."""
    return columns // BLOCK * CODED[kind].block_bytes if kind in CODED else columns * (2 if kind == "f16" else 4)
