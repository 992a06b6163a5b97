"""Ops that move or look up rows: `select_rows`, `embed_position`, `embed_type`, `head_concat`."""

from numflow.cpu.kernel import LOGIT_ROWS, POSITIONS, TYPES, Call, i32_ptr, i64, kernel, share
from numflow.cpu.simd import inline
from numflow.cpu.simd_float import load_part, store_part
from numflow.ops import Step, param

HEADER, ROWS, WIDTH, Y, Y_STRIDE, X, X_STRIDE, INDEX, TABLE, OFFSET = range(10)
B, B_STRIDE, HEADS, A_WIDTH, B_WIDTH, B_STEP = range(7, 13)


def select_rows(step: Step, ctx) -> list[Call]:
    """x f32 [T, D] -> y f32 [R, D], its rows LOGIT_ROWS."""
    x, y = step.inputs[0], step.outputs[0]
    return [Call.of(step, _select_rows, ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(x))]


def embed_position(step: Step, ctx) -> list[Call]:
    """x, y f32 [T, D]; table f32 [n, D], looked up by position + offset."""
    return [_bind_table(step, ctx, POSITIONS, param(step, "offset"))]


def embed_type(step: Step, ctx) -> list[Call]:
    """x, y f32 [T, D]; table f32 [n, D], looked up by token type."""
    return [_bind_table(step, ctx, TYPES, 0)]


def head_concat(step: Step, ctx) -> list[Call]:
    """a f32 [T, H*A], b f32 [T, H*B] or [T, B] for all heads -> y f32 [T, H*(A + B)], another buffer."""
    (a, b), y, heads = step.inputs, step.outputs[0], param(step, "heads")
    a_width = a.width // heads
    b_width = y.width // heads - a_width
    return [Call.of(step, _head_concat, ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(a), *ctx.view(b),
                    heads, a_width, b_width, b_width if b.width == heads * b_width else 0)]


def _bind_table(step, ctx, index, offset):
    x, y = step.inputs[0], step.outputs[0]
    table = ctx.vector(step.weights["table"])
    return Call.of(step, _add_table_row, ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(x), index, table,
                   offset)


@inline
def _copy(x, y, count):
    for i in range(0, count, 16):
        store_part(y + 4 * i, load_part(x + 4 * i, count - i), count - i)


@kernel
def _select_rows(args, thread, n_threads):
    rows = i32_ptr(i64(i64(args, HEADER), LOGIT_ROWS))
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for r in range(begin, end):
        x = i64(args, X) + 4 * rows[r] * i64(args, X_STRIDE)
        _copy(x, i64(args, Y) + 4 * r * i64(args, Y_STRIDE), i64(args, WIDTH))


@kernel
def _add_table_row(args, thread, n_threads):
    """y = x + table[index of the row + offset]; which index is a field of the header."""
    width, index = i64(args, WIDTH), i32_ptr(i64(i64(args, HEADER), i64(args, INDEX)))
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for t in range(begin, end):
        x, y = i64(args, X) + 4 * t * i64(args, X_STRIDE), i64(args, Y) + 4 * t * i64(args, Y_STRIDE)
        table = i64(args, TABLE) + 4 * width * (index[t] + i64(args, OFFSET))
        for i in range(0, width, 16):
            store_part(y + 4 * i, load_part(x + 4 * i, width - i) + load_part(table + 4 * i, width - i), width - i)


@kernel
def _head_concat(args, thread, n_threads):
    """Items: rows times heads. B_STEP is 0 where all heads share b."""
    heads, a_width, b_width = i64(args, HEADS), i64(args, A_WIDTH), i64(args, B_WIDTH)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)) * heads, thread, n_threads)
    for item in range(begin, end):
        t, head = item // heads, item % heads
        y = i64(args, Y) + 4 * (t * i64(args, Y_STRIDE) + head * (a_width + b_width))
        _copy(i64(args, X) + 4 * (t * i64(args, X_STRIDE) + head * a_width), y, a_width)
        _copy(i64(args, B) + 4 * (t * i64(args, B_STRIDE) + head * i64(args, B_STEP)), y + 4 * a_width, b_width)
