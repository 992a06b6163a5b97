"""Frustratingly simple decoding against the published rule, implemented with counters."""

from collections import Counter

import numpy as np
import pytest

from numflow.decoding.fsd import fsd, penalties
from numflow.decoding.sampler import Sampler
from numflow.decoding.select import Candidates
from numflow.decoding.settings import Sampling


def published(text, token, n, beta):
    """Penalty of one token: tables of followers of each context, from the longest to the shortest."""
    if len(text) < n - 1:
        return 0.0
    score, left = 0.0, 1.0
    for size in range(n - 1, -1, -1):
        context = tuple(text[len(text) - size:])
        after = Counter(text[i + size] for i in range(len(text) - size) if tuple(text[i:i + size]) == context)
        if token in after:
            total = sum(after.values())
            score += left * (beta * after[token] / (total + 1) if size else after[token] / total)
            left -= left * beta
    return score


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("beta", [0.0, 0.6, 0.9, 1.0])
def test_penalties(n, beta):
    rng = np.random.default_rng(n)
    for size in (0, 1, 2, 3, 30, 100):
        text = rng.integers(0, 5, size).astype(np.int32)
        expected = [published(text.tolist(), token, n, beta) for token in range(6)]
        np.testing.assert_allclose(penalties(text, np.arange(6), n, beta), expected, rtol=1e-12)


def test_by_hand():
    p = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
    text = np.array([2, 1, 3, 1], np.int32)
    # after 1 came 3, once: 0.9 / 2; all tokens: 1 twice, 2 and 3 once, of 4
    assert penalties(text, np.array([1, 2, 3, 4]), 2, 0.9) == pytest.approx([0.5, 0.25, 0.45 + 0.1 * 0.25, 0])
    c = Candidates(np.arange(5), np.log(p))
    # 0.5 p - 0.5 penalty: 1: -0.05, 3: -0.1125, 4: 0.1, 0: 0.05
    assert fsd(c, text, 4, 2, 0.5, 0.9).ids.tolist() == [4]
    assert fsd(c, text, 2, 2, 0.5, 0.9).ids.tolist() == [1]  # of the two best
    assert fsd(c, text, 5, 2, 0.0, 0.9).ids.tolist() == [1]  # greedy


def test_a_request_avoids_its_own_text():
    row = np.log(np.array([0.3, 0.28, 0.22, 0.2], np.float32))
    plain, moving = Sampler(Sampling()), Sampler(Sampling(fsd=True))
    assert [plain.pick(row) for _ in range(6)] == [0] * 6
    assert len({moving.pick(row) for _ in range(6)}) > 1


def test_random_fsd_draws_at_first():
    settings = {"fsd": "random", "temperature": 1.0, "fsd_alpha": 0.0}  # without penalty FSD is greedy
    row = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))

    def text(seed, **more):
        sampler = Sampler(Sampling(seed=seed, **settings, **more))
        return [sampler.pick(row) for _ in range(30)]

    texts = [text(seed) for seed in range(200)]
    assert all(set(ids[10:]) == {0} for ids in texts)
    drawn = np.mean([np.array(ids[:10]) != 0 for ids in texts])
    assert drawn == pytest.approx(0.5 * 0.6, abs=0.04)
    assert set(text(1, fsd_random=0)) == {0}
    assert text(3) == text(3)


def test_the_pool_changes_the_probabilities():
    """p - penalty: among all words p of 0 is 0.2, among the best three 0.444, which outweighs its penalty."""
    p, text = np.r_[[0.2, 0.15, 0.1], np.full(550, 0.001)], np.array([0, 3, 1, 3, 0, 4, 4, 4, 5, 5], np.int32)
    penalty = penalties(text, np.array([0, 1, 2]), 3, 0.9)
    for pool, total, best in ((0, 1.0, 2), (3, 0.45, 0)):
        assert np.argmax(p[:3] / total - penalty) == best
        sampler = Sampler(Sampling(fsd=True, fsd_k=3, pool_size=pool), prefix=text)
        assert sampler.pick(np.log(p).astype(np.float32)) == best
