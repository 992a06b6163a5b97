"""Join, in order, of the partial results of warps, and of blocks, that shared the keys of a head (op `attention`)."""

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

LOWEST = -3.0e38  # a score that no key has
WARPS = 4
MOST_PARTS = 64   # two for each lane


@functools.cache
def join(kind: str = "") -> Kernel:
    """Grid (heads, rows). kind: "int8" or "f16", y is stored as this operand of a matrix too; then 32 columns of a head
    are a unit of it. As float16 it is not scaled: means of values of 16 bits are no larger than those.

    partial f32 [T][heads][parts]{largest score, sum of weights, v_dim weighted values}. Each warp takes every fourth
    part, a lane 4 neighbouring columns of 128.
    """
    memory, put = SharedArray(f32, 128 * WARPS), _put(kind)

    @kernel("attention_join" + f"_{kind}" * bool(kind), 32 * WARPS)
    def _join(y: Rows, partial: f32.ptr, parts: u32, counts: i32.ptr, heads: u32, v_dim: u32, to: u32.ptr,
              aux: f32.ptr):
        head, t, lane, warp = block_x(), u32(block_y()), u32(lane_index()), u32(thread_index() >> u32(5))
        there = t < stream1(counts, N_TOKENS)
        after_previous()
        if not there:
            return
        sums, width = memory(), u32(v_dim + 2)
        first = partial + (t * heads + head) * parts * width
        # In every warp the weights of all parts, those of a lane and of the lane + 32, and their sum.
        near, far = u32(lane * width), u32((lane + 32) * width)
        peak, more, total, rest = f32(LOWEST), f32(LOWEST), f32(0), f32(0)
        if lane < parts:
            peak, total = first[near], first[near + 1]
        if lane + 32 < parts:
            more, rest = first[far], first[far + 1]
        largest = warp_max(fmax(peak, more))
        weight = exp(peak - largest) if lane < parts else f32(0)
        other = exp(more - largest) if lane + 32 < parts else f32(0)
        total = warp_sum(weight * total + other * rest)
        begin = u32(0)
        while begin < v_dim:
            # Weighted values of the warp's parts, to shared memory.
            column, part = u32(begin + 4 * lane), warp
            a, b, c, d = f32(0), f32(0), f32(0), f32(0)
            while part < parts:
                scale = shuffle(weight if part < 32 else other, part & u32(31))
                values = first + (part * width + 2 + column)
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
            # Barrier, then the sums of the warps over their total.
            sync_block()
            put(sums, f32(1) / total, y.data + t * y.stride, u32(head * v_dim), begin, v_dim, to, aux,
                u32(heads * v_dim >> u32(5)), t, warp)
            sync_block()
            begin = u32(begin + 128)

    return _join


def _put(kind: str) -> DeviceFunction:
    """put(sums, factor, y, head, begin, width, to, aux, units, t, warp): results of 128 columns of a head."""
    put = putter(kind) if kind else None

    @device
    def put_floats(sums, factor, y, head, begin, width, to, aux, units, t, warp):
        own = u32(thread_index())
        value = (sums[own] + sums[own + 128]) + (sums[own + 256] + sums[own + 384])
        if begin + own < width:
            y[head + begin + own] = value * factor

    @device
    def put_both(sums, factor, y, head, begin, width, to, aux, units, t, warp):
        if warp == 0:
            at = u32(4 * lane_index())
            a, b, c, d = load4(sums, at)
            for i in range(1, WARPS):
                e, f, g, h = load4(sums, u32(at + 128 * i))
                a, b, c, d = a + e, b + f, c + g, d + h
            a, b, c, d = a * factor, b * factor, c * factor, d * factor
            there, column = begin + at < width, u32(head + begin + at)
            if there:
                store4(y, column, a, b, c, d)
            if kind == "f16":
                a, b, c, d = finite(a), finite(b), finite(c), finite(d)
                if column == 0:
                    aux[t] = f32(1)
            put(to, aux, t, column if there else u32(32 * units), u32(32 * units), f32(1), a, b, c, d)

    return put_both if kind else put_floats


def warp_joiner(count: int, tiles: int) -> DeviceFunction:
    """join_warps(acc, peaks, totals, memory, warp, lane): sums of 4 warps to warp 0. Two hand theirs to the other two,
    then one to the last, always the same ones. count: of sums of 8 rows, `tiles` of which a warp has."""
    count, rows = count * tiles, 2 * tiles

    @device
    def give(acc, peaks, totals, memory, lane):
        for i in range(count):
            memory[u32(32 * i + lane)] = acc[i]
        for i in range(rows):
            memory[u32(32 * (count + i) + lane)], memory[u32(32 * (count + rows + i) + lane)] = peaks[i], totals[i]

    @device
    def take(acc, peaks, totals, memory, lane):
        for i in range(rows):
            other = memory[u32(32 * (count + i) + lane)]
            peak = fmax(peaks[i], other)
            mine, theirs = exp2(peaks[i] - peak), exp2(other - peak)
            peaks[i] = peak
            totals[i] = totals[i] * mine + memory[u32(32 * (count + rows + i) + lane)] * theirs
            for n in range(count // rows):
                at = (n // 2 * tiles + i // 2) * 4 + n % 2 * 2 + i % 2
                acc[at] = acc[at] * mine + memory[u32(32 * at + lane)] * theirs

    @device
    def join_warps(acc, peaks, totals, memory, warp, lane):
        slot = 32 * (count + 2 * rows)
        if warp > 1:
            give(acc, peaks, totals, memory + u32(warp - 2) * slot, lane)
        sync_block()
        if warp < 2:
            take(acc, peaks, totals, memory + warp * slot, lane)
        sync_block()
        if warp == 1:
            give(acc, peaks, totals, memory, lane)
        sync_block()
        if warp == 0:
            take(acc, peaks, totals, memory, lane)
        sync_block()

    return join_warps
