"""Sampling in the program: used whenever possible; logits are read only if a request needs them."""

import numpy as np
import pytest

from numflow.decoding import filters
from numflow.decoding.select import Candidates, all_indices, draw
from numflow.engine.engine import Engine
from numflow.engine.model import Model
from numflow.errors import RequestError
from numflow.executor.contract import SAMPLE
from tests.engine.fake import BOS, EOS, VOCABULARY, FakeProgram, FakeTokenizer, fake_model, network, used_blocks

STAGES = {"min_p": filters.min_p, "top_k": filters.top_k, "top_p": filters.top_p}


def rule(history):
    """Logits that depend on all tokens so far."""
    return np.random.default_rng(history).normal(0, 2, VOCABULARY)


class Picking(FakeProgram):
    """Has `sample` too; `asked` counts the rows of either kind."""

    can = frozenset({SAMPLE})

    def __init__(self, rule):
        super().__init__(rule)
        self.asked = {"logits": 0, "tokens": 0}

    def run(self, batch, entry="main", output="logits"):
        rows = super().run(batch, entry, output)
        self.asked["logits"] += 0 if rows is None else len(rows)
        return rows

    def sample(self, batch, choices, entry="main"):
        rows = super().run(batch, entry, "logits")
        assert len(rows) == len(choices)
        self.asked["tokens"] += len(rows)
        return np.array([self.pick(row, choice) for row, choice in zip(rows, choices)], np.int32)

    @staticmethod
    def pick(row, choice):
        if not np.isfinite(row.max()):
            return -1
        if choice.temperature == 0:
            return int(row.argmax())
        c = Candidates(all_indices(len(row)), row)
        if choice.temperature != 1:
            c = filters.temperature(c, choice.temperature)
        for name, value in choice.filters:
            c = STAGES[name](c, value)
        return draw(c.ids, c.weights, choice.uniform)


def model(rule=rule):
    return Model(network(), Picking(rule), FakeTokenizer, ends=frozenset({EOS}), bos=BOS, chunk=4)


def both(rule=rule, **settings):
    """What is generated with the program's own picking, rows asked of it by kind, and what comes without."""
    own, plain = model(rule), fake_model(rule)
    found = own.generate("a few words", max_tokens=12, **settings)
    expected = plain.generate("a few words", max_tokens=12, **settings)
    assert [c.ids for c in found.choices] == [c.ids for c in expected.choices]
    assert used_blocks(own) == 0
    return own.program.asked


@pytest.mark.parametrize("settings", [
    {}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_p": 0.7, "seed": 4},
    {"temperature": 1.4, "min_p": 0.05, "top_k": 9, "top_p": 0.8, "seed": 5}], ids=str)
def test_only_tokens_come_back(settings):
    asked = both(**settings)
    assert asked["logits"] == 0
    assert asked["tokens"] >= 12


@pytest.mark.parametrize("settings", [
    {"repetition_penalty": 1.3}, {"logprobs": 2}, {"num_beams": 3}, {"temperature": 0.9, "seed": 1, "typical_p": 0.9},
    {"n": 1, "best_of": 2, "temperature": 1.0, "seed": 8}], ids=str)
def test_requests_that_need_logits_get_them(settings):
    assert both(**settings)["tokens"] == 0


def test_samples_start_from_the_same_logits():
    asked = both(n=3, temperature=1.0, seed=6)
    assert asked["logits"] == 1
    assert asked["tokens"] > 12


def test_drafts_are_picked_too():
    asked = both(lambda history: (history[-1] - 96) % 4 + 97, speculate="ngram", draft_tokens=3)
    assert asked["logits"] == 0
    assert asked["tokens"] > 12


def test_requests_side_by_side():
    """One that needs logits brings them for all, and nobody notices."""
    alone = [fake_model(rule).generate(text, max_tokens=9, **own).ids for text, own in
             (("one", {}), ("two", {"temperature": 0.7, "seed": 2}), ("three", {"repetition_penalty": 1.2}))]
    own = model()
    with Engine(own) as engine:
        handles = [engine.submit("one", max_tokens=9), engine.submit("two", max_tokens=9, temperature=0.7, seed=2),
                   engine.submit("three", max_tokens=9, repetition_penalty=1.2)]
        assert [handle.results()[0].ids for handle in handles] == alone


def test_logits_that_are_not_numbers():
    with pytest.raises(RequestError, match="not finite"):
        model(lambda history: np.full(VOCABULARY, np.nan)).generate("x", max_tokens=3)
