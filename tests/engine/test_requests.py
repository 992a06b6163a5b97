"""Settings of requests: samples, log-probabilities, likelihoods, structured output, speculation."""

import json
import re

import numpy as np
import pytest

from numflow.decoding.constraints import Constraints
from numflow.decoding.settings import Sampling
from numflow.engine.engine import Engine
from numflow.engine.load import load
from numflow.engine.request.beam import Beams, BeamSearch
from numflow.engine.request.settings import Settings
from numflow.errors import RequestError
from tests.engine.fake import EOS, VOCABULARY, fake_model, used_blocks
from tests.engine.letters import letter_model
from tests.engine.tiny import write_checkpoint


def noisy(history):
    """Random logits over 40 tokens that follow from the last two tokens."""
    row = np.full(VOCABULARY, -30, np.float32)
    row[48:88] = np.random.default_rng(history[-2:]).normal(0, 2, 40)
    row[EOS] = -2
    return row


def soft(row):
    row = row.astype(np.float64)
    return row - np.log(np.exp(row - row.max()).sum()) - row.max()


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3, "seed": 3, "top_k": 9, "repetition_penalty": 1.2}])
def test_logprobs_of_new_tokens(settings):
    model = fake_model(noisy)
    plain = model.generate([1, 2], max_tokens=12, **settings)
    run = model.generate([1, 2], max_tokens=12, logprobs=3, stream=True, **settings)
    pieces = [piece for piece in run if piece.id is not None]
    result = run.result
    assert (result.ids, plain.logprobs) == (plain.ids, None)
    assert [one.id for one in result.logprobs] == result.ids == [piece.logprob.id for piece in pieces]
    for place, one in enumerate(result.logprobs):
        expected = soft(noisy([1, 2, *result.ids[:place]]))
        assert one.logprob == pytest.approx(expected[one.id], abs=1e-5)
        assert [id for id, _ in one.top] == np.argsort(-expected, kind="stable")[:3].tolist()


def test_logprobs_of_prompts():
    model = fake_model(noisy, chunk=3)
    ids = [60, 61, 50, 70, 71, 49, 48]
    result = model.generate(ids, max_tokens=0, prompt_logprobs=2)
    assert (result.ids, result.prompt) == ([], None)
    assert result.prompt_logprobs[0] is None
    for place, one in enumerate(result.prompt_logprobs[1:], 1):
        expected = soft(noisy(ids[:place]))
        assert (one.id, one.logprob) == (ids[place], pytest.approx(expected[ids[place]], abs=1e-5))
        assert one.top[0][0] == expected.argmax()
    text = model.generate("abc", max_tokens=1, logprobs=1, echo=True)
    assert (text.prompt, len(text.prompt_logprobs)) == ("abc", 4)
    assert model.generate("abc", max_tokens=1, echo=True).prompt_logprobs is None
    assert used_blocks(model) == 0


def test_likelihoods_against_logits(tmp_path):
    pairs = [([5, 6, 7], [8, 9]), ([5, 6, 7], [10]), (list(range(1, 40)), [3, 4, 5]), ([], [7, 7]),
    ([9], list(range(30))),
             ([5, 6, 7], list(range(20)))]
    with load(write_checkpoint(tmp_path), backend="cpu") as model:
        found = model.loglikelihoods(pairs)
        for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
            ids = [*(context or [1]), *continuation]
            rows = model.logits(ids)[len(ids) - len(continuation) - 1:-1]
            expected = sum(soft(row)[id] for row, id in zip(rows, continuation, strict=True))
            assert (total, greedy) == (pytest.approx(expected, abs=1e-4), bool((rows.argmax(1) == continuation).all()))
        context = [5, 6, 7, 8]
        best = model.generate(context, max_tokens=5, ignore_eos=True).ids
        assert model.loglikelihood(context, best).is_greedy
        assert not model.loglikelihood(context, [*best[:-1], (best[-1] + 1) % 50]).is_greedy
        assert used_blocks(model) == 0
        for wrong, message in ((([1], []), "continuation is empty"), (([1], [50]), "continuation has token id 50"),
                               ((list(range(40)), list(range(40))), "context and continuation have 80 tokens")):
            with pytest.raises(RequestError, match=message):
                model.loglikelihood(*wrong)


