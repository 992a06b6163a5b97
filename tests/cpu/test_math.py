"""The vector functions against double precision."""

import math

import numpy as np
import pytest

from numflow.cpu.runtime.access import f32_ptr, i64
from numflow.cpu.runtime.kernel import Call, kernel
from numflow.cpu.simd.float32 import (
    evens,
    keep_lanes,
    load_part,
    max_lanes,
    odds,
    store_as_f16,
    store_part,
    sum_lanes,
    zipped_high,
    zipped_low,
)
from numflow.cpu.simd.functions import exp, normal_cdf, sigmoid, softplus, tanh
from numflow.cpu.simd.vector import load_f32, store_f32


@kernel
def _functions(args, thread, n_threads):
    """x and five results, each an array of n * 16 elements."""
    n, x, y = i64(args, 0), i64(args, 1), i64(args, 2)
    for i in range(n):
        v = load_f32(x + 64 * i)
        store_f32(y + 64 * i, exp(v))
        store_f32(y + 64 * (n + i), sigmoid(v))
        store_f32(y + 64 * (2 * n + i), tanh(v))
        store_f32(y + 64 * (3 * n + i), normal_cdf(v))
        store_f32(y + 64 * (4 * n + i), softplus(v))


def _values(x):
    x = np.asarray(x, np.float32)
    padded = np.resize(x, -(-x.size // 16) * 16)
    y = np.empty((5, padded.size), np.float32)
    Call.of(None, _functions, padded.size // 16, padded, y)()
    return dict(zip(("exp", "sigmoid", "tanh", "normal_cdf", "softplus"), y[:, :x.size], strict=True))


def _everywhere(limit):
    x = np.random.default_rng(0).uniform(-limit, limit, 40000)
    return np.concatenate([x, x * 1e-3, x * 1e-9, [0.0, -0.0]]).astype(np.float32)


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


def _softplus(x):
    return math.log1p(math.exp(x))


@pytest.mark.parametrize(("name", "exact", "limit"), [
    ("exp", math.exp, 87.0), ("sigmoid", _sigmoid, 87.0), ("tanh", math.tanh, 20.0),
    ("softplus", _softplus, 87.0)])
def test_relative_error(name, exact, limit):
    x = _everywhere(limit)
    expected = np.array([exact(v) for v in x.tolist()])
    np.testing.assert_allclose(_values(x)[name], expected, rtol=2e-7, atol=1e-38)


def test_normal_cdf():
    x = _everywhere(9.0)
    expected = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    actual = _values(x)["normal_cdf"]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-7)
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


def test_ends_of_the_range():
    x = np.array([-np.inf, -1000, -88, 88.5, 1000, np.inf, np.nan], np.float32)
    y = _values(x)
    np.testing.assert_array_equal(y["exp"], [0, 0, 0, np.inf, np.inf, np.inf, np.nan])
    np.testing.assert_array_equal(y["sigmoid"][[0, 1, 4, 5, 6]], [0, 0, 1, 1, np.nan])
    np.testing.assert_array_equal(y["tanh"], [-1, -1, -1, 1, 1, 1, np.nan])
    np.testing.assert_array_equal(y["normal_cdf"][[0, 1, 4, 5, 6]], [0, 0, 1, 1, np.nan])


@kernel
def _lanes(args, thread, n_threads):
    """Partial loads and stores, shuffles and sums of the 32 floats at x."""
    x, y, count = i64(args, 0), i64(args, 1), i64(args, 2)
    a, b = load_f32(x), load_f32(x + 64)
    store_f32(y, load_part(x, count))
    store_part(y + 64, a, count)
    store_f32(y + 128, evens(a, b))
    store_f32(y + 192, odds(a, b))
    store_f32(y + 256, zipped_low(evens(a, b), odds(a, b)))
    store_f32(y + 320, zipped_high(evens(a, b), odds(a, b)))
    store_f32(y + 384, keep_lanes(a, i64(args, 3), i64(args, 4), np.float32(-1)))
    f32_ptr(y + 448)[0] = sum_lanes(a)
    f32_ptr(y + 448)[1] = max_lanes(a)


@pytest.mark.parametrize("count", [0, 1, 15, 16])
@pytest.mark.parametrize(("first", "last"), [(0, 15), (3, 3), (-70, 4), (9, 2**40), (16, 20), (-9, -1)])
def test_lanes(count, first, last):
    x = np.random.default_rng(1).standard_normal(32).astype(np.float32)
    y = np.full((8, 16), 9, np.float32)
    Call.of(None, _lanes, x, y, count, first, last)()
    lanes = np.arange(16)
    np.testing.assert_array_equal(y[0], np.where(lanes < count, x[:16], 0))
    np.testing.assert_array_equal(y[1], np.where(lanes < count, x[:16], 9))
    np.testing.assert_array_equal(y[2], x[0::2])
    np.testing.assert_array_equal(y[3], x[1::2])
    np.testing.assert_array_equal(y[4:6].ravel(), x)
    np.testing.assert_array_equal(y[6], np.where((lanes >= first) & (lanes <= last), x[:16], -1))
    assert y[7, 0] == pytest.approx(x[:16].sum(dtype=np.float64), rel=1e-5)
    assert y[7, 1] == x[:16].max()


@kernel
def _halves(args, thread, n_threads):
    n, x, y = i64(args, 0), i64(args, 1), i64(args, 2)
    for i in range(n):
        store_as_f16(y + 2 * i, f32_ptr(x)[i])


def test_float16_rounds_to_nearest_even():
    rng = np.random.default_rng(2)
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)].astype(np.float32)
    between = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, between, rng.standard_normal(5000) * 10.0 ** rng.integers(-12, 6, 5000),
                        [np.inf, -np.inf, 65519, 65520]]).astype(np.float32)
    y = np.zeros(x.size, np.float16)
    Call.of(None, _halves, x.size, x, y)()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y.view(np.uint16), x.astype(np.float16).view(np.uint16))
