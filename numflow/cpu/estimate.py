"""Estimate of a program's memory from shapes and types alone: for planning, before anything is loaded."""

from numflow.cpu.state import kv_rows
from numflow.cpu.weights.layout import SCHEMES, tiles_of
from numflow.cpu.weights.outliers import expected_bytes
from numflow.network.weights.source import is_computed
from numflow.ops import Cache, Weight
from numflow.quant import SCHEMES as QUANT_SCHEMES
from numflow.quant.apart import with_outliers
from numflow.quant.stored import kept_as


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight in memory: matrices in whole tiles of their type, all else as float32."""
    rows = 1
    for size in weight.shape[:-1]:
        rows *= size
    columns = weight.shape[-1]
    if len(weight.shape) == 1:
        return 4 * columns
    if is_computed(weight):
        return _matrix_bytes("f32", weight.groups, rows, columns)
    apart = with_outliers(weight.types[0], QUANT_SCHEMES)
    if apart is None:
        return _matrix_bytes(kept_as(weight.types[0], columns).name, weight.groups, rows, columns)
    cut = any(part.columns is not None for part in weight.parts)
    outliers = weight.groups * expected_bytes(apart, rows // weight.groups, columns, cut)
    return _matrix_bytes(kept_as(apart.base.name, columns).name, weight.groups, rows, columns) + outliers


def _matrix_bytes(kind: str, groups: int, rows: int, columns: int) -> int:
    return groups * tiles_of(rows // groups) * sum(SCHEMES[kind].tile_bytes(columns))


def cache_bytes(cache: Cache, kv_k: str = "f16", kv_v: str = "f16") -> int:
    """Bytes of a cached token's keys and values of one attention."""
    return cache.kv_heads * sum(kv_rows.sizes(cache, kv_k, kv_v))
