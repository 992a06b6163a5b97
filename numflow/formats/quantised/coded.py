"""A quantised matrix, whatever file it comes from, and its rows as a tensor type has them.

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])      or scale[n, g] * table[code[n, k]]

where g is the group of column k. The type is the smallest of TYPES_OF that holds these numbers exactly, else F32.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import release_pages
from numflow.formats.types import tensor_type

_AT_ONCE = 1 << 22  # weights that are made at a time
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


@dataclass(frozen=True)
class CodedRows:
    """Some rows: codes u8 [n, K], scales f32 [n, groups], zeros f32 [n, groups] or None for the matrix's own."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix [..., N, K], its leading dimensions one after the other.

    rows:   of a range of rows, on demand.
    bits:   of a code. scale: type that all scales fit, "E8M0" for powers of two.
    group:  columns that share a scale, where groups are side by side.
    zero:   the code that stands for 0, None where rows have zeros of their own or a table has the numbers.
    table:  numbers of the codes. name: of the table, such as "e2m1".
    order:  the group of each column, where columns of a group lie apart; else None.
    turned: as of Tensor.
    sources: tensors whose pages are not wanted any more once all rows are read.
    """

    name: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], CodedRows]
    bits: int
    scale: str
    group: int
    zero: int | None = None
    table: np.ndarray | None = None
    book: str = ""
    order: Callable[[], np.ndarray] | None = None
    turned: bool = False
    sources: tuple[Tensor, ...] = ()

    def tensor(self) -> Tensor:
        """The matrix as a tensor."""
        kind, encode = _stored_as(self)
        count, columns = int(np.prod(self.shape[:-1], dtype=np.int64)), self.shape[-1]
        row_bytes, step = tensor_type(kind).row_bytes(columns), max(64, _AT_ONCE // max(columns, 1) // 64 * 64)
        last: list[weakref.ref] = []

        def read() -> np.ndarray:
            """All rows, made some at a time; parts of one weight share them."""
            found = last[0]() if last else None
            if found is None:
                found = np.empty((count, row_bytes), np.uint8)
                order = None if self.order is None else self.order()
                for begin in range(0, count, step):
                    end = min(begin + step, count)
                    found[begin:end] = encode(self, self.rows(begin, end), order)
                for source in self.sources:
                    release_pages(source.raw())
                found.flags.writeable = False
                last[:] = [weakref.ref(found)]
            return found

        return Tensor(self.name, self.shape, tensor_type(kind), read, self.turned)


def _stored_as(matrix: CodedMatrix) -> tuple[str, Callable]:
    """The tensor type, and the function that makes its rows."""
    whole = matrix.order is None and matrix.shape[-1] % 32 == 0 and matrix.group % 32 == 0
    for kind, encode, bits, zero, book, scale in TYPES_OF:
        if whole and (bits, zero, book, scale) == (matrix.bits, matrix.zero, matrix.book, matrix.scale):
            return kind, encode
    return "F32", _floats


def floats(matrix: CodedMatrix, rows: CodedRows, order: np.ndarray | None = None) -> np.ndarray:
    """Weights of some rows, float32 [n, K]."""
    columns = matrix.shape[-1]

    def spread(values: np.ndarray) -> np.ndarray:
        if order is not None:
            return values[:, order]
        return values if values.shape[1] == 1 else np.repeat(values, columns // values.shape[1], axis=1)

    with np.errstate(all="ignore"):  # infinite scales are the file's values
        if matrix.table is not None:
            numbers = matrix.table[rows.codes]
        else:
            numbers = rows.codes.astype(np.float32)
            numbers -= np.float32(matrix.zero or 0) if rows.zeros is None else spread(rows.zeros)
        numbers *= spread(rows.scales)
    return numbers


def _floats(matrix: CodedMatrix, rows: CodedRows, order: np.ndarray | None) -> np.ndarray:
    return floats(matrix, rows, order).view(np.uint8)


def _by_32(matrix: CodedMatrix, scales: np.ndarray) -> np.ndarray:
    """A scale for each 32 columns."""
    units = matrix.shape[-1] // 32
    return np.repeat(scales, units // scales.shape[1], axis=1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Blocks of 32 codes as GGML has them: columns 0 .. 15 in the low nibbles, 16 .. 31 in the high ones."""
    halves = codes.reshape(len(codes), -1, 2, 16)
    return halves[:, :, 0] | halves[:, :, 1] << 4


def _blocks(header: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Blocks of a header u8 [n, units, h] and of bytes u8 [n, units, b], as rows."""
    return np.concatenate([header, data], axis=2).reshape(len(data), -1)


def _halves(matrix: CodedMatrix, rows: CodedRows) -> np.ndarray:
    scales = _by_32(matrix, rows.scales).astype("<f2")
    return scales[..., None].view(np.uint8)


def _q4_0(matrix: CodedMatrix, rows: CodedRows, order: None) -> np.ndarray:
    return _blocks(_halves(matrix, rows), _nibbles(rows.codes))


def _q8_0(matrix: CodedMatrix, rows: CodedRows, order: None) -> np.ndarray:
    signed = (rows.codes ^ 128).reshape(len(rows.codes), -1, 32)
    return _blocks(_halves(matrix, rows), signed)


def _mxfp4(matrix: CodedMatrix, rows: CodedRows, order: None) -> np.ndarray:
    exponents = (np.frexp(_by_32(matrix, rows.scales))[1] + 126).astype(np.uint8)
    return _blocks(exponents[..., None], _nibbles(rows.codes))


# Tensor type, its maker, bits, zero, table and type of scales of the matrices it holds exactly, where a scale is for a
# whole number of blocks of 32 columns.
TYPES_OF: tuple[tuple[str, Callable, int, int | None, str, str], ...] = (
    ("Q4_0", _q4_0, 4, 8, "", "F16"), ("Q8_0", _q8_0, 8, 128, "", "F16"), ("MXFP4", _mxfp4, 4, None, "e2m1", "E8M0"),
)
