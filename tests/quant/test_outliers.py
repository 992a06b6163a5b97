"""Outliers removed from a matrix by the original's rules."""

import numpy as np
import pytest

from numflow.errors import RequestError
from numflow.quant import decode, encode, encode_with_outliers, find
from numflow.quant.outliers import Sparse, _soft_limits, extremes, split


def weights(rows=64, columns=256, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.02).astype(np.float32)


def test_planted_outliers_are_moved_and_nothing_is_lost():
    x = weights()
    x[3, 7], x[3, 9], x[60, 255] = 1.5, -2, 1.9
    dense, sparse = split(x, 3 / x.size)
    assert list(zip(sparse.rows, sparse.columns)) == [(3, 7), (3, 9), (60, 255)]
    np.testing.assert_array_equal(sparse.values, np.float32([1.5, -2, 1.9]))
    assert dense[3, 7] == dense[3, 9] == dense[60, 255] == 0
    assert np.abs(dense).max() < 0.1
    np.testing.assert_array_equal(sparse.add_to(dense.copy()), x)


def test_the_share_is_kept():
    x = weights(256, 512)
    for ratio in (0.001, 0.01, 0.05):
        low, high = _soft_limits(x, ratio)
        outside = int(np.sum((x < low) | (x > high)))
        assert ratio / 2 * x.size < outside <= ratio * x.size
        assert outside <= len(split(x, ratio)[1].values) <= outside + x.size // 32
    assert len(split(x, 0)[1].values) == 0


def test_the_lighter_end_goes_first():
    x = np.zeros((1, 3200), np.float32)
    x[0, 0], x[0, 10:20] = -1, 1
    mask = extremes(x, 1 / 3200)  # may move one weight: the single one below, not the ten above
    assert list(np.flatnonzero(mask)) == [0]


def test_one_weight_alone_in_its_block():
    x = np.zeros((1, 6400), np.float32)
    x[0] = np.tile(np.linspace(-0.3, 0.3, 32, dtype=np.float32), 200)
    x[0, 5], x[0, 100:164] = 1, np.linspace(-0.4, 1, 64)  # a wide block keeps its weights, a lone one is moved
    assert list(np.flatnonzero(extremes(x, 1e-9))) == [5]


@pytest.mark.parametrize("name", ["q3h", "q4", "q3h_b64t1"])
def test_quantised_with_outliers_apart(name):
    scheme, x = find(name), weights()
    at = np.random.default_rng(3).integers(0, x.size, 60)
    x.ravel()[at] *= 40
    raw, sparse = encode_with_outliers(x, scheme, 0.01)
    together = sparse.add_to(decode(raw, scheme, 256))
    np.testing.assert_allclose(together[sparse.rows, sparse.columns], x[sparse.rows, sparse.columns], rtol=1e-6)
    small = np.abs(x) < 0.1
    plain = decode(encode(x, scheme), scheme, 256)
    assert np.std((together - x)[small]) < 0.5 * np.std((plain - x)[small])
    right = weights(256, 3, seed=2)
    np.testing.assert_allclose(decode(raw, scheme, 256) @ right + sparse @ right, together @ right, atol=1e-6)


def test_no_share_no_outliers():
    raw, sparse = encode_with_outliers(weights(), find("q3h"), 0)
    np.testing.assert_array_equal(raw, encode(weights(), find("q3h")))
    assert len(sparse.values) == 0


def test_sparse_product_and_bytes():
    x, mask = weights(20, 96), np.random.default_rng(1).random((20, 96)) < 0.05
    sparse, right = Sparse.of(x, mask), weights(96, 3, seed=2)
    np.testing.assert_allclose(sparse @ right, np.where(mask, x, 0) @ right, atol=1e-7)
    assert sparse.nbytes == 4 * 21 + 6 * mask.sum()
    assert (np.diff(sparse.rows) >= 0).all()


def test_a_share_out_of_range_is_refused():
    for ratio in (-0.1, 0.06, float("nan")):
        with pytest.raises(RequestError, match="share of outliers should be 0 to 0.05"):
            split(weights(), ratio)
    with pytest.raises(RequestError, match="do not divide 40 columns"):
        split(weights(2, 40), 0.01)
