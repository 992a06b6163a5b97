"""Kernels of element-wise ops (act.py)."""

import math

import numpy as np

from numflow.cpu.elementwise.act import EXP, GELU, GELU_QUICK, GELU_TANH, MIX, RELU2, SIGMOID, SILU, TANH
from numflow.cpu.elementwise.norm_kernels import sum_of, sum_of_squares
from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import POSITIONS, kernel
from numflow.cpu.simd.float32 import (
    copysign,
    fma,
    load_part,
    magnitude,
    maximum,
    minimum,
    splat,
    sqrt,
    store_part,
    where_less,
)
from numflow.cpu.simd.functions import exp, normal_cdf, sigmoid, tanh
from numflow.cpu.simd.functions import softplus as softplus_of
from numflow.cpu.simd.vector import inline, zero_f32

# Arguments of all kernels: y = f(a, b); ops of one input ignore b.
HEADER, ROWS, WIDTH, Y, Y_STRIDE, A, A_STRIDE, B, B_STRIDE, KIND, FACTOR, LIMIT = range(12)
# Arguments with another meaning, of xielu, scale_by_position and shift_columns.
POSITIVE, NEGATIVE, BETA, EPS = B, B_STRIDE, KIND, FACTOR
LENGTH, OFFSET, BY_STEP = B, B_STRIDE, KIND
SHIFT, SMOOTH = KIND, FACTOR
_HALF, _ONE = np.float32(0.5), np.float32(1)
_QUICK, _ROOT_2_PI, _CUBE = np.float32(1.702), np.float32((2 / np.pi) ** 0.5), np.float32(0.044715)


@inline
def _vectors(args):
    """Vectors of 16 columns per row; the last vector may be partial."""
    return (i64(args, WIDTH) + 15) // 16


@inline
def _items(args):
    """Items that threads share: rows times vectors."""
    return i64(i64(args, HEADER), i64(args, ROWS)) * _vectors(args)


@inline
def _operands(args, item):
    """Addresses of an item's columns in y, a and b, and the number of columns left in the row."""
    vectors = _vectors(args)
    t, column = item // vectors, item % vectors * 16
    y = i64(args, Y) + 4 * (t * i64(args, Y_STRIDE) + column)
    a = i64(args, A) + 4 * (t * i64(args, A_STRIDE) + column)
    b = i64(args, B) + 4 * (t * i64(args, B_STRIDE) + column)
    return y, a, b, i64(args, WIDTH) - column


@inline
def activated(kind, x):
    """act(x) of the given kind."""
    if kind == SILU:
        return x * sigmoid(x)
    if kind == GELU_TANH:
        return x * _HALF * (tanh(fma(x * x * x, _CUBE, x) * _ROOT_2_PI) + _ONE)
    if kind == GELU:
        return x * normal_cdf(x)
    if kind == GELU_QUICK:
        return x * sigmoid(x * _QUICK)
    if kind == SIGMOID:
        return sigmoid(x)
    if kind == EXP:
        return exp(x)
    if kind == TANH:
        return tanh(x)
    positive = maximum(zero_f32(), x)
    return positive * positive if kind == RELU2 else positive


@kernel
def act(args, thread, n_threads):
    """y = act(a)"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _operands(args, item)
        store_part(y, activated(i64(args, KIND), load_part(a, left)), left)


@kernel
def act_mul(args, thread, n_threads):
    """y = act(a) * b"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _operands(args, item)
        store_part(y, activated(i64(args, KIND), load_part(a, left)) * load_part(b, left), left)


@kernel
def swiglu_clamp(args, thread, n_threads):
    """y = g * sigmoid(factor * g) * (u + kind), with g = min(a, limit) and u = clip(b, -limit, limit)"""
    limit, lowest, alpha = splat(f64(args, LIMIT)), splat(-f64(args, LIMIT)), f64(args, FACTOR)
    shift = np.float32(i64(args, KIND))
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _operands(args, item)
        gate, up = minimum(limit, load_part(a, left)), maximum(lowest, minimum(limit, load_part(b, left)))
        store_part(y, gate * sigmoid(gate * alpha) * (up + shift), left)


@kernel
def xielu(args, thread, n_threads):
    """y = positive * a^2 + beta * a for a > 0, else negative * (exp(min(a, eps)) - 1 - a) + beta * a"""
    positive, negative, beta, eps = f64(args, POSITIVE), f64(args, NEGATIVE), f64(args, BETA), splat(f64(args, EPS))
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _operands(args, item)
        x = load_part(a, left)
        nonpositive = (exp(minimum(eps, x)) - _ONE - x) * negative
        store_part(y, fma(beta, x, where_less(zero_f32(), x, x * x * positive, nonpositive)), left)


