"""Normalisation over each of `groups` equal column groups (ops `rms_norm`, `layer_norm`).

y = (x - mean) / sqrt(var + eps) * weight + bias; `rms_norm` leaves the mean where it is and has no bias.
"""

import functools

from numflow.cuda.arithmetic import sqrt
from numflow.cuda.call import Call, per_row
from numflow.cuda.intrinsics import block_x, block_y, thread_index
from numflow.cuda.kernel import Kernel, kernel
from numflow.cuda.reduce import block_sum
from numflow.cuda.scalar import f32, i32, u32
from numflow.ops import Step, param

WIDE = 512  # columns of a group from which a block has 256 threads instead of 32


def rms_norm(step: Step, ctx) -> list[Call]:
    """x f32 [T, D], weight f32 [D] or [D / groups] -> y f32 [T, D]."""
    return _norm(step, ctx, False)


def layer_norm(step: Step, ctx) -> list[Call]:
    """x f32 [T, D], weight and bias f32 [D] or [D / groups] -> y f32 [T, D]."""
    return _norm(step, ctx, True)


def _norm(step: Step, ctx, centred: bool) -> list[Call]:
    (x,), (y,), groups = step.inputs, step.outputs, param(step, "groups")
    size = x.width // groups
    weight, bias = (ctx.vector(step.weights[role]) if role in step.weights else None for role in ("weight", "bias"))
    steps = [0 if name is None else size if ctx.network.weights[name].shape[0] == x.width else 0
             for name in (step.weights.get("weight"), step.weights.get("bias"))]
    chosen = norm_kernel(centred, weight is not None, bias is not None, 8 if size >= WIDE else 1)
    return [per_row(step, chosen, ctx.rows(x), groups, *ctx.view(y), *ctx.view(x), weight, bias, ctx.batch.counts,
                    ctx.rows(x), size, *steps, param(step, "eps"))]


@functools.cache
def norm_kernel(centred: bool, has_weight: bool, has_bias: bool, warps: int) -> Kernel:
    """One block for each row and group; steps: how far the vectors of the next group are, 0 if all share them."""
    name = "layer_norm" if centred else "rms_norm"
    threads = 32 * warps

    @kernel(f"{name}{'_weight' * has_weight}{'_bias' * has_bias}_{threads}", threads)
    def _norm_kernel(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, weight: f32.ptr, bias: f32.ptr,
                     counts: i32.ptr, rows: u32, size: u32, weight_step: u32, bias_step: u32, eps: f32):
        row, group, first = block_y(), block_x(), thread_index()
        if row >= counts[rows]:
            return
        source, to = x + (row * x_stride + group * size), y + (row * y_stride + group * size)
        mean = f32(0)
        if centred:
            i = first
            while i < size:
                mean += source[i]
                i = u32(i + threads)
            mean = block_sum(mean, warps) / f32(size)
        total, i = f32(0), first
        while i < size:
            value = source[i] - mean
            total += value * value
            i = u32(i + threads)
        factor = f32(1) / sqrt(block_sum(total, warps) / f32(size) + eps)
        i = first
        while i < size:
            value = (source[i] - mean) * factor
            if has_weight:
                value *= weight[group * weight_step + i]
            if has_bias:
                value += bias[group * bias_step + i]
            to[i] = value
            i = u32(i + threads)

    return _norm_kernel
