"""Penalties by hand, and unchanged scores."""

import numpy as np
import pytest

from numflow.decoding import penalties
from numflow.decoding.chain import PROCESSORS, processed
from numflow.decoding.settings import Sampling

SCORES = np.array([2.0, -1.0, 0.0, 4.0, -2.0], np.float32)


def ids(*tokens):
    return np.array(tokens, np.int32)


def changed(scores):
    assert scores.dtype == np.float32
    return {i: round(float(new), 5) for i, (new, old) in enumerate(zip(scores, SCORES)) if new != old}


def test_bias():
    assert changed(penalties.logit_bias(SCORES, {0: 1.5, 4: -100, 9: 3})) == {0: 3.5, 4: -102.0}


@pytest.mark.parametrize(("text", "last", "expected"), [
    ([0, 1, 3, 3], -1, {0: 1.0, 1: -2.0, 3: 2.0}), ([0, 1, 3, 3], 2, {3: 2.0}), ([0, 1], 0, {}), ([], -1, {}),
    ([99, 2], -1, {})])
def test_repetition(text, last, expected):
    assert changed(penalties.repetition(SCORES, ids(*text), 2.0, last)) == expected


@pytest.mark.parametrize(("text", "new", "last", "expected"), [
    ([0, 3, 3, 1], 3, -1, {3: 4 - 0.5 - 0.5, 1: -1 - 0.5 - 0.25}), ([0, 3, 3, 1], 3, 1, {1: -1.75}),
    ([0, 3, 3, 1], 0, -1, {}), ([0, 3, 3, 1], 4, -1, {0: 1.25, 3: 3.0, 1: -1.75})])
def test_presence_and_frequency(text, new, last, expected):
    assert changed(penalties.presence_frequency(SCORES, ids(*text), new, 0.5, 0.25, last)) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ([1, 2, 3, 1, 2], {3: 2, 1: 0, 2: 0}), ([1, 2, 1], {2: 1}), ([1, 1, 1, 1], {1: 3}), ([4], {}), ([], {}),
    ([0, 1, 2, 9, 3, 1, 2], {9: 2}), ([1, 2, 3, 1, 2, 4, 1, 2], {3: 2, 4: 2}),
    ([1, 2, 3, 9, 2, 4, 1, 2], {3: 2, 4: 1})])
def test_repeated_sequences(text, expected):
    expected = {token: n for token, n in expected.items() if n}
    assert penalties.repeated(ids(*text)) == expected


def test_repeated_against_every_place():
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = rng.integers(0, 3, rng.integers(1, 40)).astype(np.int32)
        breakers = frozenset({2}) if rng.random() < 0.5 else frozenset()
        expected = {}
        for end in range(1, len(text)):
            n = 0
            while n < end and text[end - 1 - n] == text[-1 - n] and int(text[-1 - n]) not in breakers:
                n += 1
            if n:
                expected[int(text[end])] = max(n, expected.get(int(text[end]), 0))
        assert penalties.repeated(text, breakers) == expected


def test_dry():
    text = ids(0, 1, 2, 3, 0, 1, 2)
    assert changed(penalties.dry(SCORES, text, 0.5, 2.0, 2)) == {3: 4 - 0.5 * 2}
    assert changed(penalties.dry(SCORES, text, 0.5, 2.0, 3)) == {3: 3.5}
    assert penalties.dry(SCORES, text, 0.5, 2.0, 4) is SCORES
    assert penalties.dry(SCORES, text, 0.5, 2.0, 2, frozenset({2})) is SCORES
    assert changed(penalties.dry(SCORES, text, 0.5, 2.0, 1, frozenset({1}))) == {3: 3.5}  # not over the breaker
    assert penalties.dry(SCORES, text, 0.5, 2.0, 2, last=3) is SCORES
    endless = penalties.dry(SCORES, np.zeros(5000, np.int32), 0.5, 1.75, 2)
    assert np.isfinite(endless).all() and endless[0] < -1e14


@pytest.mark.parametrize("settings", [
    {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.3}, {"frequency_penalty": 0.3},
    {"dry_multiplier": 0.8}])
def test_the_table(settings):
    text, (name,) = ids(1, 2, 3, 1, 2), settings
    own, scores = Sampling(**settings), processed(SCORES, text, 3, Sampling(**settings))
    np.testing.assert_array_equal(scores, PROCESSORS[name](SCORES, text, 3, own))
    assert changed(scores)
    assert processed(SCORES, text, 3, Sampling()) is SCORES


def test_all_at_once_in_their_order():
    text, settings = ids(1, 2, 3, 1, 2), Sampling(
        logit_bias={3: 1.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, dry_multiplier=1.0)
    assert changed(processed(SCORES, text, 2, settings)) == {
        1: -1 * 2 - 0.75, 2: -0.75, 3: (4 + 1) / 2 - 1}
