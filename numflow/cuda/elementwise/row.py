"""Ops on whole rows: `sparsify`, `match_rms`, `mix`, `balance`."""

import math

from numflow.cuda.device.call import Call, ceil, per_row
from numflow.cuda.lang.arithmetic import exp, fmax, sqrt
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import block_sum
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.ops import Step, param

THREADS = 128


def sparsify(step: Step, ctx) -> list[Call]:
    """y = max(x - mean - deviations * std, 0). One block for each row."""
    (x,), (y,) = step.inputs, step.outputs
    return [per_row(step, _sparsify, ctx.rows(y), 1, *ctx.view(y), *ctx.view(x), ctx.batch.counts, ctx.rows(y), y.width,
                    param(step, "deviations"))]


def match_rms(step: Step, ctx) -> list[Call]:
    """x f32 [rows, G * D], like f32 [rows, D] -> y: each [D] of x scaled to the RMS of `like`. A block for each [D]."""
    (x, like), (y,) = step.inputs, step.outputs
    return [per_row(step, _match_rms, ctx.rows(y), y.width // like.width, *ctx.view(y), *ctx.view(x), *ctx.view(like),
                    ctx.batch.counts, ctx.rows(y), like.width, param(step, "least"))]


def mix(step: Step, ctx) -> list[Call]:
    """base f32 [rows, I * D], x f32 [rows, J * D], gates f32 [rows, I * J] -> y as base.

    y[i] = base[i] + sum over j of (gates[i, j] + plus) * x[j].
    """
    (base, x, gates), (y,), parts = step.inputs, step.outputs, param(step, "parts")
    return [per_row(step, _mix, ctx.rows(y), ceil(y.width, THREADS), ctx.view(y), ctx.view(base), ctx.view(x),
                    ctx.view(gates), ctx.batch.counts, ctx.rows(y), y.width, y.width // parts, gates.width // parts,
                    param(step, "plus"))]


def balance(step: Step, ctx) -> list[Call]:
    """x f32 [rows, S * S] -> y as x: Sinkhorn normalisation. One thread for each small matrix."""
    (x,), (y,) = step.inputs, step.outputs
    return [per_row(step, _balance, ctx.rows(y), 1, ctx.view(y), ctx.view(x), ctx.batch.counts, ctx.rows(y),
                    math.isqrt(y.width), param(step, "times"), param(step, "eps"))]


@kernel("balance", THREADS)
def _balance(y: Rows, x: Rows, counts: i32.ptr, rows: u32, size: u32, times: u32, eps: f32):
    # Thread 0 of a block handles a row of x, one matrix: softmax of the matrix's rows, stored transposed; then columns
    # and rows of the matrix are divided by their sums in turn, columns first and last.
    row = block_x()
    if row >= counts[rows] or thread_index() > 0:
        return
    source, out = x.data + row * x.stride, y.data + row * y.stride
    i = u32(0)
    while i < size:
        maximum, total, j = source[i * size], f32(0), u32(0)
        while j < size:
            maximum = fmax(maximum, source[i * size + j])
            j = u32(j + 1)
        j = u32(0)
        while j < size:
            part = exp(source[i * size + j] - maximum)
            out[j * size + i] = part
            total += part
            j = u32(j + 1)
        j = u32(0)
        while j < size:
            out[j * size + i] = out[j * size + i] / total + eps
            j = u32(j + 1)
        i = u32(i + 1)
    iteration = u32(0)
    while iteration < u32(2 * times - 1):
        stride = u32(1) if iteration % 2 == 0 else size
        outer_stride = size if iteration % 2 == 0 else u32(1)
        i = u32(0)
        while i < size:
            total, j = eps, u32(0)
            while j < size:
                total += out[i * outer_stride + j * stride]
                j = u32(j + 1)
            j = u32(0)
            while j < size:
                out[i * outer_stride + j * stride] = out[i * outer_stride + j * stride] / total
                j = u32(j + 1)
            i = u32(i + 1)
        iteration = u32(iteration + 1)


@kernel("sparsify", THREADS)
def _sparsify(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32,
              deviations: f32):
    row, first = block_x(), u32(thread_index())
    if row >= counts[rows]:
        return
    source, out = x + row * x_stride, y + row * y_stride
    total, column = f32(0), first
    while column < width:
        total += source[column]
        column = u32(column + 128)
    mean = block_sum(total, 4) / f32(width)
    total, column = f32(0), first
    while column < width:
        deviation = source[column] - mean
        total += deviation * deviation
        column = u32(column + 128)
    threshold, column = mean + deviations * sqrt(block_sum(total, 4) / f32(width)), first
    while column < width:
        out[column] = fmax(source[column] - threshold, f32(0))
        column = u32(column + 128)


@kernel("match_rms", THREADS)
def _match_rms(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, like: f32.ptr, like_stride: u32, counts: i32.ptr,
               rows: u32, width: u32, least: f32):
    row, group, first = block_x(), block_y(), u32(thread_index())
    if row >= counts[rows]:
        return
    source, out = x + (row * x_stride + group * width), y + (row * y_stride + group * width)
    reference = like + row * like_stride
    x_mean, like_mean, column = f32(0), f32(0), first
    while column < width:
        x_mean += source[column] * source[column]
        like_mean += reference[column] * reference[column]
        column = u32(column + 128)
    x_mean = block_sum(x_mean, 4) / f32(width)
    like_mean = block_sum(like_mean, 4) / f32(width)
    factor, column = sqrt(like_mean / fmax(x_mean, least)), first
    while column < width:
        out[column] = source[column] * factor
        column = u32(column + 128)


@kernel("mix", THREADS)
def _mix(y: Rows, base: Rows, x: Rows, gates: Rows, counts: i32.ptr, rows: u32, width: u32, size: u32, sources: u32,
         plus: f32):
    row, column = block_x(), u32(block_y() * 128 + thread_index())
    if row >= counts[rows] or column >= width:
        return
    part, offset = u32(column // size), u32(column % size)
    total, j = base.data[row * base.stride + column], u32(0)
    while j < sources:
        gate = gates.data[row * gates.stride + part * sources + j] + plus
        total += gate * x.data[row * x.stride + j * size + offset]
        j = u32(j + 1)
    y.data[row * y.stride + column] = total
