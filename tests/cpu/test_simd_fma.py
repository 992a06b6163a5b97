"""The emulated fused multiply-add against fractions and, if this machine has it, the instruction."""

import functools
import itertools
import math
from fractions import Fraction

import numba
import numpy as np
import pytest

from numflow.cpu.simd.float32 import fma
from numflow.cpu.simd.fma import emulated
from numflow.cpu.simd.isa import has_fma
from numflow.cpu.simd.value import Value
from numflow.cpu.simd.vector import f32x16, load_f32, op, store_f32

_MAX, _NORMAL, _LEAST = float(np.finfo(np.float32).max), 2.0**-126, 2.0**-149


@op(f32x16, f32x16, f32x16, f32x16)
def _emulated(builder, a, b, c):
    """The function that kernels call without the instruction."""
    return emulated(builder, a, b, c)


@op(f32x16, f32x16, f32x16, f32x16)
def _emulated_by_4(builder, a, b, c):
    """The same, 4 lanes at a time."""
    vectors = [Value(builder, v) for v in (a, b, c)]
    parts = [emulated(builder, *(v.part(i, 4).llvm for v in vectors)) for i in range(0, 16, 4)]
    first, second, third, fourth = (Value(builder, part) for part in parts)
    return first.join(second).join(third.join(fourth)).llvm


@functools.cache
def _compiled(multiply_add):
    """Compiled by each process: Numba's cache of a test would outlive changes of simd/fma.py."""
    @numba.cfunc("void(int64, int64, int64, int64, int64)")
    def elements(end, a, b, c, y):
        for i in range(0, end, 64):
            store_f32(y + i, multiply_add(load_f32(a + i), load_f32(b + i), load_f32(c + i)))
    return elements


def _run(multiply_add, a, b, c):
    count = -(-len(a) // 16) * 16
    a, b, c = (np.resize(np.asarray(x, np.float32), count) for x in (a, b, c))
    y = np.empty(count, np.float32)
    _compiled(multiply_add).ctypes(y.nbytes, *(x.ctypes.data for x in (a, b, c, y)))
    return y


def _same(found, expected):
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def _exact(a, b, c):
    """a * b + c of three floats, rounded once to float32."""
    special = a * b + c  # in double: correct for NaN, infinities and exact zeros, with their signs
    if not math.isfinite(special) or not (exact := Fraction(a) * Fraction(b) + Fraction(c)):
        return special
    scale = Fraction(2) ** (max(math.frexp(special)[1], -125) - 24)  # a unit in the last place of the result
    size = float(round(abs(exact) / scale) * scale)
    return math.copysign(size if size <= _MAX else math.inf, special)


def _check(a, b, c, rounded_twice_differ=0):
    """rounded_twice_differ: least number of elements for which rounding twice would give other bits."""
    a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
    expected = np.array([_exact(*v) for v in zip(a.tolist(), b.tolist(), c.tolist())], np.float32)
    with np.errstate(all="ignore"):
        twice = np.float32(a.astype(np.float64) * b + c)
    assert np.count_nonzero(twice != expected) >= rounded_twice_differ
    for multiply_add in (_emulated, _emulated_by_4):
        _same(_run(multiply_add, a, b, c)[:len(a)], expected)
    # The same beside zeros, which make all lanes take the slow path.
    with_zeros = [np.pad(np.resize(x, (-(-len(a) // 3), 3)), ((0, 0), (0, 1))).ravel() for x in (a, b, c, expected)]
    _same(_run(_emulated, *with_zeros[:3])[:with_zeros[3].size], with_zeros[3])


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


def _almost_powers_of_2(rng, count):
    """Pairs of 24-bit values from 1 to 2 whose products are 2, within 2 parts in 2^27."""
    a = rng.integers(1 << 23, 1 << 24, 16 * count)
    b = ((1 << 47) + a // 2) // a
    near = np.flatnonzero(abs(a * b - (1 << 47)) < 1 << 20)[:count]
    return a[near] * 2.0**-23, b[near] * 2.0**-23


@pytest.mark.parametrize("exponent", [0, 104, -100, -126, -140, -149])
def test_almost_half_a_unit(exponent):
    """c is a multiple of the unit 2^exponent, a * b almost half a unit: next to a tie, on either side.

    Exponent 104 gives the largest values, with some infinite results; -149 gives subnormal values.
    """
    rng = np.random.default_rng(exponent + 200)
    a, b = _almost_powers_of_2(rng, 2000)
    units = np.where(rng.random(len(a)) < 0.2, (1 << 24) - 1, rng.integers(1 << 23, 1 << 24, len(a)))
    units = np.where(rng.random(len(a)) < 0.2, 1 << 23, units) >> np.maximum(rng.integers(-20, 24, len(a)), 0)
    low = exponent // 2
    a, b, c = a * 2.0**low, b * 2.0 ** (exponent - 2 - low), units * 2.0**exponent
    _check(a * _signs(rng, len(a)), b, c * _signs(rng, len(a)), rounded_twice_differ=10)


def test_products_that_are_ties():
    """a * b has 25 bits and is halfway between two float32; c is 0 or tiny."""
    rng, count = np.random.default_rng(7), 3000
    a, b = rng.integers(1 << 11, 1 << 12, count) | 1, rng.integers(1 << 12, 1 << 13, count) | 1
    c = rng.choice([0, 2.0**-30, 2.0**-60, 2.0**-100, 2.0**-149], count)
    _check(a * _signs(rng, count), b, c * _signs(rng, count), rounded_twice_differ=400)


@pytest.mark.parametrize(("a", "b", "c"), [
    (1 + 2.0**-20, (1 - 2.0**-20) * 2.0**-24, 1 + 2.0**-23),
    (2.0**-100, 1.5 * 2.0**-49, 0.0),
    (0x8007F5 * 2.0**-98, -0xFFF017 * 2.0**-99, 2.0**-126),  # rounded twice, this would be 2^-126
])
def test_one_lane_of_sixteen(a, b, c):
    """A doubtful lane is detected in any position, beside lanes that are not doubtful."""
    everywhere = np.full((3, 16, 16), [[[1.0]], [[0.5]], [[1.0]]], np.float32)
    for lane in range(16):
        everywhere[:, lane, lane] = a, b, c
    _check(*everywhere.reshape(3, 256), rounded_twice_differ=16 * (c > 0))


@pytest.mark.skipif(not has_fma(), reason="this machine has no such instruction")
def test_like_the_instruction():
    rng, count = np.random.default_rng(2), 1 << 19
    few = [np.float32(rng.integers(-255, 256, count)) * np.float32(2.0) ** rng.integers(-9, 9, count) for _ in range(3)]
    for a, b, c in ([_random_bits(rng, count) for _ in range(3)], few, (few[0], rng.standard_normal(count), few[2])):
        _same(_run(_emulated, a, b, c), _run(fma, a, b, c))