@kernel
def scale_by_position(args, thread, n_threads):
    """With q = (position + offset) / length, by `smooth`: 0: y = a * (1 + scale * ln(1 + floor(q))); 1: y = a * (1 +
    scale * ln(max(1, q))); 2: y = a * (1 + q)^scale. The factor is computed in double precision and rounded once."""
    positions, scale = i32_ptr(i64(i64(args, HEADER), POSITIONS)), f64(args, BY_STEP)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _operands(args, item)
        position = np.int64(positions[item // _vectors(args)]) + i64(args, OFFSET)
        if i64(args, SMOOTH) == 0:
            factor = 1.0 + scale * math.log1p(np.float64(position // i64(args, LENGTH)))
        elif i64(args, SMOOTH) == 1:
            factor = 1.0 + scale * math.log1p(max(np.float64(position) / i64(args, LENGTH) - 1.0, 0.0))
        else:
            factor = math.exp(scale * math.log1p(np.float64(position) / i64(args, LENGTH)))
        store_part(y, load_part(a, left) * np.float32(factor), left)


@kernel
def sparsify(args, thread, n_threads):
    """y = max(a - mean - factor * std, 0). Items: rows."""
    width = i64(args, WIDTH)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for t in range(begin, end):
        y, a = i64(args, Y) + 4 * t * i64(args, Y_STRIDE), i64(args, A) + 4 * t * i64(args, A_STRIDE)
        mean = sum_of(a, width) / np.float32(width)
        deviation = math.sqrt(np.float64(sum_of_squares(a, width, splat(mean))) / width)
        threshold = splat(np.float32(mean + f64(args, FACTOR) * deviation))
        for i in range(0, width, 16):
            store_part(y + 4 * i, maximum(zero_f32(), load_part(a + 4 * i, width - i) - threshold), width - i)


@kernel
def match_rms(args, thread, n_threads):
    """Each part of WIDTH columns of y = a * sqrt(mean(b^2) / max(mean(a^2), least)). Items: rows times parts."""
    width, parts = i64(args, WIDTH), i64(args, KIND)
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)) * parts, thread, n_threads)
    for item in range(begin, end):
        t, first = item // parts, item % parts * width
        y = i64(args, Y) + 4 * (t * i64(args, Y_STRIDE) + first)
        a = i64(args, A) + 4 * (t * i64(args, A_STRIDE) + first)
        target = np.float64(sum_of_squares(i64(args, B) + 4 * t * i64(args, B_STRIDE), width, zero_f32())) / width
        current = max(np.float64(sum_of_squares(a, width, zero_f32())) / width, f64(args, FACTOR))
        factor = np.float32(math.sqrt(target / current))
        for i in range(0, width, 16):
            store_part(y + 4 * i, load_part(a + 4 * i, width - i) * factor, width - i)


@kernel
def mix(args, thread, n_threads):
    """Part i of y = part i of base + sum over j of (gates[t, i * J + j] + plus) * part j of x, in the order of j.
    Items: rows times vectors of 16 columns."""
    width, sources, plus = i64(args, MIX.width), i64(args, MIX.sources), np.float32(f64(args, MIX.plus))
    vectors = (width + 15) // 16
    begin, end = share(i64(i64(args, MIX.header), i64(args, MIX.rows)) * vectors, thread, n_threads)
    for item in range(begin, end):
        t, column = item // vectors, item % vectors * 16
        gates = f32_ptr(i64(args, MIX.gates) + 4 * t * i64(args, MIX.gates_stride))
        x = i64(args, MIX.x) + 4 * (t * i64(args, MIX.x_stride) + column)
        for i in range(i64(args, MIX.parts)):
            total = load_part(i64(args, MIX.base) + 4 * (t * i64(args, MIX.base_stride) + i * width + column),
                              width - column)
            for j in range(sources):
                total = fma(gates[i * sources + j] + plus, load_part(x + 4 * j * width, width - column), total)
            y = i64(args, MIX.y) + 4 * (t * i64(args, MIX.y_stride) + i * width + column)
            store_part(y, total, width - column)


@kernel
def balance(args, thread, n_threads):
    """Sinkhorn normalisation of each row's matrix: softmax of its rows, then columns and rows in turn are divided by
    their sums + `factor`: `kind` times columns, rows between. Items: rows; y has the transposed matrix."""
    times, eps, size = i64(args, KIND), np.float32(f64(args, FACTOR)), np.int64(np.sqrt(np.float64(i64(args, WIDTH))))
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for t in range(begin, end):
        x, y = f32_ptr(i64(args, A) + 4 * t * i64(args, A_STRIDE)), f32_ptr(i64(args, Y) + 4 * t * i64(args, Y_STRIDE))
        for i in range(size):
            _softmax_row(x, y, i, size, eps)
        for iteration in range(2 * times - 1):
            inner, outer = (np.int64(1), size) if iteration % 2 == 0 else (size, np.int64(1))
            for i in range(size):  # columns of the matrix are rows of y
                total = np.float32(0)
                for j in range(size):
                    total += y[i * outer + j * inner]
                for j in range(size):
                    y[i * outer + j * inner] /= total + eps


@inline
def _softmax_row(x, y, i, size, eps):
    """Softmax of row i of the matrix x, plus eps, to column i of y."""
    peak, total = x[i * size], 0.0
    for j in range(1, size):
        peak = max(peak, x[i * size + j])
    for j in range(size):
        total += math.exp(np.float64(x[i * size + j] - peak))
    for j in range(size):
        y[j * size + i] = np.float32(math.exp(np.float64(x[i * size + j] - peak)) / total) + eps


@kernel
def signed_sqrt(args, thread, n_threads):
    """y = sqrt(max(|a|, factor)) with the sign of a; a itself for 0 and NaN"""
    least = splat(f64(args, FACTOR))
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, address, _, left = _operands(args, item)
        a = load_part(address, left)
        root = copysign(sqrt(maximum(least, magnitude(a))), a)
        store_part(y, where_less(zero_f32(), magnitude(a), root, a), left)


@kernel
def scale_columns(args, thread, n_threads):
    """y = a * factor * b, with one row b for all rows"""
    factor = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _operands(args, item)
        store_part(y, load_part(a, left) * factor * load_part(b, left), left)


@kernel
def shift_columns(args, thread, n_threads):
    """y = a * factor * b + c, with one row b and one row c for all rows"""
    factor = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _operands(args, item)
        c = i64(args, SHIFT) + b - i64(args, B)
        store_part(y, load_part(a, left) * factor * load_part(b, left) + load_part(c, left), left)


@kernel
def gate_rows(args, thread, n_threads):
    """Each of `kind` parts of a row: y = a * sigmoid(g), or a * g if `factor` is not 0; g is the part's column of b.
    Items: rows times parts."""
    parts, linear = i64(args, KIND), f64(args, FACTOR) != 0
    width = i64(args, WIDTH) // parts
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)) * parts, thread, n_threads)
    for item in range(begin, end):
        t, part = item // parts, item % parts
        gate = splat(f32_ptr(i64(args, B) + 4 * t * i64(args, B_STRIDE))[part])
        factor = gate if linear else sigmoid(gate)
        y = i64(args, Y) + 4 * (t * i64(args, Y_STRIDE) + part * width)
        a = i64(args, A) + 4 * (t * i64(args, A_STRIDE) + part * width)
        for i in range(0, width, 16):
            store_part(y + 4 * i, load_part(a + 4 * i, width - i) * factor, width - i)


