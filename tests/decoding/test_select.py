"""Selection from large arrays, against a full sort."""

import numpy as np
import pytest

from numflow.decoding.select import Candidates, descending, draw, greedy, largest, leading, uniform, uniforms


def test_greedy_takes_the_lowest_of_equals():
    assert greedy(np.array([1, 3, 3, 2], np.float32)) == 1


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7])
def test_largest_and_descending(count):
    values = np.array([5.0, 1.0, 5.0, 3.0, 5.0, 3.0, 9.0])
    order = sorted(range(7), key=lambda place: (-values[place], place))
    assert descending(values, count).tolist() == order[:count]
    assert largest(values, np.arange(7), count).tolist() == sorted(order[:count])
    assert descending(values, 20).tolist() == order


@pytest.mark.parametrize("count", [1, 7, 100, 156])
@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_largest_of_many_passes_over_most(count, levels):
    rng = np.random.default_rng(count)
    for size in (5000, 5001, 5015):
        values = rng.integers(0, levels, size).astype(np.float64)
        values[rng.random(size) < 0.1] = -np.inf
        order = np.argsort(-values, kind="stable")
        assert largest(values, np.arange(size), count).tolist() == sorted(order[:count].tolist())
        ids = np.flatnonzero(values > 0)
        some = ids[np.argsort(-values[ids], kind="stable")][:count]
        assert largest(values, ids, count).tolist() == sorted(some.tolist())


def test_only_the_leading_values_are_looked_at():
    values, seen = np.random.default_rng(0).random(5000), []

    def wanted(places):
        seen.append(len(places))
        held = np.flatnonzero(values[places] < 0.6)
        return int(held[0]) if len(held) else None

    places = leading(values, wanted)
    np.testing.assert_array_equal(places, np.argsort(-values)[:np.sum(values >= 0.6)])
    assert seen == [256, 1024, 4096]


def test_draw_at_the_ends():
    ids, p = np.array([4, 9]), np.array([0.5, 0.5])
    assert [draw(ids, p, u) for u in (0.0, 0.499, 0.5, 1 - 1e-16, 1.0)] == [4, 4, 9, 9, 9]


def test_random_numbers_depend_on_their_place_alone():
    def numbers(seed, index=0, number=0):
        return [uniform(seed, index, position, number) for position in range(200)]

    first = numbers(1)
    assert first == numbers(1)
    assert first == list(reversed([uniform(1, 0, position) for position in reversed(range(200))]))
    assert uniforms(1, 0, 3, 9) == first[3:12] and uniforms(2**64 - 1, 1, 5, 3, 2) == [
        uniform(2**64 - 1, 1, position, 2) for position in (5, 6, 7)]
    others = [numbers(2), numbers(1, index=1), numbers(1, number=1), numbers(2**64 - 1)]
    assert all(set(first).isdisjoint(other) for other in others)
    together = np.concatenate([first, *others])
    assert together.min() >= 0 and together.max() < 1
    assert abs(together.mean() - 0.5) < 4 / np.sqrt(12 * len(together))
    assert abs(np.corrcoef(together[:-1], together[1:])[0, 1]) < 4 / np.sqrt(len(together))


def test_candidates_stay_in_order():
    c = Candidates(np.array([2, 5, 7]), np.log([0.2, 0.3, 0.5]))
    assert c.keep(np.array([2, 0])).ids.tolist() == [2, 7]
    np.testing.assert_allclose(c.keep(np.array([True, False, True])).probabilities, [2 / 7, 5 / 7])