def test_samples_are_those_of_requests_alone():
    model = fake_model(noisy)
    settings = {"max_tokens": 10, "temperature": 1.0, "seed": 5}
    result = model.generate([1, 2], n=4, **settings)
    assert result.choices[0] is result and len({tuple(one.ids) for one in result.choices}) == 4
    assert result.ids == model.generate([1, 2], **settings).ids
    batch = model.generate_batch([[1, 2], [7]], n=2, **settings)
    assert [one.ids for one in batch[0].choices] == [one.ids for one in result.choices[:2]]
    streamed = model.generate([1, 2], n=3, stream=True, **settings)
    texts = ["", "", ""]
    for piece in streamed:
        texts[piece.index] += piece
    assert texts == [one.text for one in result.choices[:3]] == [one.text for one in streamed.result.choices]
    with Engine(model) as engine:
        handle = engine.submit([1, 2], n=3, **settings)
        assert [one.ids for one in handle.results()] == [one.ids for one in result.choices[:3]]
        best = engine.submit([1, 2], n=2, best_of=4, **settings)
        assert [one.ids for one in best.results()] == [one.ids for one in model.generate(
            [1, 2], n=2, best_of=4, **settings).choices]


def test_the_best_of_several():
    model = fake_model(noisy)
    settings = {"max_tokens": 10, "temperature": 1.0, "seed": 5}
    samples = model.generate([1, 2], n=6, logprobs=0, **settings).choices

    def mean(one):
        ended = [soft(noisy([1, 2, *one.ids]))[EOS]] if one.finish_reason == "stop" else []
        return np.mean([*(entry.logprob for entry in one.logprobs), *ended])

    ranked = sorted(samples, key=mean, reverse=True)
    found = model.generate([1, 2], n=2, best_of=6, **settings)
    assert [one.ids for one in found.choices] == [one.ids for one in ranked[:2]]
    assert found.ids == ranked[0].ids


def test_the_best_beams():
    model = fake_model(noisy)
    best = model.generate([1, 2], max_tokens=6, num_beams=4, n=3)
    assert len(best.choices) == 3 and best.choices[0] is best
    assert best.ids == model.generate([1, 2], max_tokens=6, num_beams=4).ids
    scores = [one.score for one in best.choices]
    assert scores == sorted(scores, reverse=True)
    for one in best.choices:
        assert one.text == bytes(one.ids).decode()


def test_penalties_in_a_beam_search():
    rows = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    search = BeamSearch(Beams(1), Constraints(max_tokens=4), [0], sampling=Sampling(repetition_penalty=3.0))
    while not search.done:
        search.advance(rows)
    # 0 is in the prompt: log 0.5 * 3 is below log 0.3; then 1 is as bad, and 2 is best
    assert search.result.ids == (1, 2, 0, 0)
    assert search.result.score == pytest.approx((np.log(0.3) + np.log(0.15) + 6 * np.log(0.5)) / 4, abs=1e-6)


def test_stop_tokens_and_banned_ones():
    model = fake_model(lambda history: (history[-1] + 1) % 100)
    result = model.generate([60], max_tokens=30, stop_token_ids=[70, 65])
    assert (result.text, result.finish_reason) == ("=>?@", "stop")
    assert model.generate([60], max_tokens=30, ignore_eos=True, stop_token_ids=[65]).text == "=>?@"
    assert 65 not in model.generate([60], max_tokens=10, banned_tokens=[65]).ids
    assert 65 in model.generate([60], max_tokens=10, banned_tokens=[[60, 65], [63, 66]]).ids
    assert model.generate([60], max_tokens=4, logit_bias={"90": 100.0}).ids == [90] * 4


def test_repetitions_stop_at_breakers():
    """The text of the rule repeats itself; the penalty drives it away unless a breaker is in the repeated part."""
    def rule(history):
        row = np.zeros(VOCABULARY, np.float32)
        row[b"ab:cd "[len(history) % 6]] = 5
        return row

    plain = letter_model(rule).generate("", max_tokens=24).text
    assert plain == "b:cd ab:cd ab:cd ab:cd a"
    settings = {"max_tokens": 24, "dry_multiplier": 4.0, "dry_allowed_length": 6}
    assert letter_model(rule).generate("", dry_sequence_breakers=["x"], **settings).text != plain
    assert letter_model(rule).generate("", **settings).text == plain  # between two colons there are 5 letters


@pytest.mark.parametrize(("settings", "message"), [
    ({"n": 0}, "n should be a whole number from 1"),
    ({"best_of": 1, "n": 2, "temperature": 1}, "best_of should be a whole"),
    ({"num_beams": 2, "n": 3}, "n=3 is more than the 2 beams"),
    ({"num_beams": 2, "logprobs": 1}, "a beam search does not go with logprobs"),
    ({"num_beams": 2, "fsd": True}, "leave out fsd"), ({"num_beams": 2, "speculate": "ngram"}, "does not speculate"),
    ({"num_beams": 2, "regex": "a"}, "does not go with regex"),
    ({"speculate": "magic"}, "speculate should be one of ngram, draft, off"),
    ({"speculate": "draft"}, "needs a draft model"),
    ({"draft_tokens": 0, "speculate": "ngram"}, "draft_tokens should be a whole number 1 .. 16"),
    ({"regex": "a", "grammar": "start: a"}, "regex contradicts grammar"), ({"echo": 1}, "echo should be true or false"),
    ({"echo": True, "chat": True}, "echo is for prompts"),
    ({"stop_token_ids": [999]}, "stop_token_ids has token id 999"),
    ({"banned_tokens": [[1, 999]]}, "banned_tokens has token id 999"),
    ({"banned_tokens": [[]]}, "banned_tokens is empty"),
    ({"dry_sequence_breakers": "x", "dry_multiplier": 1}, "should be texts"),
    ({"n": 1, "best_of": 2, "temperature": 1, "stream": True}, "best_of chooses at the end")])
