"""KL divergence between models whose probabilities are known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from numflow.engine.measure.divergence import divergence, divergences
from numflow.engine.measure.perplexity import perplexity
from numflow.errors import RequestError
from tests.engine.fake import VOCABULARY, fake_model

TEXT = "some text that is a little longer"


def counted(history):
    return np.random.default_rng(history).standard_normal(VOCABULARY) * 3


def shifted(history):
    return counted(history) + np.random.default_rng([1, *history]).standard_normal(VOCABULARY)


def by_hand(history):
    p, q = ([float(np.float32(v)) for v in rule(history)] for rule in (counted, shifted))
    p, q = ([v - math.log(math.fsum(map(math.exp, values))) for v in values] for values in (p, q))
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q))


def histories(context, skipped):
    ids = [256, *TEXT.encode()]
    windows = [ids[i:i + context] for i in range(0, len(ids), context)]
    return [w[:n] for w in windows if skipped == 0 or len(w) == context for n in range(1 + skipped, len(w))]


@pytest.mark.parametrize("protocol, skipped", [("plain", 0), ("half", 4)])
def test_against_sums_written_out(protocol, skipped):
    model, base = fake_model(shifted), fake_model(counted)
    result = divergence(model, base, TEXT, 8, protocol=protocol)
    if protocol == "plain":  # `half` puts the start token in front, which is another history
        kl = [by_hand(history) for history in histories(8, skipped)]
        assert result["kl"]["mean"] == pytest.approx(np.mean(kl), rel=1e-4)
        assert result["kl"]["max"] == pytest.approx(max(kl), rel=1e-4)
        assert result["kl"]["median"] == pytest.approx(np.median(kl), rel=1e-4)
    assert result["perplexity"] == pytest.approx(perplexity(model, TEXT, 8, protocol=protocol)["perplexity"], rel=1e-6)
    expected = perplexity(base, TEXT, 8, protocol=protocol)["perplexity"]
    assert result["base_perplexity"] == pytest.approx(expected, rel=1e-6)
    assert result["tokens"] == len(histories(8, skipped))
    assert result["protocol"] == protocol and "start token" in result["protocol_text"]


def test_a_model_is_not_far_from_itself():
    result = divergence(fake_model(counted), fake_model(counted), TEXT, 8)
    assert result["kl"]["max"] < 1e-6
    assert result["same_top"] == 1
    assert result["log_perplexity_ratio"] == 0


def test_same_top_and_uncertainties():
    def half(history):  # another favourite at every second position
        return np.eye(VOCABULARY)[int(np.argmax(counted(history))) if len(history) % 2 else 7] * 9.0

    result = divergence(fake_model(half), fake_model(counted), TEXT, 9)
    assert result["same_top"] == pytest.approx(0.5, abs=0.05)
    assert 0 < result["kl"]["stderr"] < result["kl"]["mean"]
    assert result["kl"]["p99.9"] <= result["kl"]["max"]
    assert result["protocol_text"].endswith("its standard errors are over windows")
    alone = divergence(fake_model(half), fake_model(counted), TEXT, 64)  # one window says nothing of others
    assert alone["same_top_stderr"] == pytest.approx(0.5 / (alone["tokens"] - 1) ** 0.5, rel=0.02)
    assert alone["kl"]["stderr"] > 0 and "over tokens, there being one window" in alone["protocol_text"]


def test_several_models_at_once_and_progress():
    told = []
    models = {"far": fake_model(shifted), "near": fake_model(counted)}
    found = divergences(models, fake_model(counted), TEXT, 8, 2, lambda *facts: told.append(facts))
    assert found["near"]["kl"]["mean"] < 1e-6 < found["far"]["kl"]["mean"]
    assert [(done, total) for done, total, _ in told] == [(1, 2), (2, 2)]


def test_what_cannot_be_compared():
    other = fake_model(counted)
    other.facts = replace(other.facts, vocabulary=300)
    with pytest.raises(RequestError, match="needs one vocabulary: the model has 300 tokens, the base has 258"):
        divergence(other, fake_model(counted), TEXT, 8)
    with pytest.raises(RequestError, match="no protocol 'haf'; did you mean 'half'"):
        divergence(fake_model(counted), fake_model(counted), TEXT, 8, protocol="haf")


def test_no_numbers_are_no_measure():
    def broken(history):
        return counted(history) * (np.nan if len(history) == 5 else 1)

    with pytest.raises(RequestError, match="not finite numbers"):
        perplexity(fake_model(broken), TEXT, 8)
    for model, base in ((broken, counted), (counted, broken)):
        with pytest.raises(RequestError, match="not finite numbers"):
            divergence(fake_model(model), fake_model(base), TEXT, 8)
