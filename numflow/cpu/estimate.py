"""What a program will take of memory, from shapes and types alone: for planning, before anything is loaded."""

from numflow.cpu import kv_rows
from numflow.cpu.layout import NATIVE, SCHEMES, tiles_of
from numflow.cpu.memory import padded
from numflow.ops import Cache, Weight


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight in memory: matrices in whole tiles of their type, all else as float32."""
    rows = 1
    for size in weight.shape[:-1]:
        rows *= size
    columns = weight.shape[-1]
    if len(weight.shape) == 1:
        return 4 * columns
    plain = (len(set(weight.types)) == 1 and weight.constant is None and not weight.add and not weight.normalize_rows
             and not any(part.transpose for part in weight.parts))
    kind = NATIVE.get(weight.types[0], "f32") if plain else "f32"
    return weight.groups * tiles_of(rows // weight.groups) * sum(SCHEMES[kind].tile_bytes(columns))


def cache_bytes(cache: Cache, kv_k: str = "f16", kv_v: str = "f16") -> int:
    """Bytes of a cached token's keys and values of one attention."""
    sizes = (kv_rows.row_bytes(kind, kv_rows.width(kind, columns))
             for kind, columns in ((kv_k, cache.k_dim), (kv_v, padded(cache.v_dim))))
    return cache.kv_heads * sum(sizes)
