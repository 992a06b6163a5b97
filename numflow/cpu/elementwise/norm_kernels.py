"""Kernels of normalisation (norm.py)."""

import math

import numpy as np

from numflow.cpu.runtime.access import f64, i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.float32 import fma, keep_lanes, load_part, splat, store_part, sum_lanes
from numflow.cpu.simd.vector import inline, zero_f32

# Arguments of both kernels.
HEADER, ROWS, X, X_STRIDE, Y, Y_STRIDE, GROUPS, SIZE, WEIGHT, BIAS, EPS = range(11)


@kernel
def rms_norm(args, thread, n_threads):
    """Items: rows times groups. Sums of squares in 16 lanes of float32, reduced as a balanced tree."""
    groups, size = i64(args, GROUPS), i64(args, SIZE)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)) * groups, thread, n_threads)
    for item in range(begin, end):
        row, first = item // groups, 4 * size * (item % groups)
        x = i64(args, X) + 4 * row * i64(args, X_STRIDE) + first
        y = i64(args, Y) + 4 * row * i64(args, Y_STRIDE) + first
        factor = inverse_root(sum_of_squares(x, size, zero_f32()), size, f64(args, EPS))
        for i in range(0, size, 16):
            store_part(y + 4 * i, rms_part(x + 4 * i, i64(args, WEIGHT) + first + 4 * i, size - i, factor), size - i)


@kernel
def layer_norm(args, thread, n_threads):
    """Items: rows times groups. The variance is the mean of (x - mean)^2, in a second pass."""
    groups, size = i64(args, GROUPS), i64(args, SIZE)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)) * groups, thread, n_threads)
    for item in range(begin, end):
        row, first = item // groups, 4 * size * (item % groups)
        x = i64(args, X) + 4 * row * i64(args, X_STRIDE) + first
        y = i64(args, Y) + 4 * row * i64(args, Y_STRIDE) + first
        mean = splat(sum_of(x, size) / np.float32(size))
        factor = inverse_root(sum_of_squares(x, size, mean), size, f64(args, EPS))
        for i in range(0, size, 16):
            weight, bias = i64(args, WEIGHT) + first + 4 * i, i64(args, BIAS) + first + 4 * i
            store_part(y + 4 * i, layer_part(x + 4 * i, weight, bias, size - i, mean, factor), size - i)


@inline
def rms_part(x, weight, left, factor):
    """16 columns, of which `left` exist: x * factor * weight."""
    return load_part(x, left) * factor * load_part(weight, left)


@inline
def layer_part(x, weight, bias, left, mean, factor):
    """16 columns, of which `left` exist: (x - mean) * factor * weight + bias."""
    return fma((load_part(x, left) - mean) * factor, load_part(weight, left), load_part(bias, left))


@inline
def inverse_root(total, size, eps):
    """1 / sqrt(mean + eps) in double precision, rounded once."""
    return np.float32(1.0 / math.sqrt(np.float64(total) / size + eps))


@inline
def sum_of(x, size):
    """Sum of x."""
    total = zero_f32()
    for i in range(0, size, 16):
        total = total + load_part(x + 4 * i, size - i)
    return sum_lanes(total)


@inline
def sum_of_squares(x, size, mean):
    """Sum of (x - mean)^2."""
    total = zero_f32()
    for i in range(0, size, 16):
        value = keep_lanes(load_part(x + 4 * i, size - i) - mean, 0, size - i - 1, np.float32(0))
        total = fma(value, value, total)
    return sum_lanes(total)
