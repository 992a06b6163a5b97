"""Element-wise ops: activations, sums, scales (`act`, `act_mul`, `gate_rows`, `add`, `scale`, `softcap`, `clamp`,
`copy`).

Threads share rows times vectors of 16 columns, so that a single token's row is shared too.
"""

import numpy as np

from numflow.cpu.kernel import Call, f32_ptr, f64, i64, kernel, share
from numflow.cpu.math import normal_cdf, sigmoid, tanh
from numflow.cpu.simd import inline, zero_f32
from numflow.cpu.simd_float import fma, larger, load_part, smaller, splat, store_part
from numflow.ops import Step, param

# Arguments of all kernels: y = f(a, b), where ops of one input ignore b.
HEADER, ROWS, WIDTH, Y, Y_STRIDE, A, A_STRIDE, B, B_STRIDE, KIND, FACTOR, LIMIT = range(12)

RELU, RELU2, GELU, GELU_TANH, GELU_QUICK, SILU, SIGMOID, TANH = range(8)
KINDS = {"relu": RELU, "relu2": RELU2, "gelu": GELU, "gelu_tanh": GELU_TANH, "gelu_quick": GELU_QUICK, "silu": SILU,
         "sigmoid": SIGMOID, "tanh": TANH}
_HALF, _ONE = np.float32(0.5), np.float32(1)
_QUICK, _ROOT_2_PI, _CUBE = np.float32(1.702), np.float32((2 / np.pi) ** 0.5), np.float32(0.044715)


def act(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D], the same or apart."""
    return [_bind(_act, step, ctx, KINDS[param(step, "kind")])]


def act_mul(step: Step, ctx) -> list[Call]:
    """gate, up, y f32 [rows, D]; y may be either."""
    if param(step, "kind") == "swiglu_clamp":
        return [_bind(_swiglu_clamp, step, ctx, 0, param(step, "alpha"), param(step, "limit"))]
    return [_bind(_act_mul, step, ctx, KINDS[param(step, "kind")])]


def gate_rows(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]; gate f32 [rows, 1]."""
    return [_bind(_gate_rows, step, ctx)]


def add(step: Step, ctx) -> list[Call]:
    """a, b, y f32 [rows, D]; y may be either."""
    return [_bind(_add, step, ctx, 0, param(step, "scale"))]


def scale(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_scale, step, ctx, 0, param(step, "scale"))]


def softcap(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_softcap, step, ctx, 0, param(step, "cap"))]


def clamp(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_clamp, step, ctx, 0, 0.0, param(step, "limit"))]


def copy(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_copy, step, ctx)]


def _bind(fn, step, ctx, kind=0, factor=0.0, limit=0.0):
    a, y = step.inputs[0], step.outputs[0]
    b = step.inputs[1] if len(step.inputs) > 1 else a
    return Call.of(step, fn, ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(a), *ctx.view(b), kind,
                   float(factor), float(limit))


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
def _act(args, thread, n_threads):
    """y = act(a)"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, activated(i64(args, KIND), load_part(a, left)), left)


@kernel
def _act_mul(args, thread, n_threads):
    """y = act(a) * b"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _at(args, item)
        store_part(y, activated(i64(args, KIND), load_part(a, left)) * load_part(b, left), left)


@kernel
def _swiglu_clamp(args, thread, n_threads):
    """y = g * sigmoid(factor * g) * (u + 1), where g = min(a, limit) and u = clip(b, -limit, limit)"""
    limit, lowest, alpha = splat(f64(args, LIMIT)), splat(-f64(args, LIMIT)), f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _at(args, item)
        gate, up = smaller(limit, load_part(a, left)), larger(lowest, smaller(limit, load_part(b, left)))
        store_part(y, gate * sigmoid(gate * alpha) * (up + _ONE), left)


@kernel
def _gate_rows(args, thread, n_threads):
    """y = a * sigmoid(b), where b has one column"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        gate = f32_ptr(i64(args, B) + 4 * (item // _vectors(args)) * i64(args, B_STRIDE))[0]
        store_part(y, load_part(a, left) * sigmoid(splat(gate)), left)


@kernel
def _add(args, thread, n_threads):
    """y = a + factor * b"""
    factor = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, b, left = _at(args, item)
        store_part(y, fma(factor, load_part(b, left), load_part(a, left)), left)


@kernel
def _scale(args, thread, n_threads):
    """y = a * factor"""
    factor = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, load_part(a, left) * factor, left)


@kernel
def _softcap(args, thread, n_threads):
    """y = factor * tanh(a / factor)"""
    cap = f64(args, FACTOR)
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, tanh(load_part(a, left) / cap) * cap, left)


@kernel
def _clamp(args, thread, n_threads):
    """y = min(max(a, -limit), limit)"""
    highest, lowest = splat(f64(args, LIMIT)), splat(-f64(args, LIMIT))
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, larger(lowest, smaller(highest, load_part(a, left))), left)


@kernel
def _copy(args, thread, n_threads):
    """y = a"""
    begin, end = share(_items(args), thread, n_threads)
    for item in range(begin, end):
        y, a, _, left = _at(args, item)
        store_part(y, load_part(a, left), left)
