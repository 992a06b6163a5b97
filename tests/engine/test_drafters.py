"""Speculative decoding in the engine: the same tokens, or the same distribution, in fewer steps."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.decoding.speculative import StepTimes
from numflow.engine.engine import Engine
from numflow.engine.load import load
from numflow.engine.request.settings import Settings
from numflow.engine.speculate.drafters import ModelDrafter, NgramDrafter, check_draft
from numflow.errors import RequestError
from numflow.learn.cases.chance import chi_square, limit
from tests.engine.fake import EOS, VOCABULARY, fake_model, used_blocks
from tests.engine.letters import letter_model
from tests.engine.tiny import write_checkpoint


def language(strength):
    """Logits over eight letters that follow from the last letter; the weaker, the more alike they all are."""
    rows = np.random.default_rng(0).normal(0, 2, (VOCABULARY, 8))

    def rule(history):
        row = np.full(VOCABULARY, -np.inf, np.float32)
        row[97:105] = strength * rows[history[-1]]
        row[EOS] = -3
        return row

    return rule


def pair(strength=0.5, chunk=512):
    """A model, and its draft model that knows the language less well."""
    model = letter_model(language(1.0), chunk=chunk)
    model.draft = letter_model(language(strength))
    return model


SETTINGS = [{}, {"temperature": 1.0, "seed": 3},
            {"temperature": 0.8, "seed": 4, "top_p": 0.8, "repetition_penalty": 1.2},
            {"fsd": True}, {"temperature": 1.0, "mirostat": 2, "seed": 1}, {"temperature": 1.0, "n": 3, "seed": 2},
            {"stop": "ab"}, {"min_tokens": 12, "no_repeat_ngram": 3},
    {"temperature": 1.0, "seed": 7, "eos_bypassing_max": 2}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("more", [{}, {"draft_tokens": 5}])
@pytest.mark.thin(6)
def test_ngrams_change_no_token(settings, more):
    for prompt in ("abc", "hahahaha", "abcabcabcabc"):
        plain = letter_model(language(1.0)).generate(prompt, max_tokens=40, **settings)
        model = letter_model(language(1.0), chunk=5)
        drafted = model.generate(prompt, max_tokens=40, speculate="ngram", **settings, **more)
        assert [(one.ids, one.text, one.finish_reason) for one in plain.choices] == [
            (one.ids, one.text, one.finish_reason) for one in drafted.choices]
        assert used_blocks(model) == 0


@pytest.mark.parametrize("settings", [settings for settings in SETTINGS if "temperature" not in settings])
@pytest.mark.parametrize("strength", [1.0, 0.5, -1.0])
@pytest.mark.thin(4)
def test_a_draft_model_changes_no_greedy_token(settings, strength):
    model = pair(strength, chunk=5)
    for prompt in ("abc", "a" * 20):
        plain = letter_model(language(1.0)).generate(prompt, max_tokens=40, **settings)
        for more in ({}, {"draft_tokens": 4}):
            drafted = model.generate(prompt, max_tokens=40, **settings, **more)
            assert (plain.ids, plain.text, plain.finish_reason) == (drafted.ids, drafted.text, drafted.finish_reason)
    if strength == 1.0 and not settings:
        assert model.core.counts["accepted_drafts"] == model.core.counts["drafts"] > 30
    assert used_blocks(model) == used_blocks(model.draft) == 0


@pytest.mark.parametrize(("strength", "settings"), [
    (0.4, {}), (-0.5, {"top_k": 5}), (0.7, {"temperature": 1.4, "repetition_penalty": 1.3}),
    pytest.param(0.4, {"n": 3}, marks=pytest.mark.slow)])
@pytest.mark.merge
def test_a_draft_model_changes_no_distribution(strength, settings):
    """Counts of the first two letters and of the third, against plain sampling's exact probabilities."""
    exact, third = np.zeros((8, 8)), np.zeros(8)
    plain = letter_model(language(1.0))
    request = plain.request("a", Settings.of({"temperature": 1.0, **settings, "ignore_eos": True,
                                              "banned_tokens": [EOS]}))
    for first in range(8):
        for second in range(8):
            weight, sampler = 1.0, request.sampler()
            for id in (97 + first, 97 + second):
                ids, p = sampler.distribution(language(1.0)(sampler.ids.tolist()))
                weight *= dict(zip(ids.tolist(), p.tolist(), strict=True)).get(id, 0.0)
                sampler.accept(id)
            exact[first, second] = weight
            ids, p = sampler.distribution(language(1.0)(sampler.ids.tolist()))
            third[ids - 97] += weight * p
    assert exact.sum() == pytest.approx(1)
    model, counts, last, texts = pair(strength), np.zeros((8, 8)), np.zeros(8), 300
    for seed in range(texts):
        for one in model.generate("a", max_tokens=6, seed=seed, draft_tokens=4, ignore_eos=True, banned_tokens=[EOS],
                                  **{"temperature": 1.0, **settings}).choices:
            counts[one.ids[0] - 97, one.ids[1] - 97] += 1
            last[one.ids[2] - 97] += 1
    rare = exact * counts.sum() < 4  # cells of the test need a few expected counts
    merged = lambda table: np.append(table[~rare], table[rare].sum())  # noqa: E731
    for found, expected in ((merged(counts), merged(exact)), (last, third)):
        statistic, freedom = chi_square(found, expected)
        assert statistic < limit(max(freedom, 1))
    assert 0 < model.core.counts["accepted_drafts"] < model.core.counts["drafts"]


