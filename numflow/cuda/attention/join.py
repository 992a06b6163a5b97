"""Join, in order, of the partial results of warps that shared the keys of a head (op `attention`)."""

from numflow.cuda.device.call import N_TOKENS
from numflow.cuda.lang.arithmetic import exp, fmax
from numflow.cuda.lang.intrinsics import block_x, block_y, lane_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.scalar import f32, i32, u32

LOWEST = -3.0e38  # a score that no key has


@kernel("attention_join", 32)
def join(y: f32.ptr, y_stride: u32, partial: f32.ptr, parts: u32, counts: i32.ptr, heads: u32, v_dim: u32):
    """partial f32 [T][heads][parts]{largest score, sum of weights, v_dim weighted values}; grid (heads, rows)."""
    head, t, lane = block_x(), block_y(), u32(lane_index())
    if t >= counts[N_TOKENS]:
        return
    width = u32(v_dim + 2)
    first = partial + (t * heads + head) * parts * width
    peak, part = f32(LOWEST), u32(0)
    while part < parts:
        peak = fmax(peak, first[part * width])
        part = u32(part + 1)
    total, part = f32(0), u32(0)
    while part < parts:
        total += exp(first[part * width] - peak) * first[part * width + 1]
        part = u32(part + 1)
    column = lane
    while column < v_dim:
        value, part = f32(0), u32(0)
        while part < parts:
            value += exp(first[part * width] - peak) * first[part * width + 2 + column]
            part = u32(part + 1)
        y[t * y_stride + head * v_dim + column] = value / total
        column = u32(column + 32)
