"""Fused matrix-vector kernels whose blocks compute 32 adjacent results, one unit of the next operand.

residual, rms_norm   x = residual + factor * product is written as float32, and x * weight as the next operand. The
                     norm's scale is one value for each token, and is applied later: each block writes the sum of
                     squares of its 32 results to `squares`, and the kernel that multiplies the operand scales its
                     results (late_scales). The int8 codes of a unit do not depend on that scale.
act_mul              the block has the rows of gate and of up for its 32 columns.

For few tokens. A warp computes whole rows, one after the other, as in gemv.py and float_gemv.py.
"""

import functools
from typing import NamedTuple

from numflow.cuda.device.call import Call, Prepared, Sizes, ceil
from numflow.cuda.device.device import Launch
from numflow.cuda.elementwise.act import gated
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    block_x,
    block_y,
    lane_index,
    load4,
    shuffle,
    shuffle_xor,
    store4,
    stream1,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import warp_sum
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.linear.float_gemv import float_row_adder, float_row_prefetch
from numflow.cuda.linear.gemv import TOKENS, late_scales, row_adder, row_prefetch
from numflow.cuda.linear.linear import FEW, demands, uses_int8
from numflow.cuda.linear.parameters import (
    Apart,
    Bias,
    Late,
    Planes,
    Shape,
    apart_of,
    bias_of,
    planes_of,
    units_of,
)
from numflow.cuda.weights.layout import SCHEMES
from numflow.cuda.weights.operand import UNIT, put_int8
from numflow.cuda.weights.outliers import outlier_adder
from numflow.ops import Step, param

WARPS = {"": 16, "gated": 8}  # warps of a block; gated blocks have twice the rows, and the grid has more blocks


class Activations(NamedTuple):
    """The operand of a product (weights/operand.py). pitch: elements from one float32 row to the next."""

    data: f32.ptr
    aux: f32.ptr
    pitch: u32


class Epilogue(NamedTuple):
    """The epilogue: y = residual + factor * product and a norm's weight, or an activation with parameters p and q."""

    y: f32.ptr
    y_stride: u32
    residual: f32.ptr
    residual_stride: u32
    factor: f32
    norm: f32.ptr
    has_norm: u32
    p: f32
    q: f32


def into_norm(step: Step, ctx, add: Step, norm: Step, kind: str, late: float | None) -> list[Call]:
    """Fused linear, add and rms_norm for few tokens.

    kind: operand that the norm's readers need, "int8", "rows" or "both". late: as in linear.linear.
    """
    (y,), (h,) = add.outputs, norm.outputs
    weight = ctx.vector(norm.weights["weight"]) if "weight" in norm.weights else None
    squares = ctx.squares(h)
    ends = Epilogue(*ctx.view(y), *ctx.view(add.inputs[0]), factor=param(add, "scale"), norm=weight,
                    has_norm=int(weight is not None), p=0.0, q=0.0)
    return _bind(step, ctx, "", h, kind, squares, ends, late)


def into_act(step: Step, ctx, act: Step, kind: str, late: float | None) -> list[Call]:
    """Fused linear of gate and up, and act_mul, for few tokens. kind, late: as in into_norm."""
    (y,) = act.outputs
    ends = Epilogue(*ctx.view(y), *ctx.view(y), factor=1.0, norm=None, has_norm=0, p=param(act, "limit"),
                    q=param(act, "alpha"))
    return _bind(step, ctx, param(act, "kind"), y, kind, None, ends, late)


