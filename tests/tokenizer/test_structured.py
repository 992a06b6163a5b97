"""Grammars with every kind of vocabulary: text of random logits follows the grammar, to the last byte."""

import json
import re

import numpy as np
import pytest

from numflow.decoding.constraints import Constraints
from numflow.decoding.sampler import Sampler
from numflow.decoding.settings import Sampling
from numflow.decoding.structured import DIGITS, Grammars

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"word": {"enum": ["tea", "über", "日本", "🙂"]}, "count": {"type": "integer",
          "minimum": 0, "maximum": 99}}, "required": ["word", "count"], "additionalProperties": False}
END = 5000  # an id that ends a text, beside those of the vocabulary


def write(tokenizer, grammars, kind, content, seed, ends, whitespace=False):
    """A text by random logits, as Model.text_decoder decodes it."""
    grammar = grammars.compile(kind, content, ends, whitespace)
    sampler = Sampler(Sampling(temperature=1.0, seed=seed), Constraints(ends), grammar=grammar)
    rng, ids = np.random.default_rng(seed), []
    for _ in range(150):
        id = sampler.pick(rng.normal(0, 2, grammars.size).astype(np.float32))
        if id in ends:
            break
        ids.append(id)
        if sampler.complete:
            break
    else:
        raise AssertionError(f"no end: {tokenizer.decode(ids)}")
    assert not tokenizer.special_ids.intersection(ids)
    return tokenizer.decode(ids, continues=True)


def compiled(tokenizer):
    """Grammars for a model with more ids than the vocabulary has."""
    return Grammars(tokenizer, max(tokenizer.vocab_size, END) + 1)


def can_write(tokenizer, characters):
    """Whether there is a token for each of the bytes."""
    plain = [id for id in range(tokenizer.vocab_size)
             if id not in tokenizer.special_ids and tokenizer.vocabulary.text(id) is not None]
    return {tokenizer.token_bytes(id) for id in plain} >= {bytes([byte]) for byte in characters.encode()}


def test_texts_follow_their_grammar(every_tokenizer):
    tried = 0
    for name, tokenizer in every_tokenizer.items():
        if not can_write(tokenizer, "abet."):
            continue
        grammars, tried = compiled(tokenizer), tried + 1
        for seed in range(4):
            ends = tokenizer.eos_ids if seed % 2 and tokenizer.eos_ids else frozenset({END})
            text = write(tokenizer, grammars, "regex", r" ?[abe]{2,4}( ?tea)+\.", seed, ends)
            assert re.fullmatch(r" ?[abe]{2,4}( ?tea)+\.", text), name
            text = write(tokenizer, grammars, "grammar", 'root ::= ("a" | "e")+ "." ', seed, ends)
            assert re.fullmatch(r"[ae]+\.", text), name
    assert tried >= 8


def test_json_follows_its_schema(every_tokenizer):
    tried = 0
    for name, tokenizer in every_tokenizer.items():
        if not can_write(tokenizer, '{}":, 0189'):
            continue
        grammars, tried = compiled(tokenizer), tried + 1
        for seed in range(3):
            text = write(tokenizer, grammars, "json_schema", SCHEMA, seed, frozenset({END}))
            value = json.loads(text)
            assert text == json.dumps(value, separators=(",", ":"), ensure_ascii=False), name
            assert value["word"] in SCHEMA["properties"]["word"]["enum"] and 0 <= value["count"] <= 99, name
    assert tried >= 5


@pytest.mark.parametrize(("schema", "least", "most"), [
    ({"type": "number"}, DIGITS, 3 * DIGITS), ({"type": "integer"}, DIGITS, DIGITS),
    ({"type": "number", "minimum": -180, "maximum": 180}, DIGITS, DIGITS + 3),
    ({"type": "string", "maxLength": 45}, 45, 45), ({"type": "string", "pattern": "^[0-9]{30,45}$"}, 45, 45)])
def test_numbers_of_json_end_whatever_the_model_wants(every_tokenizer, schema, least, most):
    """A model that wants nothing but digits; texts and what their patterns say are left alone."""
    tried = 0
    for name, tokenizer in every_tokenizer.items():
        if not can_write(tokenizer, '{}":,0189x'):
            continue
        grammars, tried, ends = compiled(tokenizer), tried + 1, frozenset({END})
        longest = max(len(text) for text in grammars.tokens if text.isdigit())
        wanted = np.zeros(grammars.size, np.float32)
        for id in np.flatnonzero(grammars.digit[:grammars.size]):
            wanted[id] = 1 if grammars.tokens[id][0] > ord("0") else 0.5  # nothing follows a zero
        whole = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False,
                 "x-guidance": {"whitespace_flexible": False}}
        for kind, content in (("json_schema", schema), ("json_schema", whole),
                              ("grammar", f"start: /x/ %json {json.dumps(whole)}")):
            grammar, ids = grammars.compile(kind, content, ends), []
            while not grammar.complete:
                id = int(grammar.copy().apply(wanted).argmax())
                if id in ends:
                    break
                grammar.accept(id)
                ids.append(id)
                assert len(ids) < 150, name
            text = tokenizer.decode(ids, continues=True)
            json.loads(text.removeprefix("x"))
            assert least <= sum(letter.isdigit() for letter in text) <= most + 3 * longest, (name, text)
    assert tried >= 5


def test_digits_outside_of_json_are_as_many_as_the_grammar_says(every_tokenizer):
    name, tokenizer = next((name, one) for name, one in every_tokenizer.items() if can_write(one, "0189"))
    grammars, ends = compiled(tokenizer), frozenset({END})
    for kind, content in (("regex", "[0-9]{9,60}"), ("grammar", 'root ::= [0-9]+')):
        grammar, count = grammars.compile(kind, content, ends), 0
        while count < 60 and not grammar.complete:
            scores = grammars.digit[:grammars.size].astype(np.float32)
            grammar.accept(id := int(grammar.apply(np.pad(scores, (0, grammars.size - len(scores)))).argmax()))
            count += len(grammars.tokens[id])
        assert count >= 60, name


def test_white_space_between_the_parts_of_json_is_an_option(every_tokenizer):
    tokenizer = next(one for one in every_tokenizer.values() if can_write(one, '{}":, 0189\n'))
    texts = [write(tokenizer, compiled(tokenizer), "json_schema", SCHEMA, seed, frozenset({END}), True)
             for seed in range(6)]
    assert any(character.isspace() for text in texts for character in text)
    assert all(json.loads(text)["word"] in SCHEMA["properties"]["word"]["enum"] for text in texts)
    pattern = SCHEMA | {"x-guidance": {"whitespace_pattern": "[ ]+"}}
    assert " " in write(tokenizer, compiled(tokenizer), "json_schema", pattern, 0, frozenset({END}))