def test_in_an_engine_with_others():
    """Requests that draft and requests that do not, in one batch with little room."""
    kinds = [{}, {"speculate": "ngram"}, {"temperature": 1.0, "seed": 3, "speculate": "ngram"}, {"speculate": "draft"},
             {"temperature": 1.0, "seed": 5, "speculate": "off"}, {"num_beams": 2}, {"speculate": "off", "fsd": True}]
    prompts = ["abc", "hahahahaha", "abcabcabc", "g", "cdefcdef"]
    model = pair()
    alone = [[model.generate(prompt, max_tokens=25, **kind).ids for kind in kinds] for prompt in prompts]
    with Engine(model, max_batch=6, max_step_tokens=11) as engine:
        handles = [[engine.submit(prompt, max_tokens=25, **kind) for kind in kinds] for prompt in prompts]
        assert [[handle.result(60).ids for handle in row] for row in handles] == alone
        stats = engine.stats
    assert 0 < stats["accepted_drafts"] <= stats["drafts"]
    assert stats["acceptance_rate"] == stats["accepted_drafts"] / stats["drafts"]


def test_fewer_steps():
    text = b"one two three four five six seven " * 8
    model = fake_model(lambda history: text[len(history) - 1] if len(history) <= len(text) else EOS, context=400)
    plain = model.generate("", max_tokens=200)
    steps = model.core.counts["steps"]
    drafted = model.generate("", max_tokens=200, speculate="ngram", draft_tokens=8)
    assert drafted.ids == plain.ids
    assert model.core.counts["steps"] - steps < steps / 3
    counts, stats = model.core.counts, drafted.stats
    assert (stats["drafts"], stats["accepted_drafts"]) == (counts["drafts"], counts["accepted_drafts"])
    assert stats["acceptance_rate"] > 0.5 and "drafts" not in plain.stats


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.merge
def test_a_real_program(backend, tmp_path):
    """Keys and values of wrong drafts are written over; the tokens are the same to the last bit on the CPU."""
    with load(write_checkpoint(tmp_path), backend=backend, activations="f32") as model:
        for settings in ({"temperature": 0.7, "seed": 1}, {}):
            plain = model.generate([1, 5, 9, 5, 9, 5], max_tokens=40, ignore_eos=True, **settings)
            for more in ({}, {"draft_tokens": 7}):
                drafted = model.generate([1, 5, 9, 5, 9, 5], max_tokens=40, ignore_eos=True, speculate="ngram",
                                         **settings, **more)
                assert drafted.ids == plain.ids
        model.draft = model  # drafts that are always right
        assert model.generate([1, 5, 9], max_tokens=40, ignore_eos=True).ids == model.generate(
            [1, 5, 9], max_tokens=40, ignore_eos=True, speculate="off").ids
        assert model.core.counts["accepted_drafts"] > 20
        assert used_blocks(model) == 0


def test_a_draft_sequence_follows_the_text():
    """What was drafted wrongly is run again, and no more than that."""
    draft = fake_model(lambda history: (history[-1] + 1) % 256, context=30)
    request = fake_model().request([5, 6, 7], Settings(max_tokens=20))
    drafter = ModelDrafter(draft.runner, request.sampler(), 60, StepTimes(), 4)
    assert drafter.propose([5, 6, 7], 9) == [8, 9, 10, 11]
    assert drafter.propose([5, 6, 7], 2) == [8, 9]
    draft.program.batches.clear()
    assert drafter.propose([5, 6, 7, 8, 9, 20], 3) == [21, 22, 23]
    assert draft.program.batches == [2, 1, 1]
    assert drafter.propose(list(range(29)), 9) == [29]  # the draft model's context
    assert drafter.propose(list(range(30)), 9) == []
    drafter.close()
    assert used_blocks(draft) == 0


def test_guesses_from_what_an_encoder_has_read():
    drafter = NgramDrafter(StepTimes(), 3, np.array([5, 6, 7, 8, 9], np.int32))
    assert drafter.propose(np.array([1, 6, 7], np.int32), 9) == [8, 9, 1]


def test_models_that_cannot_guess():
    model = fake_model()
    with pytest.raises(RequestError, match="cannot guess tokens: a draft model is a decoder"):
        model.draft = fake_model(type="encoder")
    other = fake_model()
    other.facts = replace(other.facts, vocabulary=99)
    with pytest.raises(RequestError, match="the draft model fake has 99 token ids, fake 258"):
        model.draft = other
    check_draft(fake_model(tokenizer=False), fake_model(tokenizer=False))
