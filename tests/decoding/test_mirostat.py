"""Mirostat: values by hand, and the mean surprise of a text near the target."""

import math

import numpy as np
import pytest

from numflow.decoding.mirostat import Mirostat, zipf_count
from numflow.decoding.sampler import Sampler
from numflow.decoding.select import Candidates
from numflow.decoding.settings import Sampling

P = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
FIVE = Candidates(np.arange(5), np.log(P))


def test_version_2_by_hand():
    state = Mirostat(2, 1.05, 0.5)
    assert state.narrow(FIVE).ids.tolist() == [1, 3]  # surprises 1.32 and 2 of at most 2.1 bits
    state.accept(3)
    error = -math.log2(0.25 / 0.65) - 1.05
    assert state.mu == pytest.approx(2.1 - 0.5 * error)


def test_version_1_by_hand():
    ranks, sorted_p = np.arange(1, 6), np.sort(P)[::-1]
    t, b = np.log(ranks[1:] / ranks[:-1]), np.log(sorted_p[:-1] / sorted_p[1:])
    s = float(t @ b / (t @ t))
    k = round(((s - 1) * 2**2.0 / (1 - 5 ** (1 - s))) ** (1 / s)) + 1
    state = Mirostat(1, 1.0, 0.5)
    kept = state.narrow(FIVE)
    assert kept.ids.tolist() == sorted(np.argsort(-P)[:k].tolist())
    assert 2 <= k < 5
    state.accept(1)
    assert state.mu == pytest.approx(2 - 0.5 * (-math.log2(0.4) - 1))


@pytest.mark.parametrize(("s", "mu", "size", "count"), [
    (math.inf, 5, 100, 1), (0.0, 5, 100, 100), (-1.0, 5, 100, 100), (1.0, 3, 1000, 2), (1.5, 1000, 50, 50),
    (0.9, 5, 1, 1), (1.5, -50, 100, 1)])
def test_counts_stay_in_bounds(s, mu, size, count):
    assert zipf_count(s, mu, size) == count


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [3.5, 5.0])
def test_the_surprise_comes_near_the_target(version, tau):
    """A text of 600 tokens from changing Zipf distributions of 2,000 words."""
    rng, steps = np.random.default_rng(3), 600
    sampler = Sampler(Sampling(temperature=1.0, mirostat=version, mirostat_tau=tau, seed=5))
    surprises = []
    for _ in range(steps):
        logits = rng.permutation(-rng.uniform(0.9, 1.4) * np.log(np.arange(1, 2001))).astype(np.float32)
        before = sampler._mirostat.mu
        sampler.pick(logits)
        surprises.append(tau + (before - sampler._mirostat.mu) / 0.1)
    assert np.mean(surprises[100:]) == pytest.approx(tau, abs=0.15)


def test_a_copy_goes_its_own_way():
    state = Mirostat(2, 3.0, 0.1)
    state.narrow(FIVE)
    twin = state.copy()
    twin.accept(0)
    assert state.mu == 6.0 != twin.mu
    state.accept(99)  # a token that something else has chosen
    assert state.mu == 6.0
