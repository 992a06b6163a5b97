"""Some columns of a stored matrix, in the stored type: bytes are chosen, no number is computed."""

import numpy as np

from numflow.formats.types import TensorType
from numflow.quant import SCHEMES, RowScheme
from numflow.quant.layout import HEADER_BYTES, UNIT


def can_cut(kind: TensorType) -> bool:
    """Whether columns can be taken out of rows as they are stored: not where outliers lie behind all of a row."""
    return not kind.name.endswith("%")


def stored_columns(raw: np.ndarray, kind: TensorType, columns: int, begin: int, end: int) -> np.ndarray:
    """Columns begin .. end - 1 of rows as stored; both are multiples of the type's block.

    Args:
        raw: uint8 [N, row_bytes] of `columns` weights each.

    Returns:
        uint8 [N, row_bytes of end - begin weights]; a view where rows are blocks one after the other.
    """
    scheme = SCHEMES.get(kind.name)
    if isinstance(scheme, RowScheme):
        return _with_headers(raw, scheme, columns, begin, end)
    return raw[:, begin // kind.block * kind.size:end // kind.block * kind.size]


def _with_headers(raw: np.ndarray, scheme: RowScheme, columns: int, begin: int, end: int) -> np.ndarray:
    """Rows of a scheme that begin with the headers of their blocks, as one stream of bits (quant/layout.py)."""
    units = HEADER_BYTES + scheme.stream_bytes(columns)
    bits = np.unpackbits(raw[:, HEADER_BYTES:units], axis=1, bitorder="little")
    first, last = (place // scheme.block * scheme.header_bits for place in (begin, end))
    stream = np.packbits(bits[:, first:last], axis=1, bitorder="little")
    first, last = (units + place // UNIT * scheme.unit_bytes for place in (begin, end))
    return np.concatenate([raw[:, :HEADER_BYTES], stream, raw[:, first:last]], axis=1)
