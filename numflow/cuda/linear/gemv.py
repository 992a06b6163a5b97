"""Matrix-vector kernels for quantised matrices and few tokens.

A warp or a block computes each row of the matrix; a lane processes one unit of 32 columns at a time. A plain version,
one warp a row, is `gemv` of `numflow/learn/labs/warp_sum.py`.

int8: x is the int8 operand of operand.py; a unit takes 8 dp4a, then y += A * scale * dot + C * sum.
f32:  x is float32; codes are converted to floats.
A row is read once for up to 8 tokens. Outliers multiply float32 activations in both cases (outliers.py).
"""

import functools

from numflow.cuda.lang.arithmetic import dp4a_us, sqrt
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    as_words,
    block_x,
    block_y,
    lane_index,
    load4,
    prefetch,
    shuffle,
    shuffle_xor,
    stream1,
    stream4,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import warp_sum
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear.parameters import Apart, Bias, Late, Planes, Residual, Shape
from numflow.cuda.weights.decode import header, numbers_of, pair_header, reader, sevenths
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import PLANE_BYTES, SCHEMES, UNIT, Scheme
from numflow.cuda.weights.outliers import outlier_adder

WARPS = 4              # warps of a block
TOKENS = (1, 4, 8)     # tokens that one pass over the matrix may have
UNROLL = {1: 4, 4: 2, 8: 1}  # units that a lane loads before it uses the first, by tokens
SPLIT_BELOW = 4096     # in matrices with fewer rows, a whole block computes a row, so that the whole GPU has work


def split_of(n: int, units: int) -> int:
    """Number of warps that share a row."""
    return WARPS if n < SPLIT_BELOW and units > 32 else 1


