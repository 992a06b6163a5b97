"""A quantised matrix from any file format, and its conversion to a tensor type.

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])      or scale[n, g] * table[code[n, k]]

where g is the group of column k. The tensor type represents these values exactly (numflow.quant.hub_types), else it is
F32.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from numflow.formats.checkpoint import OrderedTensor, Tensor
from numflow.formats.mapped import release_pages
from numflow.formats.types import tensor_type
from numflow.quant.bits import pack_planes
from numflow.quant.hub_types import HUB_TYPES, TABLES, UNIT, HubType

_AT_ONCE = 1 << 20  # weights converted at a time
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


@dataclass(frozen=True)
class CodedRows:
    """A range of rows: codes u8 [n, K], scales f32 [n, groups], zero points f32 [n, groups] or None (CodedMatrix.zero).

    steps: E4M3 factors of scales, u8 [n, K / 16].
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    steps: np.ndarray | None = None


@dataclass(frozen=True)
class CodedMatrix:
    """A quantised matrix [..., N, K]; leading dimensions are flattened.

    rows:   returns a range of rows, on demand.
    bits:   of a code. scale: type that represents all scales, "E8M0" for powers of two, "F8_E4M3" if rows have steps.
    group:  columns per scale, if groups are contiguous.
    zero:   the zero point of all codes; None if rows have zero points, or with a codebook.
    zero_type: type that represents zero points of rows, "U8" for integers up to 255.
    table:  codebook. book: its name, such as "e2m1", if types support it.
    order:  returns the group of each column, if groups are not contiguous; else None. The tensor of such a matrix is
            float32, and has a version with permuted columns (Tensor.ordered).
    factors: returns a factor per column; the tensor of such a matrix is float32.
    turned: as in Tensor.
    sources: tensors whose memory pages are released once all rows are read.
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
    zero_type: str = "U8"
    order: Callable[[], np.ndarray] | None = None
    factors: Callable[[], np.ndarray] | None = None
    turned: bool = False
    sources: tuple[Tensor, ...] = ()

    def tensor(self) -> Tensor:
        """The matrix as a tensor."""
        kind, encode = _stored_as(self)
        count, columns = int(np.prod(self.shape[:-1], dtype=np.int64)), self.shape[-1]
        row_bytes, step = tensor_type(kind).row_bytes(columns), max(64, _AT_ONCE // max(columns, 1) // 64 * 64)
        last: list[weakref.ref] = []

        def read() -> np.ndarray:
            """All rows, converted in batches; the last result is reused while it is referenced."""
            found = last[0]() if last else None
            if found is None:
                found = np.empty((count, row_bytes), np.uint8)
                for begin in range(0, count, step):
                    end = min(begin + step, count)
                    found[begin:end] = encode(self, self.rows(begin, end))
                for source in self.sources:
                    release_pages(source.raw())
                found.flags.writeable = False
                last[:] = [weakref.ref(found)]
            return found

        return Tensor(self.name, self.shape, tensor_type(kind), read, self.turned, self._ordered())

    def _ordered(self) -> OrderedTensor | None:
        """The matrix with columns sorted by group, if groups have equal sizes and the type is smaller than float32."""
        if self.order is None or self.factors is not None:
            return None
        groups, columns = self.order(), self.shape[-1]
        order = np.argsort(groups, kind="stable")
        size = columns // max(1, int(groups.max(initial=0)) + 1)
        if not size or columns % size or not np.array_equal(groups[order], np.arange(columns) // size):
            return None

        def rows(begin: int, end: int) -> CodedRows:
            found = self.rows(begin, end)
            return replace(found, codes=found.codes[:, order])

        tensor = replace(self, rows=rows, group=size, order=None).tensor()
        return OrderedTensor(tensor, order) if tensor.type.name != "F32" else None


def _stored_as(matrix: CodedMatrix) -> tuple[str, Callable[[CodedMatrix, CodedRows], np.ndarray]]:
    """The tensor type, and the function that encodes its rows."""
    if matrix.order is None and matrix.factors is None and matrix.shape[-1] % UNIT == 0:
        if (matrix.book, matrix.scale) == ("e2m1", "E8M0") and matrix.shape[-1] % 32 == 0 and matrix.group % 32 == 0:
            return "MXFP4", _mxfp4
        for wider in (False, True):
            for hub in _of_blocks(matrix.group, matrix.shape[-1]):
                if _fits(hub, matrix, wider):
                    return hub.name, functools.partial(_ggml if hub in _OF_GGML else _blocks, hub)
    return "F32", lambda matrix, rows: floats(matrix, rows).view(np.uint8)


@functools.cache
def _of_blocks(group: int, columns: int) -> list[HubType]:
    """Types whose blocks divide groups, smallest first."""
    if group == columns:
        return [hub for hub in HUB_TYPES.values() if not hub.block]
    fitting = [hub for hub in HUB_TYPES.values() if hub.by_16 or (hub.block and group % hub.block == 0)]
    return [*_OF_GGML, *fitting] if group == 32 else fitting


def _fits(hub: HubType, matrix: CodedMatrix, wider: bool) -> bool:
    """Whether a type represents the values exactly. wider: allow types with more bits per code."""
    if hub.by_16 or matrix.scale == "F8_E4M3":
        return hub.by_16 and matrix.scale == "F8_E4M3" and matrix.group == UNIT
    if matrix.table is not None or hub.table:
        return bool(hub.table) and matrix.book == hub.table
    zeros = "" if matrix.zero is not None else matrix.zero_type
    return (hub.bits > matrix.bits if wider else hub.bits == matrix.bits) and _holds(hub.scale, matrix.scale) and (
        hub.zeros == zeros or bool(hub.zeros and zeros and _holds(hub.zeros, zeros)))


def _holds(kind: str, other: str) -> bool:
    """Whether a type represents all values of another one."""
    return kind == other or (kind == "F32" and other != "") or (kind in ("F16", "BF16") and other == "U8")


def floats(matrix: CodedMatrix, rows: CodedRows) -> np.ndarray:
    """De-quantised rows, float32 [n, K]."""
    columns, order = matrix.shape[-1], None if matrix.order is None else matrix.order()

    def spread(parameters: np.ndarray) -> np.ndarray:
        if order is not None:
            return parameters[:, order]
        return parameters if parameters.shape[1] == 1 else np.repeat(parameters, columns // parameters.shape[1], axis=1)

    with np.errstate(all="ignore"):  # infinite scales are the file's values
        if matrix.table is not None:
            values = matrix.table[rows.codes]
        else:
            values = rows.codes.astype(np.float32)
            values -= np.float32(matrix.zero or 0) if rows.zeros is None else spread(rows.zeros)
        values *= spread(rows.scales if rows.steps is None else TABLES["e4m3"][rows.steps] * rows.scales)
        if matrix.factors is not None:
            values *= matrix.factors()
    return values


def zeros_of(scales: np.ndarray, offsets: np.ndarray, middle: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points f32 for scale * (code - middle) + offset, also with scale 0."""
    flat = scales == 0
    with np.errstate(all="ignore"):  # infinite scales are the file's values
        steps = np.where(flat, offsets * np.float32(2**-30), scales)
        return steps, np.where(flat, np.float32(-2**30), np.float32(middle) - offsets / scales)


