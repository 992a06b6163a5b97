"""Ops that move or look up rows: `select_rows`, `embed_position`, `embed_type`, `head_concat`."""

import numpy as np

from numflow.cpu.runtime.kernel import POSITIONS, TYPES, Call, Code, Kernel, slots
from numflow.ops import Step, View, param

_CODE = Code("numflow.cpu.elementwise.select_kernels")
PICK = slots("header rows width x x_stride y goes_on")
# b_step: columns from one head's part of b to the next one's, 0 where all heads share b.
CONCAT = slots("header rows width y y_stride a a_stride b b_stride heads a_width b_width b_step")


def select_rows(step: Step, ctx) -> list[Call]:
    """x f32 [T, D] -> y f32 [R, D], its rows LOGIT_ROWS."""
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


def picking() -> Kernel:
    """The kernel of `pick_tokens`."""
    return _CODE.kernel("pick_tokens")


def pick_tokens(ctx, logits: View, y: np.ndarray, goes_on: bool) -> Call:
    """logits f32 [R, V] -> y i32 [R], the likeliest token of each row; goes_on: these are the batch's next ones."""
    return Call.named(None, picking(), PICK, header=ctx.header, rows=ctx.rows(logits),
                      width=logits.width, **ctx.strided("x", logits), y=y, goes_on=int(goes_on))


def _bind_table(step, ctx, index, offset):
    x, y = step.inputs[0], step.outputs[0]
    table = ctx.vector(step.weights["table"])
    return Call.of(step, _CODE.kernel("add_table_row"), ctx.header, ctx.rows(y), y.width, *ctx.view(y),
                   *ctx.view(x), index, table, offset)
