"""Estimates of a program's memory from shapes and types alone, for planning before anything is loaded."""

from numflow.cpu.state import kv_rows
from numflow.cpu.weights.layout import Planned, scheme_of, tiles_of
from numflow.cpu.weights.outliers import expected_bytes
from numflow.machine import free_memory
from numflow.network.weights.source import is_computed
from numflow.network.windows import rows_per_token
from numflow.ops import Cache, Network, Weight
from numflow.quant import SCHEMES as QUANT_SCHEMES
from numflow.quant.apart import with_outliers
from numflow.quant.stored import kept_as

_LARGE = 64 << 20  # bytes


def planned(weight: Weight, spread: bool = False) -> Planned:
    """The scheme that a matrix will be packed in. spread: grid types with a code per weight."""
    rows = 1
    for size in weight.shape[:-1]:
        rows *= size
    columns = weight.shape[-1]
    if is_computed(weight):
        return Planned("f32", (rows, columns))
    outliers = with_outliers(weight.types[0], QUANT_SCHEMES)
    kind = kept_as(weight.types[0] if outliers is None else outliers.base.name, columns)
    return Planned(scheme_of(kind, spread).name, (rows, columns), outliers)


def spread_pays(network: Network, devices: int = 1) -> bool:
    """Whether grid types should have a code per weight: their matrices are larger than caches, and with codes all
    weights of the network take at most half of the free memory, shared by `devices`."""
    matrices = [weight for weight in network.weights.values() if len(weight.shape) > 1]
    grids = [weight for weight in matrices if planned(weight, True) != planned(weight)]
    if sum(map(weight_bytes, grids)) < _LARGE:
        return False
    free = free_memory()
    return free is not None and devices * sum(weight_bytes(weight, True) for weight in matrices) <= free // 2


def weight_bytes(weight: Weight, spread: bool = False) -> int:
    """Bytes of a weight in memory: matrices in whole tiles of their scheme, vectors as float32."""
    if len(weight.shape) == 1:
        return 4 * weight.shape[0]
    plan = planned(weight, spread)
    rows, columns = plan.shape[0] // weight.groups, plan.shape[1]
    nbytes = weight.groups * tiles_of(rows) * sum(plan.scheme.tile_bytes(columns))
    if plan.outliers is None:
        return nbytes
    cut = any(part.columns is not None for part in weight.parts)
    return nbytes + weight.groups * expected_bytes(plan.outliers, rows, columns, cut)


def cache_bytes(cache: Cache, kv_k: str = "f16", kv_v: str = "f16") -> float:
    """Bytes of keys and values of one token in a cache; in a cache of entries, the token's share of a float32 entry."""
    kinds = ("f32", "f32") if cache.every else (kv_k, kv_v)
    return cache.kv_heads * sum(kv_rows.sizes(cache, *kinds)) * rows_per_token(cache)
