"""Rows of tables: token, position and token-type embeddings (ops `embed`, `embed_position`, `embed_type`)."""

from numflow.cuda.call import N_TOKENS, Call, ceil, per_row
from numflow.cuda.intrinsics import block_x, block_y, thread_index
from numflow.cuda.kernel import kernel
from numflow.cuda.scalar import f32, i32, u32
from numflow.ops import Step, param

THREADS = 128


def embed(step: Step, ctx) -> list[Call]:
    """table [V, D] -> y f32 [T, D]."""
    table, y = ctx.table(step.weights["table"]), step.outputs[0]
    return [per_row(step, _embed, N_TOKENS, ceil(y.width, THREADS), *ctx.view(y), table, ctx.batch.ref("tokens"),
                    ctx.batch.counts, y.width, param(step, "scale"))]


def embed_position(step: Step, ctx) -> list[Call]:
    """x f32 [T, D], table [P, D] -> y f32 [T, D]."""
    return _add_rows(step, ctx, "positions", param(step, "offset"))


def embed_type(step: Step, ctx) -> list[Call]:
    """x f32 [T, D], table [types, D] -> y f32 [T, D]."""
    return _add_rows(step, ctx, "types", 0)


def _add_rows(step: Step, ctx, indices: str, offset: int) -> list[Call]:
    (x,), (y,) = step.inputs, step.outputs
    return [per_row(step, _add_row, N_TOKENS, ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x),
                    ctx.vector(step.weights["table"]), ctx.batch.ref(indices), ctx.batch.counts, y.width, offset)]


@kernel("embed_f32", THREADS)
def _embed(y: f32.ptr, y_stride: u32, table: f32.ptr, tokens: i32.ptr, counts: i32.ptr, width: u32, scale: f32):
    t, column = block_y(), block_x() * 128 + thread_index()
    if t < counts[N_TOKENS] and column < width:
        y[t * y_stride + column] = table[tokens[t] * width + column] * scale


@kernel("embed_add", THREADS)
def _add_row(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, table: f32.ptr, indices: i32.ptr, counts: i32.ptr,
             width: u32, offset: u32):
    t, column = block_y(), block_x() * 128 + thread_index()
    if t < counts[N_TOKENS] and column < width:
        y[t * y_stride + column] = x[t * x_stride + column] + table[(indices[t] + offset) * width + column]
