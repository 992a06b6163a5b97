"""Views as the right-hand operand of a matrix: rows on 16-byte boundaries, zeros up to a whole number of units."""

import functools
from dataclasses import dataclass

from numflow.cuda.call import Call, ceil, per_row
from numflow.cuda.device import Ref
from numflow.cuda.intrinsics import block_x, block_y, thread_index
from numflow.cuda.kernel import Kernel, kernel
from numflow.cuda.scalar import f32, i32, u32

UNIT = 32  # columns
THREADS = 128


@dataclass(frozen=True)
class Operand:
    """x, with `pitch` columns in a row. calls: what makes it; empty if an earlier step has."""

    x: Ref
    pitch: int
    calls: tuple[Call, ...]


def padded(columns: int) -> int:
    """Columns up to whole units."""
    return ceil(columns, UNIT) * UNIT


def operand_bytes(rows: int, columns: int, kind: str) -> int:
    """Bytes of the operand of `rows` rows."""
    return rows * padded(columns) * {"f32": 4}[kind]


def bind_operand(ctx, view, kind: str, to: Ref) -> Call:
    """The call that makes the operand at `to`."""
    pitch = padded(view.width)
    return per_row(None, operand_kernel(kind), ctx.rows(view), ceil(pitch, THREADS), to, pitch, *ctx.view(view),
                   ctx.batch.counts, ctx.rows(view), view.width)


@functools.cache
def operand_kernel(kind: str) -> Kernel:
    """One thread for each column."""

    @kernel(f"operand_{kind}", THREADS)
    def _operand(y: f32.ptr, pitch: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32):
        row, column = block_y(), block_x() * 128 + thread_index()
        if row < counts[rows] and column < pitch:
            y[row * pitch + column] = x[row * x_stride + column] if column < width else f32(0)

    return _operand
