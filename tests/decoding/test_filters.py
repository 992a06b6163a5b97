"""Filters on a vocabulary of five words, computed by hand, and against the published definitions with a full sort."""

import math

import numpy as np
import pytest

from numflow.decoding import filters
from numflow.decoding.select import Candidates

WORDS = np.array([0.1, 0.4, 0.05, 0.25, 0.2])


def five(p=WORDS):
    return Candidates(np.arange(len(p)), np.log(p) + 3)


def left(c):
    assert np.all(np.diff(c.ids) > 0)
    return dict(zip(c.ids.tolist(), np.round(c.probabilities, 4).tolist(), strict=True))


@pytest.mark.parametrize(("function", "value", "expected"), [
    (filters.temperature, 0.5, {0: 0.0364, 1: 0.5818, 2: 0.0091, 3: 0.2273, 4: 0.1455}),
    (filters.top_k, 2, {1: 0.6154, 3: 0.3846}),
    (filters.top_k, 99, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.25, 4: 0.2}),
    (filters.top_p, 0.39, {1: 1.0}),
    (filters.top_p, 0.6, {1: 0.6154, 3: 0.3846}),
    (filters.top_p, 0.86, {0: 0.1053, 1: 0.4211, 3: 0.2632, 4: 0.2105}),
    (filters.min_p, 0.45, {1: 0.4706, 3: 0.2941, 4: 0.2353}),
    (filters.min_p, 0.99, {1: 1.0}),
    # sorted 0.4 0.25 0.2 0.1 0.05; differences 0.15 0.05 0.1 0.05; bends 0.1 0.05 0.05, cumulated 0.5 0.75 1
    (filters.tail_free, 0.4, {1: 1.0}),
    (filters.tail_free, 0.6, {1: 0.6154, 3: 0.3846}),
    (filters.tail_free, 0.9, {1: 0.4706, 3: 0.2941, 4: 0.2353}),
    # entropy 1.4149; surprise 2.303 0.916 2.996 1.386 1.609; nearest are 3, 4, 1, 0, 2
    (filters.typical, 0.2, {3: 1.0}),
    (filters.typical, 0.4, {3: 0.5556, 4: 0.4444}),
    (filters.typical, 0.8, {1: 0.4706, 3: 0.2941, 4: 0.2353}),
    (filters.surprise_limit, 2.1, {1: 0.6154, 3: 0.3846}),
    (filters.surprise_limit, 0.1, {1: 1.0})])
def test_by_hand(function, value, expected):
    assert left(function(five(), value)) == expected


def naive_tail_free(p, z):
    order = np.argsort(-p, kind="stable")
    bends = np.abs(np.diff(p[order], 2))
    return order[: 1 + int(np.sum(np.cumsum(bends / bends.sum()) <= z))]


def naive_typical(p, mass):
    entropy = -np.sum(p * np.log(p))
    order = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
    return order[: 1 + int(np.sum(np.cumsum(p[order])[:-1] < mass))]


def naive_top_p(p, mass):
    order = np.argsort(-p, kind="stable")
    return order[: 1 + int(np.sum(np.cumsum(p[order])[:-1] < mass))]


def naive_min_p(p, share):
    return np.flatnonzero(p >= share * p.max())


@pytest.mark.parametrize(("function", "naive", "values"), [
    (filters.tail_free, naive_tail_free, (0.3, 0.9, 0.95, 0.999)),
    (filters.typical, naive_typical, (0.2, 0.9, 0.99)),
    (filters.top_p, naive_top_p, (0.3, 0.9, 0.999)), (filters.min_p, naive_min_p, (0.001, 0.2))])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 12.0])
def test_against_a_full_sort(function, naive, values, spread):
    scores = spread * np.random.default_rng(1).standard_normal(3000)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    for value in values:
        found = function(Candidates(np.arange(3000) * 2, scores), value)
        assert found.ids.tolist() == (2 * np.sort(naive(p, value))).tolist()


def test_the_whole_is_seldom_sorted(monkeypatch):
    """A peaked distribution, as of models: 256 values are enough for every filter."""
    seen = []
    original = filters.leading
    monkeypatch.setattr(filters, "leading", lambda values, wanted: original(
        values, lambda places: (seen.append(len(places)), wanted(places))[1]))
    c = Candidates(np.arange(30000), -1.5 * np.log(np.arange(1, 30001)))
    filters.top_p(c, 0.9), filters.tail_free(c, 0.99), filters.typical(c, 0.9)
    assert seen == [256, 256, 256]


@pytest.mark.parametrize("function", [filters.top_p, filters.tail_free, filters.typical])
@pytest.mark.parametrize("value", [0.01, 0.5, math.nextafter(1, 0)])
@pytest.mark.parametrize("p", [[1.0], [0.5, 0.5], [0.2] * 5, np.ones(1000) / 1000, [0.7, 0.3], [0.5, 0.3, 0.1]])
def test_something_is_always_left(function, value, p):
    assert 1 <= len(function(five(np.array(p)), value).ids) <= len(p)


def test_a_tail_needs_a_bend():
    assert len(filters.tail_free(five(np.ones(1000) / 1000), 0.5).ids) == 1000
    assert len(filters.tail_free(five(np.array([0.6, 0.4])), 0.5).ids) == 2


def test_the_exponent_of_zipfs_law():
    for exponent in (0.5, 1.0, 1.7):
        c = Candidates(np.arange(500), np.random.default_rng(0).permutation(-exponent * np.log(np.arange(1, 501))))
        assert filters.zipf_exponent(c) == pytest.approx(exponent)
    assert filters.zipf_exponent(five(np.array([1.0]))) == math.inf
