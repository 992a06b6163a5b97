"""Kernels of element-wise ops (act.py)."""

import numpy as np

from numflow.cpu.elementwise.act import GELU, GELU_QUICK, GELU_TANH, RELU2, SIGMOID, SILU, TANH
from numflow.cpu.runtime.access import f32_ptr, f64, i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.float32 import fma, larger, load_part, smaller, splat, store_part
from numflow.cpu.simd.functions import normal_cdf, sigmoid, tanh
from numflow.cpu.simd.vector import inline, zero_f32

# Arguments of all kernels: y = f(a, b), where ops of one input ignore b.
HEADER, ROWS, WIDTH, Y, Y_STRIDE, A, A_STRIDE, B, B_STRIDE, KIND, FACTOR, LIMIT = range(12)
_HALF, _ONE = np.float32(0.5), np.float32(1)
_QUICK, _ROOT_2_PI, _CUBE = np.float32(1.702), np.float32((2 / np.pi) ** 0.5), np.float32(0.044715)


@inline
def _vectors(args):
    """Vectors of 16 columns in a row, the last one in part."""
    return (i64(args, WIDTH) + 15) // 16


@inline
def _items(args):
    return i64(i64(args, HEADER), i64(args, ROWS)) * _vectors(args)


@inline
def _at(args, item):
    """Addresses of an item's columns in y, a, b, and how many columns are left in the row."""
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
    if kind == TANH:
        return tanh(x)
    positive = larger(zero_f32(), x)
    return positive * positive if kind == RELU2 else positive


@kernel
def act(args, thread, n_threads):
    """y = act(a)"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, activated(i64(args, KIND), load_part(a, left)), left)


@kernel
def act_mul(args, thread, n_threads):
    """y = act(a) * b"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _at(args, item)
        store_part(y, activated(i64(args, KIND), load_part(a, left)) * load_part(b, left), left)


@kernel
def swiglu_clamp(args, thread, n_threads):
    """y = g * sigmoid(factor * g) * (u + 1), where g = min(a, limit) and u = clip(b, -limit, limit)"""
    limit, lowest, alpha = splat(f64(args, LIMIT)), splat(-f64(args, LIMIT)), f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _at(args, item)
        gate, up = smaller(limit, load_part(a, left)), larger(lowest, smaller(limit, load_part(b, left)))
        store_part(y, gate * sigmoid(gate * alpha) * (up + _ONE), left)


@kernel
def gate_rows(args, thread, n_threads):
    """y = a * sigmoid(b), where b has one column"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        gate = f32_ptr(i64(args, B) + 4 * (item // _vectors(args)) * i64(args, B_STRIDE))[0]
        store_part(y, load_part(a, left) * sigmoid(splat(gate)), left)


@kernel
def add(args, thread, n_threads):
    """y = a + factor * b"""
    factor = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _at(args, item)
        store_part(y, fma(factor, load_part(b, left), load_part(a, left)), left)


@kernel
def scale(args, thread, n_threads):
    """y = a * factor"""
    factor = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, load_part(a, left) * factor, left)


@kernel
def softcap(args, thread, n_threads):
    """y = factor * tanh(a / factor)"""
    cap = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, tanh(load_part(a, left) / cap) * cap, left)


@kernel
def clamp(args, thread, n_threads):
    """y = min(max(a, -limit), limit)"""
    highest, lowest = splat(f64(args, LIMIT)), splat(-f64(args, LIMIT))
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, larger(lowest, smaller(highest, load_part(a, left))), left)


@kernel
def copy(args, thread, n_threads):
    """y = a"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, load_part(a, left), left)
