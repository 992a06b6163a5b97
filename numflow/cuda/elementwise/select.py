"""Gathered rows and concatenated heads (ops `select_rows`, `head_concat`)."""

from numflow.cuda.device.call import N_LOGIT_ROWS, Call, ceil, per_row
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.ops import Step, param

THREADS = 128


def select_rows(step: Step, ctx) -> list[Call]:
    """x f32 [T, D] -> y f32 [R, D] = x[logit_rows]."""
    (x,), (y,) = step.inputs, step.outputs
    return [per_row(step, _select_rows, N_LOGIT_ROWS, ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x),
                    ctx.batch.ref("logit_rows"), ctx.batch.counts, y.width)]


def head_concat(step: Step, ctx) -> list[Call]:
    """a f32 [T, H * A], b f32 [T, H * B] or shared [T, B] -> y f32 [T, H * (A + B)]."""
    (a, b), (y,), heads = step.inputs, step.outputs, param(step, "heads")
    first, size = a.width // heads, y.width // heads
    b_step = 0 if y.width == a.width + heads * b.width else size - first
    return [per_row(step, _head_concat, ctx.rows(y), ceil(y.width, THREADS), *ctx.view(y), *ctx.view(a), *ctx.view(b),
                    ctx.batch.counts, ctx.rows(y), y.width, first, size, b_step)]


@kernel("select_rows", THREADS)
def _select_rows(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, logit_rows: i32.ptr, counts: i32.ptr,
                 width: u32):
    row, column = block_x(), block_y() * 128 + thread_index()
    if row < counts[N_LOGIT_ROWS] and column < width:
        y[row * y_stride + column] = x[logit_rows[row] * x_stride + column]


@kernel("head_concat", THREADS)
def _head_concat(y: f32.ptr, y_stride: u32, a: f32.ptr, a_stride: u32, b: f32.ptr, b_stride: u32, counts: i32.ptr,
                 rows: u32, width: u32, first: u32, size: u32, b_step: u32):
    """b_step: columns from one head of b to the next, 0 if all heads share b."""
    row, column = block_x(), u32(block_y() * 128 + thread_index())
    if row >= counts[rows] or column >= width:
        return
    head, head_column = u32(column // size), u32(column % size)
    if head_column < first:
        y[row * y_stride + column] = a[row * a_stride + head * first + head_column]
    else:
        y[row * y_stride + column] = b[row * b_stride + head * b_step + head_column - first]
