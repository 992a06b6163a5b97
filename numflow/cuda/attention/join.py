"""Combination of partial attention results whose keys were split over warps or blocks, in a fixed order (`attention`).

Every part has the maximum of its scores, the sum of its weights and the weighted sum of its values. Combining rescales
each part by exp(its maximum - the overall maximum).
"""

import functools

from numflow.cuda.device.call import N_TOKENS
from numflow.cuda.lang.arithmetic import exp, exp2, fmax
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    block_x,
    block_y,
    lane_index,
    load4,
    shuffle,
    store4,
    stream1,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import warp_max, warp_sum
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.weights.operand import finite, putter

LOWEST = -3.0e38  # below every score; stands for masked keys and for no keys at all
WARPS = 4
MOST_PARTS = 64   # two parts for each lane


@functools.cache
def join(kind: str = "") -> Kernel:
    """Combine the parts of every head and row. Grid (heads, rows).

    partial f32 [T][heads][parts]{maximum, total, v_dim weighted values}. Each of the 4 warps takes every fourth part; a
    lane takes 4 adjacent columns of 128.
    kind: "int8" or "f16" if y is written as this matrix operand as well, with units of 32 columns of a head. The
    float16 operand has scale 1: a mean of float16 values does not exceed them.
    """
    memory, put = SharedArray(f32, 128 * WARPS), _put(kind)

    @kernel("attention_join" + f"_{kind}" * bool(kind), 32 * WARPS)
    def _join(y: Rows, partial: f32.ptr, parts: u32, counts: i32.ptr, heads: u32, v_dim: u32, operand: u32.ptr,
              aux: f32.ptr):
        head, t, lane, warp = block_x(), u32(block_y()), u32(lane_index()), u32(thread_index() >> u32(5))
        valid = t < stream1(counts, N_TOKENS)
        after_previous()
        if not valid:
            return
        sums, width = memory(), u32(v_dim + 2)
        base = partial + (t * heads + head) * parts * width
        # In every warp: the scale factors of all parts (a lane has parts lane and lane + 32), and the overall total.
        first_part, second_part = u32(lane * width), u32((lane + 32) * width)
        maximum, maximum2, total, total2 = f32(LOWEST), f32(LOWEST), f32(0), f32(0)
        if lane < parts:
            maximum, total = base[first_part], base[first_part + 1]
        if lane + 32 < parts:
            maximum2, total2 = base[second_part], base[second_part + 1]
        overall = warp_max(fmax(maximum, maximum2))
        weight = exp(maximum - overall) if lane < parts else f32(0)
        weight2 = exp(maximum2 - overall) if lane + 32 < parts else f32(0)
        total = warp_sum(weight * total + weight2 * total2)
        begin = u32(0)
        while begin < v_dim:
            # Sum the rescaled values of the warp's parts, and write the sums to shared memory.
            column, part = u32(begin + 4 * lane), warp
            a, b, c, d = f32(0), f32(0), f32(0), f32(0)
            while part < parts:
                scale = shuffle(weight if part < 32 else weight2, part & u32(31))
                values = base + (part * width + 2 + column)
                if column < v_dim:
                    a += scale * values[0]
                if column + 1 < v_dim:
                    b += scale * values[1]
                if column + 2 < v_dim:
                    c += scale * values[2]
                if column + 3 < v_dim:
                    d += scale * values[3]
                part = u32(part + WARPS)
            store4(sums, u32(4 * thread_index()), a, b, c, d)
            # Barrier, then add the sums of the 4 warps and divide by the total.
            sync_block()
            put(sums, f32(1) / total, y.data + t * y.stride, u32(head * v_dim), begin, v_dim, operand, aux,
                u32(heads * v_dim >> u32(5)), t, warp)
            sync_block()
            begin = u32(begin + 128)

    return _join


