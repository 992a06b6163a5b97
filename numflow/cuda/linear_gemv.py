"""Products of quantised matrices with a few tokens: one warp for each row, a lane for each unit of 32 columns.

int8: x as made by operand.py; a unit is 8 times dp4a, then y += A * scale * dot + C * sum.
f32:  x as it is; codes become floats.
The row is read once for up to 8 tokens.
"""

import functools

from numflow.cuda.intrinsics import (
    LocalArray,
    as_words,
    block_x,
    block_y,
    dp4a_us,
    float_of,
    lane_index,
    load4,
    stream4,
    thread_index,
)
from numflow.cuda.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.layout import BY_16, PAIR, SCHEMES, Scheme
from numflow.cuda.linear_codes import header, pair_header, reader, sevenths
from numflow.cuda.reduce import warp_sum
from numflow.cuda.scalar import f32, i32, u16, u32

ROWS = 4               # of the matrix, of a block: one each warp
TOKENS = (1, 2, 4, 8)  # that one pass over the matrix serves


@functools.cache
def gemv(kind: str, int8: bool, tokens: int, routed: bool) -> Kernel:
    """grid (N / 4, rows / tokens). routed: `ids` names the matrix of each row of y, x has a row for `routes` of them."""
    scheme = SCHEMES[kind]
    sums, codes = LocalArray(f32, tokens), LocalArray(u32, 8)
    add = (_add_pairs if scheme.header == PAIR else _add_int8(scheme)) if int8 else _add_f32(scheme)
    read, by_row = reader(scheme), "row" in scheme.parts
    paired, head_of = scheme.header == PAIR, header(scheme)
    split = int8 and paired

    @kernel(f"gemv_{kind}_{'int8' if int8 else 'f32'}_{tokens}{'_routed' * routed}", 128)
    def _gemv(y: f32.ptr, y_stride: u32, x: f32.ptr, aux: f32.ptr, low: u32.ptr, high: u32.ptr, two: u32.ptr,
              one: u32.ptr, head: u16.ptr, above: u32.ptr, per_row: u32.ptr, bias: f32.ptr, has_bias: u32,
              ids: i32.ptr, counts: i32.ptr, rows: u32, n: u32, units: u32, routes: u32):
        lane, row = lane_index(), u32(block_x() * 4 + (thread_index() >> u32(5)))
        first, count = u32(block_y() * tokens), u32(counts[rows])
        if row >= n or first >= count:
            return
        place, source = row, first
        if routed:
            place, source = u32(ids[first] * n + row), u32(first // routes)
        base, step, z, dz = u32(0), u32(0), f32(0), f32(0)
        if by_row:
            base, step, z_bits, dz_bits = stream4(per_row, u32(4 * place))
            z, dz = float_of(z_bits), float_of(dz_bits)
        acc, words = sums(), codes()
        for t in range(tokens):
            acc[t] = f32(0)
        unit = lane
        while unit < units:
            at = u32(place * units + unit)
            p, q, r, o = u32(0), u32(0), u32(0), u32(0)
            if paired:
                p, q, r, o = stream4(low, u32(4 * at))
                a, c = pair_header(p, q, base, step, z, dz)
                a16, c16 = a, c
            else:
                a, c, a16, c16 = head_of(head, above, at, base, step, z, dz)
            if split:
                words[0], words[1] = u32(p & u32(0x7F7F7F7F)), u32(q & u32(0x7F7F7F7F))
                words[2], words[3] = u32(r & u32(0x7F7F7F7F)), u32(o & u32(0x7F7F7F7F))
                for j in range(4):
                    words[4 + j] = sevenths(words[j])
            else:
                read(words, low, high, two, one, at)
            for t in range(tokens):
                if first + t < count:
                    acc[t] += add(words, x, aux, u32(source + t), unit, units, a, c, a16, c16)
            unit = u32(unit + 32)
        for t in range(tokens):
            total = warp_sum(acc[t])
            if lane == 0 and first + t < count:
                if has_bias != 0:
                    total += bias[place]
                y[(first + t) * y_stride + row] = total

    return _gemv


@device
def _x_words(x, token, unit, units):
    """The 8 words of int8 activations of a unit."""
    words = as_words(x)
    at = u32((token * 2 * units + unit) * 4)
    x0, x1, x2, x3 = load4(words, at)
    x4, x5, x6, x7 = load4(words, u32(at + 4 * units))
    return x0, x1, x2, x3, x4, x5, x6, x7


@functools.cache
def _add_int8(scheme: Scheme) -> DeviceFunction:
    """What a unit adds to the sum of a token."""
    halves = scheme.header in BY_16

    @device
    def add(words, x, aux, token, unit, units, a, c, a16, c16):
        x0, x1, x2, x3, x4, x5, x6, x7 = _x_words(x, token, unit, units)
        scale, total, first, _ = load4(aux, u32((token * units + unit) * 4))
        dot = dp4a_us(words[0], x0, dp4a_us(words[1], x1, dp4a_us(words[2], x2, dp4a_us(words[3], x3, i32(0)))))
        if halves:
            more = dp4a_us(words[4], x4, dp4a_us(words[5], x5, dp4a_us(words[6], x6, dp4a_us(words[7], x7, i32(0)))))
            return (scale * (a * f32(dot) + a16 * f32(more))) + (c * first + c16 * (total - first))
        dot = dp4a_us(words[4], x4, dp4a_us(words[5], x5, dp4a_us(words[6], x6, dp4a_us(words[7], x7, dot))))
        return a * (scale * f32(dot)) + c * total

    return add


@device
def _add_pairs(words, x, aux, token, unit, units, a, c, a16, c16):
    """v = first + 11 second, so first * x + second * x' = v * x + second * (x' - 11 x); words 4 .. 7 are 16 second."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _x_words(x, token, unit, units)
    scale, total, _, _ = load4(aux, u32((token * units + unit) * 4))
    dot = dp4a_us(words[0], x0, dp4a_us(words[1], x2, dp4a_us(words[2], x4, dp4a_us(words[3], x6, i32(0)))))
    less = dp4a_us(words[4], x0, dp4a_us(words[5], x2, dp4a_us(words[6], x4, dp4a_us(words[7], x6, i32(0)))))
    more = dp4a_us(words[4], x1, dp4a_us(words[5], x3, dp4a_us(words[6], x5, dp4a_us(words[7], x7, i32(0)))))
    return a * (scale * f32(i32(dot + (i32(more - 11 * less) >> 4)))) + c * total


@functools.cache
def _add_f32(scheme: Scheme) -> DeviceFunction:
    """The same in float32."""
    halves = scheme.header in BY_16

    @device
    def half(words, first, x, at):
        dot, total = f32(0), f32(0)
        for g in range(4):
            x0, x1, x2, x3 = load4(x, u32(at + 4 * g))
            word = words[first + g]
            dot += f32(word & u32(255)) * x0 + f32(word >> u32(8) & u32(255)) * x1
            dot += f32(word >> u32(16) & u32(255)) * x2 + f32(word >> u32(24)) * x3
            total += (x0 + x1) + (x2 + x3)
        return dot, total

    @device
    def add(words, x, aux, token, unit, units, a, c, a16, c16):
        at = u32((token * units + unit) * 32)
        dot, total = half(words, 0, x, at)
        more, rest = half(words, 4, x, u32(at + 16))
        if halves:
            return (a * dot + c * total) + (a16 * more + c16 * rest)
        return a * (dot + more) + c * (total + rest)

    return add
