"""Products whose blocks own 32 neighbouring results, a unit of the next operand: what comes next is done right there.

residual, rms_norm   x = residual + factor * product is stored as it is, and x * weight as the operand of what follows.
                     The norm's scale is one number for a token and is taken late: the sum of squares of these 32 goes
                     to `squares`, and whoever multiplies with the operand scales its results (late_scales). The int8
                     codes of a unit do not depend on that scale.
act_mul              the block has the rows of gate and of up for its 32 columns.

For few tokens. A warp takes whole rows, one after the other, as the kernels of gemv.py and float_gemv.py do.
"""

import functools

from numflow.cuda.device.call import Call, Sizes, ceil
from numflow.cuda.device.device import Launch
from numflow.cuda.elementwise.act import gated
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    block_x,
    block_y,
    lane_index,
    load4,
    shuffle,
    shuffle_xor,
    store4,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.reduce import warp_sum
from numflow.cuda.lang.scalar import f32, i32, u16, u32
from numflow.cuda.linear.float_gemv import float_row_adder
from numflow.cuda.linear.gemv import TOKENS, late_scales, row_adder
from numflow.cuda.linear.linear import FEW, demands, uses_int8
from numflow.cuda.weights.layout import SCHEMES
from numflow.cuda.weights.operand import UNIT, put_int8
from numflow.cuda.weights.outliers import apart_args, outlier_adder
from numflow.cuda.weights.pack import PARTS
from numflow.ops import Step, param

WARPS = {"": 16, "gated": 8}  # of a block: gated ones have twice the rows, and there are more blocks


def into_norm(step: Step, ctx, add: Step, norm: Step, kind: str) -> list[Call]:
    """linear, add, rms_norm for few tokens. kind: of operand that the norm's readers want, "int8", "rows" or "both"."""
    (y,), (h,) = add.outputs, norm.outputs
    weight = ctx.vector(norm.weights["weight"]) if "weight" in norm.weights else None
    squares = ctx.squares(h)
    ends = (*ctx.view(y), *ctx.view(add.inputs[0]), param(add, "scale"), weight, int(weight is not None), 0.0, 0.0)
    return _bind(step, ctx, "", h, kind, squares, ends)


def into_act(step: Step, ctx, act: Step, kind: str) -> list[Call]:
    """linear of gate and up, act_mul for few tokens; kind as in into_norm."""
    (y,) = act.outputs
    ends = (*ctx.view(y), *ctx.view(y), 1.0, None, 0, param(act, "limit"), param(act, "alpha"))
    return _bind(step, ctx, param(act, "kind"), y, kind, None, ends)


