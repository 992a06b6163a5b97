"""A quantised matrix, whatever file it comes from, and its rows as a tensor type has them.

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])      or scale[n, g] * table[code[n, k]]

where g is the group of column k. The type is one that holds these numbers exactly (numflow.quant.hub_types), else F32.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from numflow.formats.checkpoint import OrderedTensor, Tensor
from numflow.formats.mapped import release_pages
from numflow.formats.types import tensor_type
from numflow.quant.hub_types import HUB_TYPES, TABLES, HubType

_AT_ONCE = 1 << 20  # weights that are made at a time
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


@dataclass(frozen=True)
class CodedRows:
    """Some rows: codes u8 [n, K], scales f32 [n, groups], zeros f32 [n, groups] or None for the matrix's own.

    steps: 8-bit floats e4m3 u8 [n, K / 16] that scales are multiplied with.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    steps: np.ndarray | None = None


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix [..., N, K], its leading dimensions one after the other.

    rows:   of a range of rows, on demand.
    bits:   of a code. scale: type that all scales fit, "E8M0" for powers of two, "F8_E4M3" where rows have steps.
    group:  columns that share a scale, where groups are side by side.
    zero:   the code that stands for 0, None where rows have zeros of their own or a table has the numbers.
    zero_type: type that zeros of rows fit, "" for the one of scales.
    table:  numbers of the codes. book: its name, such as "e2m1", where it is one that types have.
    order:  the group of each column, where columns of a group lie apart; else None. As a tensor such a matrix is
            float32, and has its columns in the order of groups beside that.
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
    zero_type: str = ""
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
        """The same with columns of a group side by side, where these are equally many and it saves bits."""
        if self.order is None:
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
    """The tensor type, and the function that makes its rows."""
    if matrix.scale == "F8_E4M3" and matrix.shape[-1] % 64 == 0:
        hub = HUB_TYPES["E2M1_64" if matrix.shape[-1] % 128 else "E2M1_128"]
        return hub.name, functools.partial(_blocks, hub)
    if matrix.order is None and matrix.shape[-1] % 32 == 0 and matrix.group % 32 == 0:
        if (matrix.book, matrix.scale) == ("e2m1", "E8M0"):
            return "MXFP4", _mxfp4
        whole = 64 if matrix.shape[-1] % 64 == 0 and matrix.group % 64 == 0 else 32
        for hub in _fitting(matrix):
            if whole % hub.block == 0:
                return hub.name, functools.partial(_blocks, hub)
    return "F32", lambda matrix, rows: floats(matrix, rows).view(np.uint8)


def _fitting(matrix: CodedMatrix) -> Iterable[HubType]:
    """Types that hold the numbers exactly, smallest first, whatever their block."""
    bits = 4 if matrix.bits <= 4 else 8
    for hub in (*HUB_TYPES.values(), *_OF_GGML):
        if hub.by_16:
            fits = False
        elif matrix.table is not None or hub.table:
            fits = bool(hub.table) and matrix.book == hub.table
        elif matrix.zero is None:
            fits = hub.zero and hub.bits == bits and hub.scale == matrix.scale and matrix.zero_type in ("", hub.scale)
        else:
            fits = not hub.zero and hub.scale == matrix.scale and (hub.bits == bits or hub.scale == "F32")
        if fits:
            yield hub


def floats(matrix: CodedMatrix, rows: CodedRows) -> np.ndarray:
    """Weights of some rows, float32 [n, K]."""
    columns, order = matrix.shape[-1], None if matrix.order is None else matrix.order()

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
        numbers *= spread(rows.scales if rows.steps is None else TABLES["e4m3"][rows.steps] * rows.scales)
    return numbers


def _blocks(hub: HubType, matrix: CodedMatrix, rows: CodedRows) -> np.ndarray:
    """Rows as blocks of a type: a header, then codes."""
    count, columns = rows.codes.shape
    shape = count, columns // hub.block
    zeros = np.zeros_like(rows.scales) if rows.zeros is None else rows.zeros
    header = [_bytes(np.repeat(values, shape[1] // values.shape[1], axis=1), hub.scale)
              for values in (rows.scales, zeros)[:2 if hub.zero else 1]]
    if rows.steps is not None:
        header[0] = _bytes(np.repeat(rows.scales / 2, shape[1], axis=1), "F32")  # numbers of codes are doubled
        header.append(rows.steps.reshape(*shape, -1))
    codes = rows.codes
    if matrix.zero is not None and not hub.zero:  # codes that stand for zero are 8 and 128 in types without zeros
        codes = codes + np.uint8((1 << hub.bits - 1) - matrix.zero)
    data = _nibbles(codes) if hub.bits == 4 else codes if hub.zero or hub.table else codes ^ 128
    return np.concatenate([*header, data.reshape(*shape, -1)], axis=2).reshape(count, -1)


def _bytes(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 [n, m] as numbers of a type that holds them, u8 [n, m, bytes]."""
    if kind == "BF16":
        stored: np.ndarray = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    else:
        stored = np.ascontiguousarray(values, {"F16": "<f2", "F32": "<f4"}[kind])
    return stored[..., None].view(np.uint8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Each 32 codes as 16 bytes: the first 16 in the low nibbles, the others in the high ones."""
    halves = codes.reshape(len(codes), -1, 2, 16)
    return halves[:, :, 0] | halves[:, :, 1] << 4


def _mxfp4(matrix: CodedMatrix, rows: CodedRows) -> np.ndarray:
    units = matrix.shape[-1] // 32
    scales = np.repeat(rows.scales, units // rows.scales.shape[1], axis=1)
    exponents = (np.frexp(scales)[1] + 126).astype(np.uint8)
    return np.concatenate([exponents[..., None], _nibbles(rows.codes)], axis=2).reshape(len(rows.codes), -1)


# Types of GGML's that have blocks of the same form.
_OF_GGML = (HubType("Q4_0", "b4_scale", 4, 32, "F16"), HubType("Q8_0", "b8_scale", 8, 32, "F16"))
