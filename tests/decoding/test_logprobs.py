"""Log-probabilities against a plain log-softmax."""

import numpy as np
import pytest

from numflow.decoding.logprobs import log_likelihood, log_sum_exp, token_logprobs
from numflow.decoding.sampler import Sampler
from numflow.decoding.settings import Sampling

LOGITS = (5 * np.random.default_rng(0).standard_normal((6, 700)) + 300).astype(np.float32)
SOFT = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64) - 300).sum(1, keepdims=True)) - 300
IDS = np.array([0, 5, 699, 3, 3, 8])


@pytest.mark.parametrize("top", [0, 1, 5, 700, 1000])
def test_of_tokens(top):
    found = token_logprobs(LOGITS, IDS, top)
    np.testing.assert_allclose([one.logprob for one in found], SOFT[np.arange(6), IDS], atol=1e-5)
    for one, row in zip(found, SOFT, strict=True):
        best = np.argsort(-row, kind="stable")[:top]
        assert [id for id, _ in one.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in one.top], row[best], atol=1e-5)


def test_of_a_text():
    total, best = log_likelihood(LOGITS, IDS)
    assert (total, best) == (pytest.approx(SOFT[np.arange(6), IDS].sum(), abs=1e-4), False)
    assert log_likelihood(LOGITS, LOGITS.argmax(1))[1] is True
    assert log_likelihood(LOGITS[:0], IDS[:0]) == (0.0, True)


def test_masked_logits_count_nothing():
    row = np.array([[0, -np.inf, 0, -np.inf]], np.float32)
    assert log_sum_exp(row) == pytest.approx(np.log(2))


def test_a_sampler_tells_those_of_the_model():
    """Before temperature, penalties and filters."""
    sampler = Sampler(Sampling(temperature=0.3, top_k=2, logit_bias={4: 50.0}, seed=1, logprobs=2))
    ids = [sampler.pick(row) for row in LOGITS]
    assert [one.id for one in sampler.logprobs] == ids
    np.testing.assert_allclose([one.logprob for one in sampler.logprobs], SOFT[np.arange(6), ids], atol=1e-5)
    assert [len(one.top) for one in sampler.logprobs] == [2] * 6
    twin = sampler.copy()
    twin.pick(LOGITS[0])
    assert (len(twin.logprobs), len(sampler.logprobs)) == (7, 6)
