"""Rotary positions (ops `rope_angles`, `rope`)."""

import functools

from numflow.cuda.arithmetic import cos, sin
from numflow.cuda.call import N_TOKENS, Call, ceil, per_row
from numflow.cuda.intrinsics import block_x, block_y, thread_index
from numflow.cuda.kernel import Kernel, kernel
from numflow.cuda.scalar import f32, i32, u32
from numflow.ops import Step, param

THREADS = 128


def rope_angles(step: Step, ctx) -> list[Call]:
    """inv_freq f32 [F] -> y f32 [T, 2F]: cosines, then sines."""
    y = step.outputs[0]
    half = y.width // 2
    return [per_row(step, _rope_angles, N_TOKENS, ceil(half, THREADS), *ctx.view(y),
                    ctx.vector(step.weights["inv_freq"]), ctx.batch.ref("positions"), ctx.batch.counts, half,
                    param(step, "scale"))]


def rope(step: Step, ctx) -> list[Call]:
    """x f32 [T, heads * head_dim], angles f32 [T, 2F] -> y as x."""
    (x, angles), (y,) = step.inputs, step.outputs
    half, adjacent = angles.width // 2, param(step, "pairing") == "adjacent"
    return [per_row(step, rope_kernel(adjacent), ctx.rows(x), ceil(x.width, THREADS), *ctx.view(y), *ctx.view(x),
                    *ctx.view(angles), ctx.batch.counts, ctx.rows(x), x.width, param(step, "head_dim"), half,
                    param(step, "start"))]


@kernel("rope_angles", THREADS, exact=True)
def _rope_angles(y: f32.ptr, y_stride: u32, inv_freq: f32.ptr, positions: i32.ptr, counts: i32.ptr, half: u32,
                 scale: f32):
    # The product is taken in float32 and its cosine exactly: at position 4000 an approximation would show.
    t, i = block_y(), block_x() * 128 + thread_index()
    if t < counts[N_TOKENS] and i < half:
        angle = f32(positions[t]) * inv_freq[i]
        y[t * y_stride + i] = cos(angle) * scale
        y[t * y_stride + half + i] = sin(angle) * scale


@functools.cache
def rope_kernel(adjacent: bool) -> Kernel:
    """One thread for each column. The thread of a pair's first column turns both; columns outside are copied."""

    @kernel(f"rope_{'adjacent' if adjacent else 'half'}", THREADS)
    def _rope(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, angles: f32.ptr, angles_stride: u32,
              counts: i32.ptr, rows: u32, width: u32, head_dim: u32, half: u32, start: u32):
        t, column = block_y(), u32(block_x() * 128 + thread_index())
        if t >= counts[rows] or column >= width:
            return
        inside = u32(column % head_dim)
        source, to = x + (t * x_stride + column), y + (t * y_stride + column)
        if inside < start or inside >= start + 2 * half:
            to[0] = source[0]
            return
        turned = u32(inside - start)
        if adjacent:
            first, i, apart = turned & u32(1) == 0, turned >> u32(1), u32(1)
        else:
            first, i, apart = turned < half, turned, half
        if first:
            c, s = angles[t * angles_stride + i], angles[t * angles_stride + half + i]
            a, b = source[0], source[apart]
            to[0] = a * c - b * s
            to[apart] = b * c + a * s

    return _rope
