"""Matrix-vector kernels for float matrices and few tokens: one warp for each row of the matrix, 16 bytes a lane.

x f32 [T, pitch], zero beyond K; weight f32, f16 or bf16 [N, pitch]. A row is read once for up to 8 tokens. The loads of
a warp are coalesced.
"""

import functools

from numflow.cuda.lang.arithmetic import float_of, high_half, low_half
from numflow.cuda.lang.intrinsic import LocalArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    block_x,
    block_y,
    lane_index,
    load4,
    prefetch,
    shuffle,
    stream1,
    stream4,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import warp_sum
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear.gemv import late_scales
from numflow.cuda.linear.parameters import Bias, Late, Residual, Shape


@device
def dot4(x, at, a, b, c, d):
    """Dot product of 4 values with x[at ...]."""
    x0, x1, x2, x3 = load4(x, at)
    return a * x0 + b * x1 + c * x2 + d * x3


@device
def low_bfloat(word):
    """f32 of the lower bfloat16 of a word."""
    return float_of(u32(word << u32(16)))


@device
def high_bfloat(word):
    """f32 of the upper bfloat16 of a word."""
    return float_of(u32(word & u32(0xFFFF0000)))


@functools.cache
def float_gemv(kind: str, tokens: int, routed: bool) -> Kernel:
    """Grid (N / 4, rows / tokens). Parameters as in gemv.gemv."""
    sums, add_row, scales = LocalArray(f32, tokens), float_row_adder(kind, tokens), late_scales(tokens)
    ask = float_row_prefetch(kind, tokens)

    @kernel(f"gemv_{kind}_{tokens}{'_routed' * routed}", 128)
    def _gemv(y: Rows, x: f32.ptr, x_pitch: u32, weight: u32.ptr, bias: Bias, ids: i32.ptr, shape: Shape, routes: u32,
              residual: Residual, late: Late):
        lane, row = lane_index(), u32(block_x() * 4 + (thread_index() >> u32(5)))
        first, count = u32(block_y() * tokens), u32(stream1(shape.counts, shape.field))
        if not routed and row < shape.n:
            ask(weight, weight, weight, weight, weight, weight, weight, row, u32(lane), shape.units)
        after_previous()
        if row >= shape.n or first >= count:
            return
        place, source = row, first
        if routed:
            if ids[first] < 0:  # an expert of another device
                if lane == 0:
                    y.data[first * y.stride + row] = f32(0)
                return
            place, source = u32(ids[first] * shape.n + row), u32(first // routes)
        acc = sums()
        for t in range(tokens):
            acc[t] = f32(0)
        add_row(acc, x, x, x_pitch, weight, weight, weight, weight, weight, weight, weight, place, u32(lane),
                shape.units, source, count - first)
        scale = f32(1)
        if late.parts != 0:
            scale = scales(late.squares, first, u32(count - first), late.parts, late.eps)
        for t in range(tokens):
            total = warp_sum(acc[t]) * shuffle(scale, t * (32 // tokens))
            if lane == 0 and first + t < count:
                if bias.present != 0:
                    total += bias.data[place]
                if residual.present != 0:
                    total = residual.data[(first + t) * residual.stride + row] + residual.factor * total
                y.data[(first + t) * y.stride + row] = total

    return _gemv


@functools.cache
def float_row_adder(kind: str, tokens: int) -> DeviceFunction:
    """add_row as in gemv.row_adder, with `unit` for the lane and `units` for the padded columns of a row.

    `low` is the matrix; the other planes are not used. For one token, a lane loads 64 bytes of the row before it uses
    the first 16, to have more loads in flight.
    """
    full, add = kind == "f32", _adder(kind)
    columns = 4 if full else 8
    step, per_word = 32 * columns, 0 if full else 1

    @device
    def add_row(acc, x, aux, x_pitch, low, high, two, one, head, above, per_row, place, unit, units, source, left):
        k = u32(unit * columns)
        words = low + place * (units >> u32(per_word))
        if tokens == 1:
            begin = u32(source * x_pitch)
            while k + 3 * step < units:
                a, b, c, d = stream4(words, u32(k >> u32(per_word)))
                e, f, g, h = stream4(words, u32((k + step) >> u32(per_word)))
                i, j, r, s = stream4(words, u32((k + 2 * step) >> u32(per_word)))
                n, o, p, q = stream4(words, u32((k + 3 * step) >> u32(per_word)))
                acc[0] = add(acc[0], x, u32(begin + k), a, b, c, d)
                acc[0] = add(acc[0], x, u32(begin + k + step), e, f, g, h)
                acc[0] = add(acc[0], x, u32(begin + k + 2 * step), i, j, r, s)
                acc[0] = add(acc[0], x, u32(begin + k + 3 * step), n, o, p, q)
                k = u32(k + 4 * step)
        while k < units:
            a, b, c, d = stream4(words, u32(k >> u32(per_word)))
            for t in range(tokens):
                if tokens == 1 or t < left:
                    acc[t] = add(acc[t], x, u32((source + t) * x_pitch + k), a, b, c, d)
            k = u32(k + step)

    return add_row


@functools.cache
def float_row_prefetch(kind: str, tokens: int) -> DeviceFunction:
    """ask(planes .., place, unit, units) as in gemv.row_prefetch, for a float matrix."""
    columns, per_word = (4, 0) if kind == "f32" else (8, 1)
    count = 4 if tokens == 1 else 1

    @device
    def ask(low, high, two, one, head, above, per_row, place, unit, units):
        words = low + place * (units >> u32(per_word))
        for i in range(4):
            k = u32((unit + 32 * i) * columns)
            if i < count and k < units:
                prefetch(words, u32(k >> u32(per_word)))

    return ask


@functools.cache
def _adder(kind: str) -> DeviceFunction:
    """add(total, x, at, a, b, c, d): total plus the dot product of 16 bytes of a row with x[at ...]."""
    low_of, high_of = (low_half, high_half) if kind == "f16" else (low_bfloat, high_bfloat)

    @device
    def add_floats(total, x, at, a, b, c, d):
        return total + dot4(x, at, float_of(a), float_of(b), float_of(c), float_of(d))

    @device
    def add_halves(total, x, at, a, b, c, d):
        total += dot4(x, at, low_of(a), high_of(a), low_of(b), high_of(b))
        return total + dot4(x, u32(at + 4), low_of(c), high_of(c), low_of(d), high_of(d))

    return add_floats if kind == "f32" else add_halves
