"""Grammars over every kind of vocabulary: what random logits write follows them, to the last byte."""

import json
import re

import numpy as np
import pytest

from numflow.decoding.constraints import Constraints
from numflow.decoding.sampler import Sampler
from numflow.decoding.settings import Sampling
from numflow.decoding.structured import Grammars

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


def test_white_space_between_the_parts_of_json_is_an_option(every_tokenizer):
    tokenizer = next(one for one in every_tokenizer.values() if can_write(one, '{}":, 0189\n'))
    texts = [write(tokenizer, compiled(tokenizer), "json_schema", SCHEMA, seed, frozenset({END}), True)
             for seed in range(6)]
    assert any(character.isspace() for text in texts for character in text)
    assert all(json.loads(text)["word"] in SCHEMA["properties"]["word"]["enum"] for text in texts)
    pattern = SCHEMA | {"x-guidance": {"whitespace_pattern": "[ ]+"}}
    assert " " in write(tokenizer, compiled(tokenizer), "json_schema", pattern, 0, frozenset({END}))
