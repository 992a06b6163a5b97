"""Sampling weights: the same bits on every device."""

import numpy as np
import pytest

from numflow.decoding.choice import Choice, draws, encode
from numflow.decoding.select import Candidates, draw
from numflow.decoding.weights import LEAST, UNIT, fraction, part, weigh
from numflow.errors import RequestError


def test_weights_are_e_to_the_depth_in_units():
    depths = -30 * np.random.default_rng(0).random(200_000).astype(np.float32)
    weights, exact = weigh(depths.copy()), np.exp(depths.astype(np.float64))
    assert weights.dtype == np.float32
    assert (weights / UNIT == np.rint(weights / UNIT)).all()
    np.testing.assert_allclose(weights, exact, rtol=7e-7, atol=UNIT)
    assert weights[depths < -23].max() == 0


def test_the_best_one_weighs_one_and_what_is_far_nothing():
    assert weigh(np.array([0, -0.0, LEAST, -1e30, -np.inf], np.float32)).tolist() == [1, 1, 0, 0, 0]
    assert weigh(np.zeros(0, np.float32)).tolist() == []


@pytest.mark.parametrize("count", [32_767, 32_769, 150_000])
def test_a_weight_does_not_depend_on_its_place(count):
    depths = -20 * np.random.default_rng(count).random(count).astype(np.float32)
    some = np.random.default_rng(1).permutation(count)[:3000]
    assert weigh(depths.copy())[some].tolist() == weigh(depths[some]).tolist()


def test_sums_are_exact_in_any_order():
    weights = weigh(-15 * np.random.default_rng(2).random(1 << 18).astype(np.float32))
    exact = sum((weights / UNIT).astype(np.int64).tolist())
    assert np.sum(weights, dtype=np.float64) / UNIT == np.cumsum(weights[::-1], dtype=np.float64)[-1] / UNIT == exact


@pytest.mark.parametrize("value", [0.0, 1e-12, 0.3, 0.95, 1 - 1e-12, 1.0])
def test_a_part_is_a_whole_number_of_units(value):
    weights, total = np.ones(3, np.float32), 1234567 * UNIT
    assert part(weights, total, value) == 1234567 * fraction(value) // 2**32 * UNIT <= value * total
    assert part(weights.astype(np.float64), total, value) == value * total


def test_drawing_at_borders():
    """With weights of 3 and 5 units, the first id is sampled for 3/8 of all random numbers."""
    ids, weights = np.array([4, 9]), np.array([3, 5], np.float32)
    assert [draw(ids, weights, u) for u in (0, 3 / 8 - 2**-32, 3 / 8, 1 - 2**-32, 1)] == [4, 4, 9, 9, 9]
    assert Candidates(ids, np.zeros(2, np.float32)).weights.dtype == np.float32


def test_random_numbers_of_several_steps():
    choices = [Choice(0.8, 0.25, (), (0.5, 0.75)), Choice()]
    assert draws(choices, 3, 4).tolist() == [[1 << 30, 1 << 31, 3 << 30, 0], [0, 0, 0, 0]]
    assert draws(choices, 1, 4).tolist() == [[1 << 30, 0, 0, 0], [0, 0, 0, 0]]
    with pytest.raises(RequestError, match="4 steps at once need as many random numbers, a choice has 3"):
        draws(choices, 4, 8)
    with pytest.raises(RequestError, match="3 rows cannot be picked from by 2 choices"):
        encode(choices, 3)
