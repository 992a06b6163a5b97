"""Sampler: allowed tokens, and sampled frequencies against probabilities."""

import numpy as np
import pytest

from numflow.decoding.constraints import Constraints
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


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, [0.1, 0.4, 0.05, 0.25, 0.2]), ({"temperature": 0.5}, [0.0364, 0.5818, 0.0091, 0.2273, 0.1455]),
    ({"top_k": 3}, [0, 0.4706, 0, 0.2941, 0.2353]), ({"top_p": 0.6}, [0, 0.6154, 0, 0.3846, 0]),
    ({"min_p": 0.3}, [0, 0.4706, 0, 0.2941, 0.2353]), ({"tfs_z": 0.6}, [0, 0.6154, 0, 0.3846, 0]),
    ({"typical_p": 0.4}, [0, 0, 0, 0.5556, 0.4444]), ({"pool_size": 2}, [0, 0.6154, 0, 0.3846, 0]),
    ({"mirostat": 2, "mirostat_tau": 1.05}, [0, 0.6154, 0, 0.3846, 0]),
    ({"mirostat": 1, "mirostat_tau": 1.0}, [0, 0.4706, 0, 0.2941, 0.2353]),
    ({"fsd": "random", "fsd_alpha": 0.0}, [0.05, 0.7, 0.025, 0.125, 0.1]),  # half of the time the best one
    ({"samplers": ("top_p", "temperature"), "top_p": 0.6, "temperature": 0.5}, [0, 0.7191, 0, 0.2809, 0]),
    ({"logit_bias": {2: 2.0794}}, [0.0741, 0.2963, 0.2963, 0.1852, 0.1481]),  # eight times as probable
    ({"top_p": 0.9, "top_k": 2, "samplers": ("temperature", "top_p", "top_k")}, [0, 0.6154, 0, 0.3846, 0])])
@pytest.mark.thin(12)
def test_first_tokens_are_drawn_by_their_probabilities(settings, expected):
    """Frequencies over 3,000 requests, against probabilities by hand."""
    draws = 3000
    counts = np.bincount([Sampler(Sampling(**{"temperature": 1.0, "seed": seed, **settings})).pick(LOGITS)
                          for seed in range(draws)], minlength=5)
    expected = np.array(expected)
    assert counts[expected == 0].sum() == 0
    assert np.all(np.abs(counts - draws * expected) < 4 * np.sqrt(draws * expected * (1 - expected)) + 1)


def test_the_tokens_of_one_request_are_drawn_independently():
    sampler, draws = Sampler(Sampling(temperature=1.0, seed=7)), 4000
    ids, p = np.array([sampler.pick(LOGITS) for _ in range(draws)]), np.exp(LOGITS)
    pairs = np.zeros((5, 5))
    np.add.at(pairs, (ids[:-1], ids[1:]), 1)
    expected = (draws - 1) * np.outer(p, p)
    assert np.all(np.abs(pairs - expected) < 4.5 * np.sqrt(expected) + 1)


def test_end_tokens_are_passed_over():
    """The best other token replaces the end token twice."""
    limits = Constraints(frozenset({1}), max_tokens=99)
    sampler = Sampler(Sampling(eos_bypassing_max=2), limits)
    assert [sampler.pick(LOGITS) for _ in range(4)] == [3, 3, 1, 1]
    alone = Sampler(Sampling(eos_bypassing_max=1), Constraints(frozenset(range(5))))
    with pytest.raises(RequestError, match="no token may come next but an end token"):
        alone.pick(LOGITS)


def test_nothing_may_come():
    sampler = Sampler(Sampling(), Constraints(banned=tuple((id,) for id in range(5))))
    with pytest.raises(RequestError, match="no token may come next"):
        sampler.pick(LOGITS)


def test_the_seed_decides():
    def picks(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.pick(LOGITS) for _ in range(50)]

    assert picks(1) == picks(1) != picks(2)
    assert picks(None) != picks(None)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers(bad):
    with pytest.raises(RequestError, match="not finite"):
        Sampler(Sampling()).pick(np.array([0, bad, 1], np.float32))


def test_masked_logits_are_never_drawn():
    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    assert {sampler.pick(logits) for _ in range(40)} == {1, 3}