@kernel
def permute(args, thread, n_threads):
    """y[j] = a[b[j]], with one row b of int32 for all rows"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, _, b, left = _operands(args, item)
        row = f32_ptr(i64(args, A) + 4 * (item // _vectors(args)) * i64(args, A_STRIDE))
        for k in range(min(16, left)):
            f32_ptr(y)[k] = row[i32_ptr(b)[k]]


@kernel
def mul(args, thread, n_threads):
    """y = a * b"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _operands(args, item)
        store_part(y, load_part(a, left) * load_part(b, left), left)


@kernel
def add(args, thread, n_threads):
    """y = a + factor * b"""
    factor = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _operands(args, item)
        store_part(y, fma(factor, load_part(b, left), load_part(a, left)), left)


@kernel
def scale(args, thread, n_threads):
    """y = a * factor"""
    factor = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _operands(args, item)
        store_part(y, load_part(a, left) * factor, left)


@kernel
def softcap(args, thread, n_threads):
    """y = factor * tanh(a / factor)"""
    cap = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _operands(args, item)
        store_part(y, tanh(load_part(a, left) / cap) * cap, left)


@kernel
def clamp(args, thread, n_threads):
    """y = min(max(a, -limit), limit)"""
    highest, lowest = splat(f64(args, LIMIT)), splat(-f64(args, LIMIT))
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _operands(args, item)
        store_part(y, maximum(lowest, minimum(highest, load_part(a, left))), left)


@kernel
def softplus(args, thread, n_threads):
    """y = min(max(log(1 + exp(a + b)), factor), limit), with one row b for all rows"""
    lowest, highest = splat(f64(args, FACTOR)), splat(f64(args, LIMIT))
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _operands(args, item)
        value = softplus_of(load_part(a, left) + load_part(b, left))
        store_part(y, minimum(highest, maximum(lowest, value)), left)


@kernel
def copy(args, thread, n_threads):
    """y = a"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _operands(args, item)
        store_part(y, load_part(a, left), left)
