"""Estimate of a program's memory on a GPU from shapes and types alone: for planning, before anything is loaded."""

import math

from numflow.cuda.device.call import ceil
from numflow.cuda.weights.layout import SCHEMES, Planned
from numflow.cuda.weights.operand import padded
from numflow.cuda.weights.outliers import expected_bytes
from numflow.network.weights.source import is_computed
from numflow.network.windows import rows_per_token
from numflow.ops import Cache, Weight
from numflow.quant import SCHEMES as QUANT_SCHEMES
from numflow.quant.apart import OutlierScheme, with_outliers
from numflow.quant.kv import CODED
from numflow.quant.stored import Kind, kept_as

_ALIGN = 256  # bytes that every part of a matrix begins on a multiple of
_PIECE = 8  # columns that plain rows of keys and values are filled up to
_PLAIN = {"f32": 4.0, "f16": 2.0}
KV_TYPES = (*_PLAIN, *CODED)  # of keys and values on a GPU


def planned(weight: Weight) -> Planned:
    """The form that a matrix will have."""
    kept, apart = _kept(weight)
    return Planned(kept.name, int(apart is not None))


def _kept(weight: Weight) -> tuple[Kind, OutlierScheme | None]:
    """The kind that a matrix is kept in, and the outliers kept apart from it."""
    kind = "F32" if is_computed(weight) else weight.types[0]
    apart = with_outliers(kind, QUANT_SCHEMES)
    return kept_as(apart.base.name if apart else kind, weight.shape[-1]), apart


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight in memory: matrices as their planes or plain numbers, all else as float32."""
    columns = weight.shape[-1]
    if len(weight.shape) == 1:
        return 4 * columns
    rows, (kept, apart) = math.prod(weight.shape[:-1]), _kept(weight)
    if kept.is_float:
        return rows * padded(columns) * (4 if kept.name == "f32" else 2)
    cut = any(part.columns is not None for part in weight.parts)
    return _planes(kept, rows, columns) + (expected_bytes(apart, rows, columns, cut) if apart else 0)


def _planes(kind: Kind, rows: int, columns: int) -> int:
    parts, columns = SCHEMES[kind.name].parts.values(), padded(columns)
    return sum(ceil(rows * size * (columns // per if per else 1), _ALIGN) * _ALIGN for size, per in parts)


def cache_bytes(cache: Cache, kv_k: str = "f16", kv_v: str = "f16") -> float:
    """Bytes of a cached token's keys and values of one attention, or its part of an entry, which is of float32."""
    sizes = (("f32" if cache.every else kv_k, cache.k_dim), (kv_v, cache.v_dim))
    return rows_per_token(cache) * cache.kv_heads * sum(
        ceil(columns, _PIECE) * _PIECE * _PLAIN[kind] if kind in _PLAIN else
        padded(columns) * CODED[kind].bits_per_value / 8
        for kind, columns in sizes)
