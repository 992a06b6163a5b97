"""a * b + c without the instruction for it, against fractions and, where this machine has it, the instruction."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from numflow.cpu import simd_fma
from numflow.cpu.access import i64
from numflow.cpu.kernel import Call, kernel
from numflow.cpu.simd import f32x16, load_f32, op, store_f32
from numflow.cpu.simd_float import fma
from numflow.cpu.simd_isa import has_fma
from numflow.cpu.simd_value import Value

_MAX, _NORMAL, _LEAST = float(np.finfo(np.float32).max), 2.0**-126, 2.0**-149


@op(f32x16, f32x16, f32x16, f32x16)
def _emulated(builder, a, b, c):
    """What kernels call where there is no instruction."""
    return simd_fma.emulated(builder, a, b, c)


@op(f32x16, f32x16, f32x16, f32x16)
def _emulated_by_4(builder, a, b, c):
    """The same, 4 lanes at a time."""
    vectors = [Value(builder, v) for v in (a, b, c)]
    parts = [simd_fma.emulated(builder, *(v.part(i, 4).llvm for v in vectors)) for i in range(0, 16, 4)]
    first, second, third, fourth = (Value(builder, part) for part in parts)
    return first.join(second).join(third.join(fourth)).llvm


@kernel
def _without(args, thread, n_threads):
    """n * 16 elements each: y = a * b + c."""
    a, b, c, y = i64(args, 1), i64(args, 2), i64(args, 3), i64(args, 4)
    for i in range(0, 64 * i64(args, 0), 64):
        store_f32(y + i, _emulated(load_f32(a + i), load_f32(b + i), load_f32(c + i)))


@kernel
def _without_by_4(args, thread, n_threads):
    """The same, 4 lanes at a time."""
    a, b, c, y = i64(args, 1), i64(args, 2), i64(args, 3), i64(args, 4)
    for i in range(0, 64 * i64(args, 0), 64):
        store_f32(y + i, _emulated_by_4(load_f32(a + i), load_f32(b + i), load_f32(c + i)))


@kernel
def _with(args, thread, n_threads):
    """The same by what kernels use on this machine."""
    a, b, c, y = i64(args, 1), i64(args, 2), i64(args, 3), i64(args, 4)
    for i in range(0, 64 * i64(args, 0), 64):
        store_f32(y + i, fma(load_f32(a + i), load_f32(b + i), load_f32(c + i)))


def _run(function, a, b, c):
    count = -(-len(a) // 16)
    padded = [np.resize(np.asarray(x, np.float32), 16 * count) for x in (a, b, c)]
    y = np.empty(16 * count, np.float32)
    Call.of(None, function, count, *padded, y)()
    return y[:len(a)]


def _same(found, expected):
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def _exact(a, b, c):
    """a * b + c of three floats, rounded once to float32."""
    special = a * b + c  # in double: right for NaN, infinities and exact zeros, with their signs
    if not math.isfinite(special) or not (exact := Fraction(a) * Fraction(b) + Fraction(c)):
        return special
    scale = Fraction(2) ** (max(math.frexp(special)[1], -125) - 24)  # a unit in the last place of the result
    size = float(round(abs(exact) / scale) * scale)
    return math.copysign(size if size <= _MAX else math.inf, special)


def _check(a, b, c, rounded_twice_differ=0):
    """rounded_twice_differ: of at least so many elements."""
    a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
    expected = np.array([_exact(*v) for v in zip(a.tolist(), b.tolist(), c.tolist())], np.float32)
    with np.errstate(all="ignore"):
        twice = np.float32(a.astype(np.float64) * b + c)
    assert np.count_nonzero(twice != expected) >= rounded_twice_differ
    _same(_run(_without, a, b, c), expected)
    _same(_run(_without_by_4, a, b, c), expected)


def _random_bits(rng, count):
    return rng.integers(0, 1 << 32, count, np.uint32).view(np.float32)


def _signs(rng, count):
    return rng.choice([-1.0, 1.0], count)


def test_special_values():
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, _MAX, -_MAX, _NORMAL, -_NORMAL, _LEAST, -_LEAST,
              _NORMAL - _LEAST, 1 + 2.0**-23, 3.0, 0.5]
    _check(*zip(*itertools.product(values, repeat=3)))


def test_random_bits():
    rng = np.random.default_rng(0)
    _check(*(_random_bits(rng, 4000) for _ in range(3)))


def test_random_numbers_of_one_size():
    rng = np.random.default_rng(1)
    _check(*(rng.standard_normal(4000) for _ in range(3)))


@pytest.mark.parametrize("exponent", [0, 104, -100, -126, -140, -149])
def test_almost_half_a_unit(exponent):
    """c is a number of units 2^exponent, a * b half a unit less one part in 2^24 .. 2^46: next to a tie from any side.

    Exponent 104 is of the largest numbers, some results are infinite; -149 of denormal ones.
    """
    rng, count = np.random.default_rng(exponent + 200), 2000
    near, low = 2.0 ** -rng.integers(12, 24, count), exponent // 2
    units = np.where(rng.random(count) < 0.2, (1 << 24) - 1, rng.integers(1 << 23, 1 << 24, count))
    units = np.where(rng.random(count) < 0.2, 1 << 23, units) >> np.maximum(rng.integers(-20, 24, count), 0)
    a, b = (1 + near) * 2.0**low, (1 - near) * 2.0 ** (exponent - 1 - low)
    _check(a * _signs(rng, count), b, units * 2.0**exponent * _signs(rng, count), rounded_twice_differ=200)


def test_products_that_are_ties():
    """a * b has 25 bits and lies between two float32; c is 0 or next to nothing."""
    rng, count = np.random.default_rng(7), 3000
    a, b = rng.integers(1 << 11, 1 << 12, count) | 1, rng.integers(1 << 12, 1 << 13, count) | 1
    c = rng.choice([0, 2.0**-30, 2.0**-60, 2.0**-100, 2.0**-149], count)
    _check(a * _signs(rng, count), b, c * _signs(rng, count), rounded_twice_differ=400)


def test_one_lane_of_sixteen():
    """A doubtful lane is found wherever it is, and its neighbours keep their results."""
    a, b, c = np.ones((3, 18, 16), np.float32)
    b *= np.float32(0.7)
    for lane in range(16):
        a[lane, lane], b[lane, lane], c[lane, lane] = 1 + 2.0**-20, (1 - 2.0**-20) * 2.0**-24, 1 + 2.0**-23
    a[16], b[17], c[17] = 2.0**-100, 2.0**-149, 0
    _check(a.ravel(), b.ravel(), c.ravel(), rounded_twice_differ=16)


@pytest.mark.skipif(not has_fma(), reason="this machine has no such instruction")
def test_like_the_instruction():
    rng, count = np.random.default_rng(2), 1 << 19
    few = [np.float32(rng.integers(-255, 256, count)) * np.float32(2.0) ** rng.integers(-9, 9, count) for _ in range(3)]
    for a, b, c in ([_random_bits(rng, count) for _ in range(3)], few, (few[0], rng.standard_normal(count), few[2])):
        _same(_run(_without, a, b, c), _run(_with, a, b, c))
