"""Columns of a stored matrix in the stored type: bytes are selected, no value is computed."""

import numpy as np

from numflow.formats.types import TensorType
from numflow.quant import SCHEMES, RowScheme
from numflow.quant.layout import HEADER_BYTES, UNIT


def can_cut(kind: TensorType) -> bool:
    """Whether stored rows can be cut into columns: not if a row ends with its outliers."""
    return not kind.name.endswith("%")


def stored_columns(raw: np.ndarray, kind: TensorType, columns: int, begin: int, end: int) -> np.ndarray:
    """Columns begin .. end - 1 of stored rows; both are multiples of the type's block.

    Args:
        raw: uint8 [N, row_bytes] of `columns` weights each.

    Returns:
        uint8 [N, row_bytes of end - begin weights]; a view where rows are consecutive blocks.
    """
    scheme = SCHEMES.get(kind.name)
    if isinstance(scheme, RowScheme):
        return _with_headers(raw, scheme, columns, begin, end)
    return raw[:, begin // kind.block * kind.size:end // kind.block * kind.size]


def _with_headers(raw: np.ndarray, scheme: RowScheme, columns: int, begin: int, end: int) -> np.ndarray:
    """Columns of rows that begin with a bit stream of block headers (quant/layout.py)."""
    units = HEADER_BYTES + scheme.stream_bytes(columns)
    bits = np.unpackbits(raw[:, HEADER_BYTES:units], axis=1, bitorder="little")
    first, last = (column // scheme.block * scheme.header_bits for column in (begin, end))
    stream = np.packbits(bits[:, first:last], axis=1, bitorder="little")
    first, last = (units + column // UNIT * scheme.unit_bytes for column in (begin, end))
    return np.concatenate([raw[:, :HEADER_BYTES], stream, raw[:, first:last]], axis=1)