def _blocks(hub: HubType, matrix: CodedMatrix, rows: CodedRows) -> np.ndarray:
    """Encode rows in a type of HUB_TYPES: headers and bit planes."""
    (n, columns), scales, zeros = rows.codes.shape, rows.scales, rows.zeros
    count = columns // hub.block if hub.block else 1
    if rows.steps is not None:
        scales = scales / 2  # the type's codebook has doubled values
    header = [_bytes(scales, count, hub.scale)]
    codes = rows.codes << 1 if hub.bits == 1 else rows.codes
    if hub.zeros:
        assert zeros is not None
        header.append(_bytes(zeros * 2 if hub.bits == 1 else zeros, count, hub.zeros))
    elif matrix.zero is not None:
        codes = codes + np.uint8((1 << hub.bits - 1) - matrix.zero)
    units = pack_planes(codes.reshape(n, -1, UNIT), hub.planes)
    if rows.steps is not None:
        units = np.concatenate([rows.steps.reshape(n, -1, 1), units], axis=2)
    return np.concatenate([*header, units.reshape(n, count, -1)], axis=2).reshape(n, -1)


def _ggml(hub: HubType, matrix: CodedMatrix, rows: CodedRows) -> np.ndarray:
    """Encode rows in GGML blocks of 32 columns."""
    n, columns = rows.codes.shape
    data = _nibbles(rows.codes) if hub.bits == 4 else rows.codes ^ 128
    return np.concatenate([_bytes(rows.scales, columns // 32, "F16"), data.reshape(n, columns // 32, -1)],
                          axis=2).reshape(n, -1)


def _bytes(values: np.ndarray, count: int, kind: str) -> np.ndarray:
    """float32 [n, m] repeated to `count` values and converted to a type, u8 [n, count, bytes]."""
    values = np.repeat(values, count // values.shape[1], axis=1)
    if kind == "BF16":
        stored: np.ndarray = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    else:
        stored = np.ascontiguousarray(values, {"U8": "u1", "F16": "<f2", "F32": "<f4"}[kind])
    return stored[..., None].view(np.uint8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack each 32 codes to 16 bytes: the first 16 in low nibbles, the others in high nibbles."""
    halves = codes.reshape(len(codes), -1, 2, 16)
    return halves[:, :, 0] | halves[:, :, 1] << 4


def _mxfp4(matrix: CodedMatrix, rows: CodedRows) -> np.ndarray:
    units = matrix.shape[-1] // 32
    scales = np.repeat(rows.scales, units // rows.scales.shape[1], axis=1)
    exponents = (np.frexp(scales)[1] + 126).astype(np.uint8)
    return np.concatenate([exponents[..., None], _nibbles(rows.codes)], axis=2).reshape(len(rows.codes), -1)


# GGML types with the same block structure.
_OF_GGML = (HubType("Q4_0", 4, 32, "F16"), HubType("Q8_0", 8, 32, "F16"))