def _bind(step: Step, ctx, gate: str, out, kind: str, squares, ends: tuple) -> list[Call]:
    """out: the view that becomes the operand."""
    (x,), field = step.inputs, ctx.rows(out)
    weight = ctx.matrix(step.weights["weight"])
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    int8, operand = uses_int8(weight, ctx.activations), ctx.operand(x, *demands(step, ctx)[0])
    to, aux = ctx.place(out, "int8") if kind != "rows" else (None, None)
    planes = [weight.parts.get(name) for name in ("codes" if weight.is_float else PARTS[0], *PARTS[1:])]
    late = ctx.lateness(x)
    args = (to, aux, *ctx.view(out), squares, *ends, operand.x, operand.aux, operand.pitch, *planes, bias,
            int(bias is not None), *late, ctx.batch.counts, field, out.width,
            weight.pitch if weight.is_float else weight.pitch // UNIT, *apart_args(weight, ctx.view(x)))

    def plan(sizes: Sizes) -> Launch:
        rows = sizes.rows[field]
        tile = next((t for t in TOKENS if t >= rows), FEW)
        chosen = unit_gemv(weight.kind, int8, tile, gate, kind, weight.outliers > 0)
        return Launch(chosen, (out.width // UNIT, ceil(rows, tile), 1), args)

    return [*operand.calls, Call(step, plan)]


@functools.cache
def unit_gemv(kind: str, int8: bool, tokens: int, gate: str, made: str, apart: bool = False) -> Kernel:
    """grid (N / 32, rows / tokens), N results. gate: activation of act_mul, "" for residual and norm. made: "int8",
    "rows" for float32, or "both". apart: as in linear_gemv.gemv."""
    halves, warps, codes, floats = 2 if gate else 1, WARPS["gated" if gate else ""], made != "rows", made != "int8"
    add_row = row_adder(kind, int8, tokens, 1) if kind in SCHEMES else float_row_adder(kind, tokens)
    sums, found = LocalArray(f32, tokens), SharedArray(f32, tokens * 32 * halves)
    finish, scales, add_apart = _finish(gate), late_scales(tokens), outlier_adder(tokens)
    lines, ending = 32 * halves, -(-tokens // 4) * 32  # threads that end the work: 8 for each token, whole warps

    @kernel(f"gemv_{kind}{'_int8' * int8}_{tokens}_{gate or 'norm'}_{made}{'_apart' * apart}", 32 * warps)
    def _gemv(to: u32.ptr, to_aux: f32.ptr, to_rows: f32.ptr, to_stride: u32, squares: f32.ptr, y: f32.ptr,
              y_stride: u32, residual: f32.ptr, residual_stride: u32, factor: f32, norm: f32.ptr, has_norm: u32,
              p: f32, q: f32, x: f32.ptr, x_aux: f32.ptr, x_pitch: u32, low: u32.ptr, high: u32.ptr, two: u32.ptr,
              one: u32.ptr, head: u16.ptr, above: u32.ptr, per_row: u32.ptr, bias: f32.ptr, has_bias: u32,
              late: f32.ptr, late_parts: u32, eps: f32, counts: i32.ptr, rows: u32, n: u32, units: u32,
              x_rows: f32.ptr, x_stride: u32, slots: u32.ptr, width: u32):
        thread, lane, line = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
        first, count, begin = u32(block_y() * tokens), u32(counts[rows]), u32(block_x() * 32)
        if first >= count:
            return
        acc, results, scale = sums(), found(), f32(1)
        if late_parts != 0:
            scale = scales(late, first, u32(count - first), late_parts, eps)
        while line < lines:
            place = u32(begin + line) if line < 32 else u32(n + begin + line - 32)  # up is behind gate
            for t in range(tokens):
                acc[t] = f32(0)
            word = u32(0)
            if apart:
                word = slots[place * width + lane] if lane < width else u32(0)
            add_row(acc, x, x_aux, x_pitch, low, high, two, one, head, above, per_row, place, lane, units, first,
                    count - first)
            if apart:
                add_apart(acc, word, x_rows, x_stride, slots, place * width, lane, 32, width, first, count - first)
            for t in range(tokens):
                total = warp_sum(acc[t]) * shuffle(scale, t * (32 // tokens))
                if lane == 0:
                    results[t * lines + line] = total + bias[place] if has_bias != 0 else total
            line = u32(line + warps)
        sync_block()
        if thread >= ending:
            return
        part, t = thread & u32(7), u32(thread >> u32(3))
        token, column, there = u32(first + t), u32(begin + 4 * part), t < tokens and first + t < count
        a, b, c, d = f32(0), f32(0), f32(0), f32(0)
        if there:
            a, b, c, d = finish(results, u32(t * lines + 4 * part), residual + token * residual_stride,
                                y + token * y_stride, column, factor, p, q)
        if not gate:
            square = (a * a + b * b) + (c * c + d * d)
            square += shuffle_xor(square, 1)
            square += shuffle_xor(square, 2)
            square += shuffle_xor(square, 4)
            if there and part == 0:
                squares[token * (n >> u32(5)) + block_x()] = square
            if has_norm != 0:
                e, f, g, h = load4(norm, column)
                a, b, c, d = a * e, b * f, c * g, d * h
        if codes:
            put_int8(to, to_aux, n >> u32(5), token, column if there else n, a, b, c, d)
        if floats and there:
            store4(to_rows + token * to_stride, column, a, b, c, d)

    return _gemv


@functools.cache
def _finish(gate: str) -> DeviceFunction:
    """finish(results, at, residual, y, column, factor, p, q): 4 columns from the results at `at`, of one token."""
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
