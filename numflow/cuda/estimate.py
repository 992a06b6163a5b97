"""Estimate of a program's GPU memory from shapes and types alone, for plans that are made before weights are loaded."""

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

_ALIGN = 256  # alignment of every part of a matrix, in bytes
_PIECE = 8  # columns to a multiple of which float rows of keys and values are padded
_PLAIN = {"f32": 4.0, "f16": 2.0}
KV_TYPES = (*_PLAIN, *CODED)  # types of keys and values on a GPU


def planned(weight: Weight) -> Planned:
    """The kind in which a matrix will be stored on the device, and whether outliers are stored apart."""
    kind, outliers = _storage(weight)
    return Planned(kind.name, int(outliers is not None))


def _storage(weight: Weight) -> tuple[Kind, OutlierScheme | None]:
    """The kind in which a matrix is stored, and the scheme of outliers that are stored apart; None without."""
    stored_type = "F32" if is_computed(weight) else weight.types[0]
    outliers = with_outliers(stored_type, QUANT_SCHEMES)
    return kept_as(outliers.base.name if outliers else stored_type, weight.shape[-1]), outliers


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight in device memory: matrices as bit planes or floats, vectors as float32."""
    columns = weight.shape[-1]
    if len(weight.shape) == 1:
        return 4 * columns
    rows, (kind, outliers) = math.prod(weight.shape[:-1]), _storage(weight)
    if kind.is_float:
        return rows * padded(columns) * (4 if kind.name == "f32" else 2)
    cut = any(part.columns is not None for part in weight.parts)
    return _planes(kind, rows, columns) + (expected_bytes(outliers, rows, columns, cut) if outliers else 0)


def _planes(kind: Kind, rows: int, columns: int) -> int:
    parts, columns = SCHEMES[kind.name].parts.values(), padded(columns)
    return sum(ceil(rows * size * (columns // per if per else 1), _ALIGN) * _ALIGN for size, per in parts)


def cache_bytes(cache: Cache, kv_k: str = "f16", kv_v: str = "f16") -> float:
    """Bytes of one token's keys and values in a cache. For a cache of float32 entries: an entry's bytes per token."""
    sizes = (("f32" if cache.every else kv_k, cache.k_dim), (kv_v, cache.v_dim))
    return rows_per_token(cache) * cache.kv_heads * sum(
        ceil(columns, _PIECE) * _PIECE * _PLAIN[kind] if kind in _PLAIN else
        padded(columns) * CODED[kind].bits_per_value / 8
        for kind, columns in sizes)
