"""Picking tokens: what may be drawn, and that drawn frequencies follow the probabilities."""

import numpy as np
import pytest

from numflow.decoding.sampler import Sampler
from numflow.decoding.settings import Sampling
from numflow.errors import RequestError

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def allowed(**settings):
    ids, probabilities = Sampler(Sampling(**{"temperature": 1.0, **settings})).distribution(LOGITS)
    assert probabilities.sum() == pytest.approx(1)
    return dict(zip(ids.tolist(), np.round(probabilities, 4).tolist(), strict=True))


def test_greedy_takes_the_lowest_of_equals():
    assert Sampler(Sampling()).pick(np.array([0, 5, 5], np.float32)) == 1
    assert Sampler(Sampling(temperature=2.0, top_k=1)).pick(np.array([0, 5, 5], np.float32)) == 1


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.25, 4: 0.2}),
    ({"top_k": 2}, {1: 0.6154, 3: 0.3846}),
    ({"top_k": 99}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.25, 4: 0.2}),
    ({"top_p": 0.39}, {1: 1.0}),
    ({"top_p": 0.6}, {1: 0.6154, 3: 0.3846}),
    ({"top_p": 0.86}, {1: 0.4211, 3: 0.2632, 4: 0.2105, 0: 0.1053}),
    ({"min_p": 0.45}, {1: 0.4706, 3: 0.2941, 4: 0.2353}),
    ({"top_k": 3, "top_p": 0.7}, {1: 0.6154, 3: 0.3846}),  # 0.4 + 0.25 of 0.85 reach 0.7
    ({"temperature": 0.5, "top_k": 2}, {1: 0.7191, 3: 0.2809}),
])
def test_filters_by_hand(settings, expected):
    assert allowed(**settings) == expected


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.8}, {"temperature": 0.7}])
def test_frequencies_follow_the_probabilities(settings):
    sampler, draws = Sampler(Sampling(**{"temperature": 1.0, "seed": 7, **settings})), 4000
    counts = np.bincount([sampler.pick(LOGITS) for _ in range(draws)], minlength=5)
    ids, probabilities = sampler.distribution(LOGITS)
    expected = np.zeros(5)
    expected[ids] = probabilities
    assert counts[expected == 0].sum() == 0
    assert np.all(np.abs(counts - draws * expected) < 4.5 * np.sqrt(draws * expected * (1 - expected)) + 1)


def test_the_seed_decides():
    def picks(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.pick(LOGITS) for _ in range(50)]

    assert picks(1) == picks(1) != picks(2)
    assert picks(None) != picks(None)


@pytest.mark.parametrize(("settings", "message"), [
    ({"temperature": -0.1}, "temperature should be a number from 0, is -0.1"),
    ({"temperature": float("nan")}, "temperature"), ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "hot"}, "temperature"), ({"top_k": -1}, "top_k"), ({"top_k": 2.5}, "top_k"),
    ({"top_p": 0.0}, "top_p should be above 0"), ({"top_p": 1.1}, "top_p"), ({"min_p": 1.0}, "min_p"),
    ({"min_p": -0.1}, "min_p"), ({"seed": -1}, "seed"), ({"seed": "x"}, "seed"),
])
def test_bad_settings(settings, message):
    with pytest.raises(RequestError, match=message):
        Sampling(**{"temperature": 1.0, **settings})


@pytest.mark.parametrize("settings", [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_without_a_temperature_contradict(settings):
    with pytest.raises(RequestError, match="has no effect at temperature 0"):
        Sampling(**settings)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers(bad):
    with pytest.raises(RequestError, match="not finite"):
        Sampler(Sampling()).pick(np.array([0, bad, 1], np.float32))


def test_masked_logits_are_never_drawn():
    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    assert {sampler.pick(logits) for _ in range(40)} == {1, 3}