@functools.cache
def gemv(kind: str, int8: bool, tokens: int, split: int, routed: bool, apart: bool = False) -> Kernel:
    """Grid (N * split / 4, rows / tokens). split: warps that share a row.

    routed: `ids` has the index of the matrix for each row of y, and a row of x serves `routes` rows of y. apart: the
    matrix has outliers.
    """
    sums, partial = LocalArray(f32, tokens), SharedArray(f32, WARPS * tokens)
    add_row, scales, add_apart = row_adder(kind, int8, tokens, split), late_scales(tokens), outlier_adder(tokens)
    ask = row_prefetch(kind, tokens, split)
    name = f"gemv_{kind}_{'int8' if int8 else 'f32'}_{tokens}{f'_split{split}' * (split > 1)}"
    name += "_apart" * apart + "_routed" * routed

    @kernel(name, 128, blocks=0 if int8 else 4)  # float32: limit the registers so that four blocks fit
    def _gemv(y: Rows, x: f32.ptr, aux: f32.ptr, planes: Planes, bias: Bias, ids: i32.ptr, shape: Shape, routes: u32,
              residual: Residual, late: Late, outliers: Apart):
        # Block indices: a row of the matrix (of the route's expert) and the tokens.
        lane, warp = lane_index(), u32(thread_index() >> u32(5))
        row = u32(block_x()) if split > 1 else u32(block_x() * 4 + warp)
        own, word = u32(lane + 32 * warp) if split > 1 else u32(lane), u32(0)
        first, count = u32(block_y() * tokens), u32(stream1(shape.counts, shape.field))
        if not routed and row < shape.n:
            ask(*planes, row, own, shape.units)
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
        # Dot products: each lane adds its units of the row, then its outliers.
        acc = sums()
        for t in range(tokens):
            acc[t] = f32(0)
        if apart:
            word = outliers.slots[place * outliers.width + own] if own < outliers.width else u32(0)
        add_row(acc, x, aux, u32(0), *planes, place, own, shape.units, source, count - first)
        if apart:
            add_apart(acc, word, outliers.x, outliers.x_stride, outliers.slots, place * outliers.width, own, 32 * split,
                      outliers.width, source, count - first)
        # Sums over the lanes, times the scale of a norm that the reader applies.
        parts, scale = partial(), f32(1)
        if late.parts != 0:
            scale = scales(late.squares, first, u32(count - first), late.parts, late.eps)
        # Epilogue for a row of one warp: bias, residual, y.
        for t in range(tokens):
            total = warp_sum(acc[t]) * shuffle(scale, t * (32 // tokens))
            if split > 1:
                if lane == 0:
                    parts[t * 4 + warp] = total
            elif lane == 0 and first + t < count:
                if bias.present != 0:
                    total += bias.data[place]
                if residual.present != 0:
                    total = residual.data[(first + t) * residual.stride + row] + residual.factor * total
                y.data[(first + t) * y.stride + row] = total
        # Barrier, then the epilogue for a row that the warps of a block share.
        if split > 1:
            sync_block()
            t = u32(thread_index())
            if t < tokens and first + t < count:
                total = (parts[4 * t] + parts[4 * t + 1]) + (parts[4 * t + 2] + parts[4 * t + 3])
                if bias.present != 0:
                    total += bias.data[place]
                if residual.present != 0:
                    total = residual.data[(first + t) * residual.stride + row] + residual.factor * total
                y.data[(first + t) * y.stride + row] = total

    return _gemv


@functools.cache
def late_scales(tokens: int) -> DeviceFunction:
    """scales(squares, first, left, parts, eps): 1 / sqrt(mean(x^2) + eps) of the tokens from `first` on.

    squares: sums of squares of 32 columns each. All lanes of a warp call it; 32 / tokens adjacent lanes get the scale
    of one token.
    """
    group = 32 // tokens

    @device
    def scales(squares, first, left, parts, eps):
        lane, total = u32(lane_index()), f32(0)
        t, part = u32(lane // group), u32(lane % group)
        while t < left and part < parts:
            total += squares[(first + t) * parts + part]
            part = u32(part + group)
        for i in range(5):
            if 1 << i < group:
                total += shuffle_xor(total, 1 << i)
        return f32(1) / sqrt(total / f32(32 * parts) + eps)

    return scales


@functools.cache
def row_adder(kind: str, int8: bool, tokens: int, split: int) -> DeviceFunction:
    """add_row(acc, x, aux, x_pitch, planes .., place, unit, units, source, left): add a lane's products of a row of the
    matrix with the tokens, from its first `unit` on.

    place: index of the row. x_pitch: not used here. source: first row of x. left: number of remaining tokens.
    """
    scheme = SCHEMES[kind]
    codes, row_of, add_unit = LocalArray(u32, 8), row_header(scheme), _unit(scheme, int8, tokens)
    unroll, step = _unroll(scheme, tokens), 32 * split
    ahead, stride = step * (unroll - 1), step * unroll

    @device
    def add_row(acc, x, aux, x_pitch, low, high, two, one, head, above, per_row, place, unit, units, source, left):
        base, step_, z, dz = row_of(per_row, place)
        words, at = codes(), u32(place * units)
        if unroll > 1:  # unrolled by hand, because the compiler would not unroll a loop
            while unit + ahead < units:
                add_unit(acc, words, x, aux, low, high, two, one, head, above, at, unit, units, source, left, base,
                         step_, z, dz)
                add_unit(acc, words, x, aux, low, high, two, one, head, above, at, u32(unit + step), units, source,
                         left, base, step_, z, dz)
                if unroll > 2:
                    add_unit(acc, words, x, aux, low, high, two, one, head, above, at, u32(unit + 2 * step), units,
                             source, left, base, step_, z, dz)
                    add_unit(acc, words, x, aux, low, high, two, one, head, above, at, u32(unit + 3 * step), units,
                             source, left, base, step_, z, dz)
                unit = u32(unit + stride)
        while unit < units:
            add_unit(acc, words, x, aux, low, high, two, one, head, above, at, unit, units, source, left, base, step_,
                     z, dz)
            unit = u32(unit + step)

    return add_row


def _unroll(scheme: Scheme, tokens: int) -> int:
    """Units that a lane loads before it uses the first. Four units of three code planes need more than 128
    registers."""
    return min(UNROLL[tokens], 2) if scheme.bits == 7 else UNROLL[tokens]


@functools.cache
def row_prefetch(kind: str, tokens: int, split: int) -> DeviceFunction:
    """ask(planes .., place, unit, units): a lane prefetches the units of a row that it reads first. No kernel writes
    weights, so the prefetch may overlap with earlier kernels (programmatic dependent launch)."""
    count, step, ask_unit = _unroll(SCHEMES[kind], tokens), 32 * split, unit_prefetch(kind)

    @device
    def ask(low, high, two, one, head, above, per_row, place, unit, units):
        at = u32(place * units + unit)
        for i in range(4):
            if i < count and unit + i * step < units:
                ask_unit(low, high, two, one, head, above, per_row, u32(at + i * step))

    return ask


@functools.cache
def unit_prefetch(kind: str) -> DeviceFunction:
    """ask_unit(planes .., at): prefetch a unit of the matrix."""
    scheme = SCHEMES[kind]
    words = {plane: PLANE_BYTES[plane] // 4 if plane in scheme.planes else 0 for plane in ("low", "high", "two", "one")}
    lows, highs, twos, ones = words.values()
    headers = 2 if scheme.parts.get("head", (0, UNIT)) == (4, UNIT) else int(scheme.parts.get("head") == (2, UNIT))

    @device
    def ask_unit(low, high, two, one, head, above, per_row, at):
        if lows:
            prefetch(low, u32(lows * at))
        if highs:
            prefetch(high, u32(highs * at))
        if twos:
            prefetch(two, u32(twos * at))
        if ones:
            prefetch(one, u32(ones * at))
        if headers:
            prefetch(head, u32(headers * at))

    return ask_unit


@functools.cache
def _unit(scheme: Scheme, int8: bool, tokens: int) -> DeviceFunction:
    """add_unit(acc, words, ...): decode a unit of a row, and add its products to the sums of all tokens."""
    in_codes, head_of, read = scheme.in_codes, header(scheme), reader(scheme)
    split = int8 and scheme.paired
    add = _add_pairs if split else _add_int8(scheme) if int8 else _add_table if scheme.table else _add_f32(scheme)
    table, numbers, floats = bool(scheme.table), numbers_of(scheme), LocalArray(f32, 32)

    @device
    def add_unit(acc, words, x, aux, low, high, two, one, head, above, begin, unit, units, source, left, base, step, z,
                 dz):
        at = u32(begin + unit)
        p, q, r, o = u32(0), u32(0), u32(0), u32(0)
        if in_codes or split:
            p, q, r, o = stream4(low, u32(4 * at))
        if in_codes:
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
        if table:  # look the codes up once for all tokens
            values = floats()
            for g in range(8):
                values[4 * g], values[4 * g + 1], values[4 * g + 2], values[4 * g + 3] = numbers(words[g])
        for t in range(tokens):
            if tokens == 1 or t < left:
                acc[t] += add(values if table else words, x, aux, u32(source + t), unit, units, a, c, a16, c16)

    return add_unit


@device
def _x_words(x, token, unit, units):
    """Load the 8 words of int8 activations of a unit."""
    words = as_words(x)
    at = u32((token * 2 * units + unit) * 4)
    x0, x1, x2, x3 = load4(words, at)
    x4, x5, x6, x7 = load4(words, u32(at + 4 * units))
    return x0, x1, x2, x3, x4, x5, x6, x7


@functools.cache
def _add_int8(scheme: Scheme) -> DeviceFunction:
    """add(words, x, aux, token, ...): a unit's term of the sum of a token, by dp4a."""
    halves = scheme.by_16

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
    """The term of a unit of code pairs v = first + 11 second: first * x + second * x' = v * x + second * (x' - 11 x).

    words 4 .. 7 have 16 * second.
    """
    x0, x1, x2, x3, x4, x5, x6, x7 = _x_words(x, token, unit, units)
    scale, total, _, _ = load4(aux, u32((token * units + unit) * 4))
    dot = dp4a_us(words[0], x0, dp4a_us(words[1], x2, dp4a_us(words[2], x4, dp4a_us(words[3], x6, i32(0)))))
    less = dp4a_us(words[4], x0, dp4a_us(words[5], x2, dp4a_us(words[6], x4, dp4a_us(words[7], x6, i32(0)))))
    more = dp4a_us(words[4], x1, dp4a_us(words[5], x3, dp4a_us(words[6], x5, dp4a_us(words[7], x7, i32(0)))))
    return a * (scale * f32(i32(dot + (i32(more - 11 * less) >> 4)))) + c * total


@functools.cache
def _add_f32(scheme: Scheme) -> DeviceFunction:
    """add(words, x, aux, token, ...): a unit's term in float32. Without a base, the zero point is subtracted from the
    codes, so that the sum of x is not needed."""
    halves, based, numbers = scheme.by_16, scheme.with_base, numbers_of(scheme)

    @device
    def half(words, first, x, at):
        dot, total = f32(0), f32(0)
        for g in range(4):
            x0, x1, x2, x3 = load4(x, u32(at + 4 * g))
            w0, w1, w2, w3 = numbers(words[first + g])
            dot += w0 * x0 + w1 * x1
            dot += w2 * x2 + w3 * x3
            if based:
                total += (x0 + x1) + (x2 + x3)
        return dot, total

    @device
    def add(words, x, aux, token, unit, units, a, c, a16, c16):
        at = u32((token * units + unit) * 32)
        dot, total = half(words, 0, x, at)
        more, rest = half(words, 4, x, u32(at + 16))
        if not based:
            return a * dot + a16 * more if halves else a * (dot + more)
        if halves:
            return (a * dot + c * total) + (a16 * more + c16 * rest)
        return a * (dot + more) + c * (total + rest)

    return add


@device
def _add_table(values, x, aux, token, unit, units, a, c, a16, c16):
    """A unit's term in float32, for codes that were looked up in a table."""
    at, dot, more = u32((token * units + unit) * 32), f32(0), f32(0)
    for g in range(4):
        x0, x1, x2, x3 = load4(x, u32(at + 4 * g))
        dot += values[4 * g] * x0 + values[4 * g + 1] * x1
        dot += values[4 * g + 2] * x2 + values[4 * g + 3] * x3
        x0, x1, x2, x3 = load4(x, u32(at + 16 + 4 * g))
        more += values[16 + 4 * g] * x0 + values[17 + 4 * g] * x1
        more += values[18 + 4 * g] * x2 + values[19 + 4 * g] * x3
    return a * dot + a16 * more
