"""Products with matrices of plain numbers for a few tokens: one warp for each row of the matrix, 16 bytes a lane.

x f32 [T, pitch], zero beyond K, weight f32, f16 or bf16 [N, pitch]. The row is read once for up to 8 tokens.
"""

import functools

from numflow.cuda.arithmetic import float_of, high_half, low_half
from numflow.cuda.intrinsic import LocalArray
from numflow.cuda.intrinsics import block_x, block_y, lane_index, load4, stream4, thread_index
from numflow.cuda.kernel import Kernel, device, kernel
from numflow.cuda.reduce import warp_sum
from numflow.cuda.scalar import f32, i32, u32


@device
def dot4(x, at, a, b, c, d):
    """Product of 4 numbers with x[at ...]."""
    x0, x1, x2, x3 = load4(x, at)
    return a * x0 + b * x1 + c * x2 + d * x3


@device
def low_bfloat(word):
    """f32 of the lower bfloat16 of a word."""
    return float_of(u32(word << u32(16)))


@device
def high_bfloat(word):
    """f32 of the upper one."""
    return float_of(u32(word & u32(0xFFFF0000)))


@functools.cache
def float_gemv(kind: str, tokens: int, routed: bool) -> Kernel:
    """grid (N / 4, rows / tokens); parameters as in linear_gemv.gemv."""
    sums = LocalArray(f32, tokens)
    full, low, high = kind == "f32", *((low_half, high_half) if kind == "f16" else (low_bfloat, high_bfloat))
    step = 128 if full else 256

    @kernel(f"gemv_{kind}_{tokens}{'_routed' * routed}", 128)
    def _gemv(y: f32.ptr, y_stride: u32, x: f32.ptr, x_pitch: u32, weight: u32.ptr, bias: f32.ptr, has_bias: u32,
              ids: i32.ptr, counts: i32.ptr, rows: u32, n: u32, pitch: u32, routes: u32, residual: f32.ptr,
              residual_stride: u32, factor: f32, has_residual: u32):
        lane, row = lane_index(), u32(block_x() * 4 + (thread_index() >> u32(5)))
        first, count = u32(block_y() * tokens), u32(counts[rows])
        if row >= n or first >= count:
            return
        place, source = row, first
        if routed:
            if ids[first] < 0:  # an expert of another device
                if lane == 0:
                    y[first * y_stride + row] = f32(0)
                return
            place, source = u32(ids[first] * n + row), u32(first // routes)
        acc = sums()
        for t in range(tokens):
            acc[t] = f32(0)
        k = u32(lane * (4 if full else 8))
        words = weight + (place * pitch if full else place * (pitch >> u32(1)))
        while k < pitch:
            a, b, c, d = stream4(words, k if full else k >> u32(1))
            for t in range(tokens):
                if first + t < count:
                    at = (source + t) * x_pitch + k
                    if full:
                        acc[t] += dot4(x, at, float_of(a), float_of(b), float_of(c), float_of(d))
                    else:
                        acc[t] += dot4(x, at, low(a), high(a), low(b), high(b))
                        acc[t] += dot4(x, at + 4, low(c), high(c), low(d), high(d))
            k = u32(k + step)
        for t in range(tokens):
            total = warp_sum(acc[t])
            if lane == 0 and first + t < count:
                if has_bias != 0:
                    total += bias[place]
                if has_residual != 0:
                    total = residual[(first + t) * residual_stride + row] + factor * total
                y[(first + t) * y_stride + row] = total

    return _gemv
