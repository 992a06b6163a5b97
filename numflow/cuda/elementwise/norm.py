"""Normalisation over each of `groups` equal column groups (ops `rms_norm`, `layer_norm`).

y = (x - mean) / sqrt(var + eps) * weight + bias; `rms_norm` has mean 0 and no bias in this formula.
"""

import functools
from dataclasses import replace

from numflow.cuda.device.call import Call, Prepared, ceil, per_row
from numflow.cuda.lang.arithmetic import fabs, float_of, fmax, sqrt
from numflow.cuda.lang.intrinsic import LocalArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    as_words,
    block_x,
    block_y,
    load4,
    store4,
    stream1,
    stream4,
    thread_index,
)
from numflow.cuda.lang.kernel import Kernel, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import block_max, block_sum
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.weights.operand import LARGEST_HALF, putter
from numflow.ops import Step, param

WIDE = 512        # from this many columns of a group on, a block has 256 threads instead of 32
VERY_WIDE = 2048  # from this many columns on, a block that writes an operand has 1024 threads instead of 256


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
    group_steps = [0 if name is None else size if ctx.network.weights[name].shape[0] == x.width else 0
             for name in (step.weights.get("weight"), step.weights.get("bias"))]
    norm = norm_kernel(centred, weight is not None, bias is not None, 8 if size >= WIDE else 1)
    return [per_row(step, norm, ctx.rows(x), groups, *ctx.view(y), *ctx.view(x), weight, bias, ctx.batch.counts,
                    ctx.rows(x), size, *group_steps, param(step, "eps"))]


@functools.cache
def norm_kernel(centred: bool, has_weight: bool, has_bias: bool, warps: int) -> Kernel:
    """One block for each row and group. Grid (rows, groups).

    weight_step, bias_step: elements from one group's vector to the next, 0 if all groups share one.
    """
    name = "layer_norm" if centred else "rms_norm"
    threads = 32 * warps

    @kernel(f"{name}{'_weight' * has_weight}{'_bias' * has_bias}_{threads}", threads)
    def _norm_kernel(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, weight: f32.ptr, bias: f32.ptr,
                     counts: i32.ptr, rows: u32, size: u32, weight_step: u32, bias_step: u32, eps: f32):
        row, group, first = block_x(), block_y(), thread_index()
        if row >= counts[rows]:
            return
        source, out = x + (row * x_stride + group * size), y + (row * y_stride + group * size)
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
            out[i] = value
            i = u32(i + threads)

    return _norm_kernel


def into_operand(step: Step, ctx, kind: str, runs: str, rows: bool) -> list[Call]:
    """The norm written as the operand of the next matrix product (weights/operand.py).

    rows: write float32 rows as well. For one group whose columns fill whole units of the operand.
    """
    (x,), (y,) = step.inputs, step.outputs
    weight, bias = (ctx.vector(step.weights[role]) if role in step.weights else None for role in ("weight", "bias"))
    warps = 32 if x.width >= VERY_WIDE else 8
    norm = norm_operand(step.op, weight is not None, bias is not None, kind, warps, ceil(x.width, 128 * warps))
    call = per_row(step, norm, ctx.rows(x), 1, *ctx.place(y, kind), ctx.view(y), int(rows), ctx.view(x), weight, bias,
                   ctx.batch.counts, ctx.rows(x), x.width, param(step, "eps"))
    return [replace(call, leaves=Prepared(y, kind, runs))]


@functools.cache
def norm_operand(op: str, has_weight: bool, has_bias: bool, kind: str, warps: int, rounds: int) -> Kernel:
    """One block for each row. A thread has 4 columns in each of `rounds` rounds and keeps them in registers: a row is
    loaded once. Programmatic dependent launch: the weights are loaded while earlier kernels may still run."""
    centred, int8, half = op == "layer_norm", kind == "int8", kind == "f16"
    put, threads = putter(kind), 32 * warps
    values_memory, weights_memory = LocalArray(f32, 4 * rounds), LocalArray(u32, 4 * rounds)
    name = f"{op}{'_weight' * has_weight}{'_bias' * has_bias}_{kind}_{threads}{f'_{rounds}' * (rounds > 1)}"

    @kernel(name, threads)
    def _norm_operand(operand: u32.ptr, aux: f32.ptr, y: Rows, has_y: u32, x: Rows, weight: f32.ptr, bias: f32.ptr,
                      counts: i32.ptr, rows: u32, size: u32, eps: f32):
        # Load the weights to registers; wait for earlier kernels; load the row. Columns beyond the row are zero.
        row, first, values, bits = block_x(), u32(4 * thread_index()), values_memory(), weights_memory()
        valid = row < stream1(counts, rows)
        for i in range(rounds):
            n, column = 4 * i, u32(first + 4 * threads * i)
            bits[n], bits[n + 1], bits[n + 2], bits[n + 3] = u32(0), u32(0), u32(0), u32(0)
            if has_weight and column < size:
                bits[n], bits[n + 1], bits[n + 2], bits[n + 3] = stream4(as_words(weight), column)
        after_previous()
        if not valid:
            return
        source, mean, total = x.data + row * x.stride, f32(0), f32(0)
        for i in range(rounds):
            n, column = 4 * i, u32(first + 4 * threads * i)
            values[n], values[n + 1], values[n + 2], values[n + 3] = f32(0), f32(0), f32(0), f32(0)
            if column < size:
                values[n], values[n + 1], values[n + 2], values[n + 3] = load4(source, column)
        # Mean and variance, reduced over the block.
        if centred:
            for i in range(4 * rounds):
                total += values[i]
            mean = block_sum(total, warps) / f32(size)
        total = f32(0)
        for i in range(rounds):
            if u32(first + 4 * threads * i) < size:
                for n in range(4 * i, 4 * i + 4):
                    values[n] = values[n] - mean
                    total += values[n] * values[n]
        factor = f32(1) / sqrt(block_sum(total, warps) / f32(size) + eps)
        # The normalised row, and its absolute maximum.
        maximum = f32(0)
        for i in range(rounds):
            n, column = 4 * i, u32(first + 4 * threads * i)
            p, q, r, s = f32(1), f32(1), f32(1), f32(1)
            e, f, g, h = f32(0), f32(0), f32(0), f32(0)
            if has_weight:
                p, q, r, s = (float_of(bits[n]), float_of(bits[n + 1]), float_of(bits[n + 2]),
                              float_of(bits[n + 3]))
            if has_bias and column < size:
                e, f, g, h = load4(bias, column)
            values[n], values[n + 1] = values[n] * factor * p + e, values[n + 1] * factor * q + f
            values[n + 2], values[n + 3] = values[n + 2] * factor * r + g, values[n + 3] * factor * s + h
            maximum = fmax(maximum, fmax(fmax(fabs(values[n]), fabs(values[n + 1])),
                                         fmax(fabs(values[n + 2]), fabs(values[n + 3]))))
        # Write the operand, and the float32 row if it is wanted.
        inverse, scale = f32(1), f32(1)
        if half:
            maximum = block_max(maximum, warps)
            if maximum > f32(LARGEST_HALF):
                scale, inverse = maximum / f32(LARGEST_HALF), f32(LARGEST_HALF) / maximum
        if not int8 and first == 0:
            aux[row] = scale
        for i in range(rounds):
            n, column = 4 * i, u32(first + 4 * threads * i)
            if has_y != 0 and column < size:
                store4(y.data + row * y.stride, column, values[n], values[n + 1], values[n + 2], values[n + 3])
            put(operand, aux, row, column, size, inverse, values[n], values[n + 1], values[n + 2], values[n + 3])

    return _norm_operand
