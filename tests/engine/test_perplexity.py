"""Perplexity against sums written out by hand, on models whose probabilities are known."""

import math

import numpy as np
import pytest

from numflow.engine.measure.divergence import divergence
from numflow.engine.measure.perplexity import perplexity
from numflow.errors import RequestError
from tests.engine.fake import BOS, VOCABULARY, fake_model


def uniform(history):
    return np.zeros(VOCABULARY)


def counted(history):
    """Logits that depend on the whole history of the window."""
    return np.random.default_rng(history).standard_normal(VOCABULARY) * 3


def by_hand(text, context, protocol, chunks=None):
    ids = [BOS, *text.encode()]
    windows = [ids[i:i + context] for i in range(0, len(ids), context)]
    if protocol == "half":
        windows = [[BOS, *w[1:]] for w in windows if len(w) == context]
    nll = []
    for window in windows[:chunks]:
        for i in range(1 if protocol == "plain" else context // 2 + 1, len(window)):
            logits = [float(np.float32(v)) for v in counted(window[:i])]
            nll.append(math.log(math.fsum(math.exp(v) for v in logits)) - logits[window[i]])
    return nll


def test_a_uniform_model_is_as_perplexed_as_it_has_words():
    result = perplexity(fake_model(uniform), "some text", context=4)
    assert result["perplexity"] == pytest.approx(VOCABULARY)
    assert result["stderr"] == pytest.approx(0, abs=1e-6)
    assert (result["chunks"], result["tokens"]) == (3, 7)  # 10 tokens: 4 + 4 + 2, without the first of each


@pytest.mark.parametrize("protocol", ["plain", "half"])
@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize("chunk", [512, 3])
def test_against_sums_by_hand(protocol, chunks, chunk):
    text = "the quick brown fox jumps over the lazy dog"
    nll = by_hand(text, 8, protocol, chunks)
    seen = []
    result = perplexity(fake_model(counted, chunk=chunk), text, context=8, chunks=chunks, protocol=protocol,
                        progress=lambda *row: seen.append(row))
    assert result["tokens"] == len(nll)
    assert result["nll"] == pytest.approx(np.mean(nll), rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(np.mean(nll)), rel=1e-6)
    assert result["stderr"] == pytest.approx(math.exp(np.mean(nll)) * np.std(nll, ddof=1) / len(nll)**0.5, rel=1e-6)
    assert seen[-1] == (result["chunks"], result["chunks"], pytest.approx(result["perplexity"]))


@pytest.mark.parametrize(("text", "settings", "message"), [
    ("", {}, "text has 1 tokens; at least 2"), ("abc", {"context": 8, "protocol": "half"}, "at least 8 are needed"),
    ("abc", {"context": 1}, "context should be 2 .. 64"), ("abc", {"context": 65}, "context should be 2 .. 64"),
    ("abc", {"chunks": 0}, "chunks"), ("abc", {"protocol": "plane"}, "did you mean 'plain'")])
def test_bad_requests(text, settings, message):
    with pytest.raises(RequestError, match=message):
        perplexity(fake_model(), text, **{"context": 8, **settings})


def test_only_decoders_say_what_follows():
    encoder, decoder = fake_model(type="encoder"), fake_model()
    for measure in (lambda: perplexity(encoder, "some text", 8), lambda: divergence(encoder, decoder, "some text", 8),
                    lambda: divergence(decoder, encoder, "some text", 8)):
        with pytest.raises(RequestError, match="fake is no decoder: perplexity needs a model that predicts"):
            measure()