def _bind(step: Step, ctx, gate: str, out, kind: str, squares, ends: Epilogue, late: float | None) -> list[Call]:
    """The calls of a fused product. out: the view that becomes the operand."""
    (x,), field = step.inputs, ctx.rows(out)
    weight = ctx.matrix(step.weights["weight"])
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    int8, operand = uses_int8(weight, ctx.activations), ctx.operand(x, *demands(weight, ctx.activations)[0])
    to, aux = ctx.place(out, "int8") if kind != "rows" else (None, None)
    shape = Shape(ctx.batch.counts, field=field, n=out.width, units=units_of(weight))
    args = (to, aux, ctx.view(out), squares, ends, Activations(operand.x, operand.aux, operand.pitch),
            planes_of(weight), bias_of(bias), ctx.late(x, late), shape, apart_of(weight, ctx.view(x)))

    def plan(sizes: Sizes) -> Launch:
        rows = sizes.rows[field]
        tile = next((t for t in TOKENS if t >= rows), FEW)
        chosen = unit_gemv(weight.kind, int8, tile, gate, kind, weight.outliers > 0)
        return Launch(chosen, (out.width // UNIT, ceil(rows, tile), 1), args)

    return [*operand.calls, Call(step, plan, leaves=None if kind == "rows" else Prepared(out, "int8", "few"))]


@functools.cache
def unit_gemv(kind: str, int8: bool, tokens: int, gate: str, made: str, apart: bool = False) -> Kernel:
    """Grid (N / 32, rows / tokens) for N results.

    gate: activation of act_mul, "" for residual and norm. made: the operand to write: "int8", "rows" for float32, or
    "both". apart: as in gemv.gemv.
    """
    halves, warps, codes, floats = 2 if gate else 1, WARPS["gated" if gate else ""], made != "rows", made != "int8"
    add_row = row_adder(kind, int8, tokens, 1) if kind in SCHEMES else float_row_adder(kind, tokens)
    ask = row_prefetch(kind, tokens, 1) if kind in SCHEMES else float_row_prefetch(kind, tokens)
    sums, found = LocalArray(f32, tokens), SharedArray(f32, tokens * 32 * halves)
    finish, scales, add_apart = _finish(gate), late_scales(tokens), outlier_adder(tokens)
    lines, ending = 32 * halves, -(-tokens // 4) * 32  # threads that end the work: 8 for each token, whole warps

    @kernel(f"gemv_{kind}{'_int8' * int8}_{tokens}_{gate or 'norm'}_{made}{'_apart' * apart}", 32 * warps,
            blocks=3 if gate and int8 and tokens == 1 and not apart and SCHEMES[kind].bits < 7 else 0)
    def _gemv(to: u32.ptr, to_aux: f32.ptr, rows: Rows, squares: f32.ptr, ends: Epilogue, x: Activations,
              planes: Planes, bias: Bias, late: Late, shape: Shape, outliers: Apart):
        # Block indices: 32 results and the tokens.
        thread, lane, line = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
        first, count, begin = u32(block_y() * tokens), u32(stream1(shape.counts, shape.field)), u32(block_x() * 32)
        ask(*planes, u32(begin + line), lane, shape.units)
        after_previous()
        if first >= count:
            return
        acc, results, scale = sums(), found(), f32(1)
        # Dot products: each warp computes whole rows, one after the other.
        while line < lines:
            place = u32(begin + line) if line < 32 else u32(shape.n + begin + line - 32)  # up is behind gate
            for t in range(tokens):
                acc[t] = f32(0)
            word = u32(0)
            # Load the first outlier early; multiply outliers after the codes.
            if apart:
                word = outliers.slots[place * outliers.width + lane] if lane < outliers.width else u32(0)
            add_row(acc, x.data, x.aux, x.pitch, *planes, place, lane, shape.units, first, count - first)
            if apart:
                add_apart(acc, word, outliers.x, outliers.x_stride, outliers.slots, place * outliers.width, lane, 32,
                          outliers.width, first, count - first)
            # The scale of a norm that this product applies, computed once. Write the row's results to shared memory.
            if late.parts != 0 and line < warps:
                scale = scales(late.squares, first, u32(count - first), late.parts, late.eps)
            for t in range(tokens):
                total = warp_sum(acc[t]) * shuffle(scale, t * (32 // tokens))
                if lane == 0:
                    results[t * lines + line] = total + bias.data[place] if bias.present != 0 else total
            line = u32(line + warps)
        # Barrier, then the epilogue: 8 threads for each token, 4 columns each.
        sync_block()
        if thread >= ending:
            return
        part, t = thread & u32(7), u32(thread >> u32(3))
        token, column, there = u32(first + t), u32(begin + 4 * part), t < tokens and first + t < count
        a, b, c, d = f32(0), f32(0), f32(0), f32(0)
        if there:
            a, b, c, d = finish(results, u32(t * lines + 4 * part), ends.residual + token * ends.residual_stride,
                                ends.y + token * ends.y_stride, column, ends.factor, ends.p, ends.q)
        # Sums of squares for a norm whose scale the readers apply.
        if not gate:
            square = (a * a + b * b) + (c * c + d * d)
            square += shuffle_xor(square, 1)
            square += shuffle_xor(square, 2)
            square += shuffle_xor(square, 4)
            if there and part == 0:
                squares[token * (shape.n >> u32(5)) + block_x()] = square
            if ends.has_norm != 0:
                e, f, g, h = load4(ends.norm, column)
                a, b, c, d = a * e, b * f, c * g, d * h
        # Write the operand of the next product.
        if codes:
            put_int8(to, to_aux, shape.n >> u32(5), token, column if there else shape.n, a, b, c, d)
        if floats and there:
            store4(rows.data + token * rows.stride, column, a, b, c, d)

    return _gemv


@functools.cache
def _finish(gate: str) -> DeviceFunction:
    """finish(results, at, residual, y, column, factor, p, q): the epilogue for 4 columns of one token."""
    function = gated(gate) if gate else None

    @device
    def of_gate(results, at, residual, y, column, factor, p, q):
        a, b, c, d = load4(results, at)
        e, f, g, h = load4(results, u32(at + 32))
        return function(a, e, p, q), function(b, f, p, q), function(c, g, p, q), function(d, h, p, q)

    @device
    def of_residual(results, at, residual, y, column, factor, p, q):
        a, b, c, d = load4(results, at)
        e, f, g, h = load4(residual, column)
        a, b, c, d = e + factor * a, f + factor * b, g + factor * c, h + factor * d
        store4(y, column, a, b, c, d)
        return a, b, c, d

    return of_gate if gate else of_residual
