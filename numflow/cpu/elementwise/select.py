"""Ops that copy or look up rows: `select_rows`, `embed_position`, `embed_type`, `head_concat`."""

from numflow.cpu.runtime.kernel import POSITIONS, TYPES, Call, Code, slots
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.elementwise.select_kernels")
# b_step: columns from a head's part of b to the next head's part, 0 if all heads share b.
CONCAT = slots("header rows width y y_stride a a_stride b b_stride heads a_width b_width b_step")


def select_rows(step: Step, ctx) -> list[Call]:
    """x f32 [T, D] -> y f32 [R, D], the rows LOGIT_ROWS of x."""
    x, y = step.inputs[0], step.outputs[0]
    return [Call.of(step, _CODE.kernel("select_rows"), ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(x))]


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
    return [Call.named(step, _CODE.kernel("head_concat"), CONCAT, header=ctx.header, rows=ctx.rows(y), width=y.width,
                       **ctx.strided("y", y), **ctx.strided("a", a), **ctx.strided("b", b), heads=heads,
                       a_width=a_width, b_width=b_width, b_step=b_width if b.width == heads * b_width else 0)]


def _bind_table(step, ctx, index, offset):
    x, y = step.inputs[0], step.outputs[0]
    table = ctx.vector(step.weights["table"])
    return Call.of(step, _CODE.kernel("add_table_row"), ctx.header, ctx.rows(y), y.width, *ctx.view(y),
                   *ctx.view(x), index, table, offset)