def test_what_contradicts(settings, message):
    model = fake_model(noisy)
    with pytest.raises(RequestError, match=message):
        model.generate("ab", **settings)
    assert model.program.batches == []


@pytest.mark.parametrize(("settings", "ignored"), [
    ({"top_p": 0.9}, ["top_p"]), ({"draft_tokens": 3}, ["draft_tokens"]), ({"mirostat": 2}, ["mirostat"]),
    ({"dry_sequence_breakers": ["x"]}, ["dry_sequence_breakers"]), ({"length_penalty": 2.0}, ["length_penalty"])])
def test_what_has_no_effect_changes_nothing_and_is_told(settings, ignored):
    model = fake_model(noisy)
    plain, found = (model.generate("ab", max_tokens=8, **more) for more in ({}, settings))
    assert found.ids == plain.ids and plain.ignored == {} and list(found.ignored) == ignored


@pytest.mark.parametrize("settings", [{"n": 3}, {"n": 3, "fsd": True}, {"n": 3, "best_of": 4}])
def test_several_greedy_texts_are_the_same_text(settings):
    found = fake_model(noisy).generate("ab", max_tokens=5, **settings)
    assert len(found.choices) == 3 and len({tuple(one.ids) for one in found.choices}) == 1


def scattered(history):
    """Any byte may come."""
    return np.random.default_rng(history).normal(0, 3, VOCABULARY).astype(np.float32)


@pytest.fixture
def free():
    pytest.importorskip("llguidance")
    return letter_model(scattered, context=400)


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ada", "Blaise"]}, "age": {"type": "integer", "minimum": 1,
          "maximum": 120}, "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}},
          "required": ["name", "age", "tags"], "additionalProperties": False}


@pytest.mark.parametrize("settings", [
    {}, {"temperature": 1.5, "seed": 2, "top_p": 0.9}, {"temperature": 1.0, "mirostat": 2}, {"speculate": "ngram"},
    {"fsd": True}, {"temperature": 1.0, "n": 3, "seed": 1}])
def test_structured_output_always_parses(free, settings):
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        for one in free.generate("x", max_tokens=300, json_schema=schema, **settings).choices:
            value = json.loads(one.text)
            assert one.finish_reason == "stop"
            assert value["name"] in ("Ada", "Blaise") and 1 <= value["age"] <= 120 and set(value["tags"]) <= {"x", "y"}
    found = free.generate("x", max_tokens=300, regex=r"[a-c]{2,5}-(foo|bar)", **settings)
    assert re.fullmatch(r"[a-c]{2,5}-(foo|bar)", found.text)
    for grammar in ('root ::= "yes" | "no" " " [0-9] [0-9]', 'start: "yes" | "no" " " N\nN: /[0-9][0-9]/'):
        assert re.fullmatch(r"yes|no \d\d", free.generate("x", max_tokens=300, grammar=grammar, **settings).text)


def test_structured_output_without_end_tokens(free):
    assert re.fullmatch("[ab]{4}", free.generate("x", max_tokens=50, regex="[ab]{4}", ignore_eos=True).text)
    cut = free.generate("x", max_tokens=2, regex="[ab]{4}")
    assert (len(cut.text), cut.finish_reason) == (2, "length")
    with pytest.raises(RequestError, match="no token may come next"):
        free.generate("x", max_tokens=50, regex="[ab]{4}", banned_tokens=[97, 98])


@pytest.mark.parametrize(("settings", "message"), [
    ({"json_schema": "{"}, "json_schema: "), ({"json_schema": [1]}, "a schema should be a JSON object"),
    ({"json_schema": {"type": "objekt"}}, "json_schema: .*objekt"), ({"regex": "("}, "regex: .*unclosed"),
    ({"regex": ""}, "not empty"), ({"grammar": "root :: x"}, "grammar: "),
    ({"grammar": "start: foo"}, "grammar: .*foo"),
    ({"regex": "(?=a)b"}, "look-around")])
def test_grammars_that_cannot_be(free, settings, message):
    with pytest.raises(RequestError, match=message):
        free.generate("x", **settings)


def test_settings_have_one_place():
    assert Settings(temperature=0.5, seed=4, max_tokens=3).sampling() == Sampling(temperature=0.5, seed=4)