@functools.cache
def join_two() -> Kernel:
    """Combine the parts of attention over two caches. Grid (heads, rows).

    own, others: as `partial` of `join`, with up to 32 parts each. A lane has one part of each; a thread takes a column.
    """
    @kernel("attention_join_two", 32 * WARPS)
    def _join_two(y: Rows, own: f32.ptr, own_parts: u32, others: f32.ptr, other_parts: u32, counts: i32.ptr, heads: u32,
                  v_dim: u32):
        head, t, lane, thread = block_x(), u32(block_y()), u32(lane_index()), u32(thread_index())
        valid = t < stream1(counts, N_TOKENS)
        after_previous()
        if not valid:
            return
        width = u32(v_dim + 2)
        first, second = own + (t * heads + head) * own_parts * width, others + (t * heads + head) * other_parts * width
        # In every warp: the scale factors of all parts, and the overall total.
        at = u32(lane * width)
        maximum, maximum2, total, total2 = f32(LOWEST), f32(LOWEST), f32(0), f32(0)
        if lane < own_parts:
            maximum, total = first[at], first[at + 1]
        if lane < other_parts:
            maximum2, total2 = second[at], second[at + 1]
        overall = warp_max(fmax(maximum, maximum2))
        weight = exp(maximum - overall) if lane < own_parts else f32(0)
        weight2 = exp(maximum2 - overall) if lane < other_parts else f32(0)
        factor = f32(1) / warp_sum(weight * total + weight2 * total2)
        # The sum of the rescaled values of all parts, 128 columns at a time.
        begin = u32(0)
        while begin < v_dim:
            column, value, part = u32(begin + thread), f32(0), u32(0)
            while part < own_parts:
                scale = shuffle(weight, part)
                if column < v_dim:
                    value += scale * first[part * width + 2 + column]
                part = u32(part + 1)
            part = u32(0)
            while part < other_parts:
                scale = shuffle(weight2, part)
                if column < v_dim:
                    value += scale * second[part * width + 2 + column]
                part = u32(part + 1)
            if column < v_dim:
                y.data[t * y.stride + head * v_dim + column] = value * factor
            begin = u32(begin + 128)

    return _join_two


def _put(kind: str) -> DeviceFunction:
    """put(sums, factor, y, head, begin, width, to, aux, units, t, warp): write 128 columns of a head."""
    put = putter(kind) if kind else None

    @device
    def put_floats(sums, factor, y, head, begin, width, operand, aux, units, t, warp):
        thread = u32(thread_index())
        value = (sums[thread] + sums[thread + 128]) + (sums[thread + 256] + sums[thread + 384])
        if begin + thread < width:
            y[head + begin + thread] = value * factor

    @device
    def put_both(sums, factor, y, head, begin, width, operand, aux, units, t, warp):
        if warp == 0:
            lane_column = u32(4 * lane_index())
            a, b, c, d = load4(sums, lane_column)
            for i in range(1, WARPS):
                e, f, g, h = load4(sums, u32(lane_column + 128 * i))
                a, b, c, d = a + e, b + f, c + g, d + h
            a, b, c, d = a * factor, b * factor, c * factor, d * factor
            valid, column = begin + lane_column < width, u32(head + begin + lane_column)
            if valid:
                store4(y, column, a, b, c, d)
            if kind == "f16":
                a, b, c, d = finite(a), finite(b), finite(c), finite(d)
                if column == 0:
                    aux[t] = f32(1)
            put(operand, aux, t, column if valid else u32(32 * units), u32(32 * units), f32(1), a, b, c, d)

    return put_both if kind else put_floats


def warp_joiner(count: int, tiles: int) -> DeviceFunction:
    """join_warps(acc, maxima, totals, memory, warp, lane): combine the partial results of 4 warps in warp 0.

    A tree in a fixed order: warps 2 and 3 pass theirs to warps 0 and 1 through shared memory, then warp 1 to warp 0.
    count: accumulators of a lane for 8 rows. tiles: tiles of 8 rows.
    """
    count, rows = count * tiles, 2 * tiles

    @device
    def write(acc, maxima, totals, memory, lane):
        for i in range(count):
            memory[u32(32 * i + lane)] = acc[i]
        for i in range(rows):
            memory[u32(32 * (count + i) + lane)], memory[u32(32 * (count + rows + i) + lane)] = maxima[i], totals[i]

    @device
    def combine(acc, maxima, totals, memory, lane):
        for i in range(rows):
            their_maximum = memory[u32(32 * (count + i) + lane)]
            maximum = fmax(maxima[i], their_maximum)
            my_scale, their_scale = exp2(maxima[i] - maximum), exp2(their_maximum - maximum)
            maxima[i] = maximum
            totals[i] = totals[i] * my_scale + memory[u32(32 * (count + rows + i) + lane)] * their_scale
            for n in range(count // rows):
                i_acc = (n // 2 * tiles + i // 2) * 4 + n % 2 * 2 + i % 2
                acc[i_acc] = acc[i_acc] * my_scale + memory[u32(32 * i_acc + lane)] * their_scale

    @device
    def join_warps(acc, maxima, totals, memory, warp, lane):
        stride = 32 * (count + 2 * rows)
        if warp > 1:
            write(acc, maxima, totals, memory + u32(warp - 2) * stride, lane)
        sync_block()
        if warp < 2:
            combine(acc, maxima, totals, memory + warp * stride, lane)
        sync_block()
        if warp == 1:
            write(acc, maxima, totals, memory, lane)
        sync_block()
        if warp == 0:
            combine(acc, maxima, totals, memory, lane)
        sync_block()

    return join_warps
