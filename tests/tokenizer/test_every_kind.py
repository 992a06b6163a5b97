"""Properties of every kind of vocabulary on difficult texts."""

import time

import pytest

from numflow.errors import TokenizerError
from tests.tokenizer.conftest import NASTY, stream

LOSSLESS = ("tokenizer.json byte_level_library", "gguf gpt2")


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
@pytest.mark.thin(3)
def test_streaming_equals_decoding(every_tokenizer, text):
    for name, tokenizer in every_tokenizer.items():
        for parse_special in (True, False):
            ids = tokenizer.encode(text, parse_special=parse_special)
            for options in ({}, {"skip_special": False}, {"continues": True}):
                assert "".join(stream(tokenizer, ids, **options)) == tokenizer.decode(ids, **options), name


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_ids_are_in_the_vocabulary_and_have_texts(every_tokenizer, text):
    for name, tokenizer in every_tokenizer.items():
        for id in tokenizer.encode(text):
            assert 0 <= id < tokenizer.vocab_size, name
            assert isinstance(tokenizer.token_text(id), str)
            assert isinstance(tokenizer.token_bytes(id), bytes)


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_byte_level_vocabularies_lose_nothing(every_tokenizer, text):
    for name in LOSSLESS:
        tokenizer = every_tokenizer[name]
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_byte_fallback_loses_nothing_but_marks(every_tokenizer):
    for name in ("tokenizer.model bpe", "tokenizer.bin", "gguf llama"):
        tokenizer = every_tokenizer[name]
        for text in NASTY.values():
            ids = tokenizer.encode(text, add_special=False, parse_special=False)
            assert tokenizer.decode(ids) == text.replace("▁", " "), name


def test_a_character_of_several_tokens_comes_at_once(every_tokenizer):
    for name in (*LOSSLESS, "gguf llama", "tokenizer.bin"):
        tokenizer = every_tokenizer[name]
        ids = tokenizer.encode("🦜🦜", add_special=False)
        pieces = stream(tokenizer, ids)
        assert len(ids) >= 8 and [p for p in pieces if p] == ["🦜", "🦜"], name
        assert stream(tokenizer, ids[:-1])[-1] == "\ufffd", name


@pytest.mark.parametrize("text", ["x" * 100_000, "ab" * 50_000, "!" * 100_000, "你好" * 50_000, " " * 100_000,
                                  "🦜" * 25_000, "<" * 100_000, "</s" * 33_000], ids=lambda text: text[:3])
@pytest.mark.thin(4)
def test_a_long_text_without_spaces_takes_linear_time(every_tokenizer, text):
    for name, tokenizer in every_tokenizer.items():
        if "unigram_library" in name and len(set(text)) > 1:
            continue  # the package's own unigram is the slow part
        start = time.process_time()
        tokenizer.encode(text)
        assert time.process_time() - start < 3, name


@pytest.mark.parametrize("text", ["\ud83d", "abc\udc00", "\udfff" * 3 + "x"])
def test_a_lone_surrogate_is_one_clear_error(every_tokenizer, text):
    for tokenizer in every_tokenizer.values():
        with pytest.raises(TokenizerError, match=r"lone surrogate, U\+D[8-F]"):
            tokenizer.encode(text)
        with pytest.raises(TokenizerError, match="lone surrogate"):
            tokenizer.encode_pair("a", text)


def test_ids_outside_the_vocabulary(every_tokenizer):
    for tokenizer in every_tokenizer.values():
        beyond = [tokenizer.vocab_size, 2**31, -1]
        assert tokenizer.decode(beyond) == ""
        for id in beyond:
            with pytest.raises(TokenizerError, match=f"no token {id}"):
                tokenizer.token_bytes(id)


def test_id_of_finds_tokens_as_written_and_as_text(every_tokenizer):
    for name, tokenizer in every_tokenizer.items():
        for id in range(tokenizer.vocab_size):
            assert tokenizer.id_of(tokenizer.token_text(id)) == id, name
        assert tokenizer.id_of("no such token, surely") is None
        assert tokenizer.id_of("") is None
        if not any(kind in name for kind in ("wordpiece", "bert", "llama_style")):
            assert tokenizer.token_bytes(tokenizer.id_of(" the")) == b" the", name


def test_special_tokens_are_matched_or_not(every_tokenizer):
    for name, tokenizer in every_tokenizer.items():
        if name == "tokenizer.bin":  # never recognises them
            continue
        special = sorted(tokenizer.special_ids)
        text = "a".join(tokenizer.token_text(id) for id in special)
        assert [id for id in tokenizer.encode(text, add_special=False) if id in tokenizer.special_ids] == special, name
        plain = tokenizer.encode(text, add_special=False, parse_special=False)
        assert not {*plain} & ({*special} - {tokenizer.unk_id}), name


def test_a_text_that_starts_with_bos_gets_no_second_one(every_tokenizer):
    for name, tokenizer in every_tokenizer.items():
        if not tokenizer.add_bos or name == "tokenizer.bin":
            continue
        bos = tokenizer.token_text(tokenizer.bos_id)
        assert tokenizer.encode(bos + "hello").count(tokenizer.bos_id) == 1, name
        assert tokenizer.encode("hello").count(tokenizer.bos_id) == 1, name
        assert tokenizer.encode(bos + "hello", parse_special=False)[0] == tokenizer.bos_id, name
        assert tokenizer.encode("hello", add_special=False).count(tokenizer.bos_id) == 0, name
