"""Budgets of requests: limits, error messages, and caches that clients cannot fill."""

import numpy as np
import pytest

from numflow.decoding.constraints import NEVER, Constraints
from numflow.decoding.structured import CACHED, Grammars, _one_line
from numflow.engine.engine import Engine
from numflow.engine.request.budget import STOP_BYTES, Budget
from numflow.engine.request.request import BREAKER_BYTES, BREAKER_LISTS
from numflow.errors import RequestError, quoted
from tests.engine.fake import fake_model
from tests.engine.letters import LetterTokenizer, letter_model

SMALL = Budget(max_beams=3, max_choices=4, max_logprobs=2, max_breakers=2, max_bans=5, max_bias=3, max_stops=2,
               max_grammar=40)
DRAWN = {"temperature": 1.0}
WITHIN = [
    ("max_beams", {"num_beams": 3}), ("max_choices", {"n": 4, **DRAWN}), ("max_choices", {"best_of": 4, **DRAWN}),
    ("max_logprobs", {"logprobs": 2}), ("max_logprobs", {"prompt_logprobs": 2}),
    ("max_breakers", {"dry_multiplier": 1.0, "dry_sequence_breakers": ["x", "y", "x", "x", "y"]}),
    ("max_bans", {"banned_tokens": [[1, 2]] * 5}), ("max_bans", {"stop_token_ids": [1, 2, 3, 4, 5]}),
    ("max_bias", {"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0}}), ("max_stops", {"stop": ["a", "b"]}),
    ("max_grammar", {"regex": "a" * 40}), ("max_grammar", {"json_schema": {"const": "x" * 20}}),
    ("max_grammar", {"grammar": f'root ::= "{"a" * 20}"'})]
BEYOND = [
    ("max_beams", {"num_beams": 4}), ("max_beams", {"num_beams": 10**9}), ("max_choices", {"n": 5, **DRAWN}),
    ("max_choices", {"best_of": 5, **DRAWN}), ("max_logprobs", {"logprobs": 3}),
    ("max_logprobs", {"prompt_logprobs": 3}),
    ("max_breakers", {"dry_multiplier": 1.0, "dry_sequence_breakers": ["x", "y", "z"]}),
    ("max_bans", {"banned_tokens": [[1, 2]] * 6}), ("max_bans", {"stop_token_ids": [1] * 6}),
    ("max_bias", {"logit_bias": {str(id): 1.0 for id in range(4)}}), ("max_stops", {"stop": ["a", "b", "c"]}),
    ("max_grammar", {"regex": "a" * 41}), ("max_grammar", {"json_schema": {"const": "x" * 40}}),
    ("max_grammar", {"json_schema": '{"const": "' + "x" * 40 + '"}'}),
    ("max_grammar", {"grammar": f'root ::= "{"a" * 40}"'})]


@pytest.mark.parametrize(("limit", "settings"), WITHIN)
def test_what_is_within_the_budget_is_taken(limit, settings):
    with Engine(letter_model(), budget=SMALL) as engine:
        assert engine.request([1, 2], max_tokens=3, **settings).constraints.max_tokens == 3


@pytest.mark.parametrize(("limit", "settings"), BEYOND)
def test_what_is_beyond_is_refused_by_name(limit, settings):
    with Engine(letter_model(), budget=SMALL) as engine, pytest.raises(RequestError, match=limit) as caught:
        engine.request([1, 2], max_tokens=3, **settings)
    assert str(getattr(SMALL, limit)) in str(caught.value) and len(str(caught.value)) < 300


def test_a_budget_is_checked_itself():
    for wrong in ({"max_beams": 0}, {"max_grammar": "1MB"}, {"max_logprobs": -1}, {"max_stops": 1.5}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            Budget(**wrong)
    assert Budget(max_logprobs=0).max_beams == 32


def test_beams_count_as_sequences():
    with Engine(fake_model(), max_batch=4) as engine:
        with pytest.raises(RequestError, match="max_batch"):
            engine.submit([1, 2], num_beams=5)
        assert len(engine.submit([1, 2], max_tokens=2, num_beams=4).result().ids) == 2


def test_a_model_alone_has_no_budget():
    assert len(fake_model().generate([1, 2], max_tokens=2, num_beams=40).ids) == 2


@pytest.mark.parametrize("text", ["x" * (STOP_BYTES + 1), "é" * STOP_BYTES])
def test_a_stop_string_has_a_length(text):
    with Engine(letter_model()) as engine, pytest.raises(RequestError, match="stop has a text of more than") as caught:
        engine.request([1, 2], stop=["a", text])
    assert len(str(caught.value)) < 250


def test_lists_of_breakers_are_forgotten():
    model = letter_model()
    for number in range(3 * BREAKER_LISTS):
        model.generate([1, 2], max_tokens=1, dry_multiplier=1.0, dry_sequence_breakers=[f"{number}"])
    assert model._requests._breakers.cache_info().currsize <= BREAKER_LISTS
    with pytest.raises(RequestError, match=f"more than {BREAKER_BYTES} bytes"):
        model.generate([1, 2], dry_multiplier=1.0, dry_sequence_breakers=["x" * (BREAKER_BYTES + 1)])


def test_equal_breakers_are_one():
    asked = []

    class Watched(LetterTokenizer):
        def token_bytes(self, id):
            asked.append(id)
            return super().token_bytes(id)

    model = fake_model()
    model._load_tokenizer = Watched
    for breakers in (["x"] * 1000, ["x"], ["x", "x"]):
        model.generate([1, 2], max_tokens=1, dry_multiplier=1.0, dry_sequence_breakers=breakers)
    assert len(asked) <= Watched.vocab_size  # the vocabulary was looked at once


def test_breakers_are_found_inside_tokens():
    found = letter_model()._requests._tokens_containing(frozenset({".", "^", "ab"}))  # no regular expressions
    assert found == {ord("."), ord("^")}


def test_bans_are_looked_up():
    class Counted(tuple):
        walks = 0

        def __iter__(self):
            Counted.walks += 1
            return super().__iter__()

    banned = Counted([(5,), (1, 6), (2, 7), (1, 2, 8), (2, 9)])
    constraints = Constraints(banned=banned, max_tokens=9)
    scores = __import__("numpy").zeros(12)
    for before, out in (([1], {5, 6}), ([2], {5, 7, 9}), ([1, 2], {5, 7, 8, 9}), ([], {5}), ([3, 1], {5, 6})):
        found = constraints.apply(scores, before, 0)
        assert {id for id, score in enumerate(found) if score == NEVER} == out
    assert Counted.walks == 1  # not once for each token


def test_a_salt_parts_what_the_prefix_cache_knows():
    prompt = list(range(64))
    with Engine(fake_model(), max_batch=2) as engine:
        def cached(**settings):
            return engine.submit(prompt, max_tokens=1, **settings).result().stats["cached_tokens"]

        first, again = cached(cache_salt="a"), cached(cache_salt="a")
        assert (first, again > 0) == (0, True)
        assert cached(cache_salt="b") == 0 and cached() == 0 and cached() == again
        for wrong in ("", "x" * 257, 3):
            with pytest.raises(RequestError, match="cache_salt"):
                cached(cache_salt=wrong)


@pytest.mark.parametrize("settings", [
    {"samplers": ["top_k"] * 200_000}, {"samplers": ["x" * 10**6]}, {"stop": [1] * 10**5}, {"n": "9" * 10**6},
    {"decoding_alg": "x" * 10**6}, {"decoding_alg": {"name": "x" * 10**6}}, {"decoding_alg": {"name": ["x"] * 10**5}},
    {"decoding_alg": {"name": "greedy", "x" * 10**6: 1}}, {"top_k": "x" * 10**6}, {"speculate": "x" * 10**6},
    {"echo": "x" * 10**6}, {"fsd": ["x" * 10**6]}, {"early_stopping": "x" * 10**6, "num_beams": 2},
    {"logit_bias": {"x" * 10**6: 1}}, {"x" * 10**6: 1},
    {"dry_sequence_breakers": "x" * 10**6, "dry_multiplier": 1.0},
    {"json_schema": "x" * 10**6}, {"min_tokens": "x" * 10**6}, {"draft_tokens": "x" * 10**6, "speculate": "ngram"}])
def test_errors_do_not_repeat_what_was_given(settings):
    with pytest.raises(RequestError) as caught:
        letter_model().generate([1, 2], **settings)
    assert len(str(caught.value)) < 1000


def test_what_is_quoted_is_cut():
    assert (quoted("abc"), quoted(3), quoted([1, "a"])) == ("'abc'", "3", "[1, 'a']")
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    for value in ("x" * 10**6, ["x" * 10**6] * 10**5, {"a": "x" * 10**6}, 10**5000, deep, {1: deep}):
        assert len(quoted(value)) <= 103
    assert quoted(np.full(8, 1e30)) == str([1e30] * 8) and len(quoted(np.arange(10**6))) <= 103


def test_few_grammars_are_kept():
    pytest.importorskip("llguidance")
    grammars = Grammars(LetterTokenizer(), 300)
    for number in range(2 * CACHED):
        grammars.compile("regex", f"a{number}", [])
    assert len(grammars._compiled) == CACHED
    one, two = (grammars.compile("regex", "ab", []) for _ in range(2))
    one.accept(ord("a"))
    one.accept(ord("b"))
    assert (one.complete, two.complete) == (True, False)  # each goes its own way


def test_a_librarys_backtrace_is_not_told():
    assert _one_line("too large\n<backtrace>\n 0: <unknown>\n") == "too large"
    assert len(_one_line("x" * 10**5)) <= 400


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "banned_tokens", "dry_sequence_breakers"])
@pytest.mark.parametrize("value", [3, 0.5, True, 10**30, b"a", {"a": 1}])
def test_what_should_be_a_list_is_one(name, value):
    with Engine(letter_model()) as engine, pytest.raises(RequestError, match=f"{name} should be"):
        engine.submit([1, 2], dry_multiplier=1.0, **{name: value})
