"""GGUF vocabularies: ids are those of the tokenizer the metadata was written from."""

import pytest
from sentencepiece import SentencePieceProcessor

from numflow.errors import FormatError, TokenizerError
from numflow.tokenizer import load_tokenizer
from tests.tokenizer.conftest import (
    NASTY,
    gguf,
    gguf_of_byte_level,
    gguf_of_sentencepiece,
    gguf_of_wordpiece,
)


def test_sentencepiece_bpe(bpe_model):
    tokenizer = load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model)))
    processor = SentencePieceProcessor(model_proto=bpe_model)
    for text in NASTY.values():
        assert tokenizer.encode(text, parse_special=False) == [1, *processor.encode(text)]
    assert tokenizer.encode("<s>the</s>", add_special=False) == [1, *processor.encode("the"), 2]


def test_sentencepiece_unigram_(unigram_model):
    charsmap = _charsmap(unigram_model)
    tokenizer = load_tokenizer(gguf(gguf_of_sentencepiece(
        unigram_model, model="t5", remove_extra_whitespaces=True, precompiled_charsmap=charsmap)))
    processor = SentencePieceProcessor(model_proto=unigram_model)
    for text in NASTY.values():
        assert tokenizer.encode(text, parse_special=False)[:-1] == processor.encode(text)


def _charsmap(proto):
    """The largest length-delimited field 2 inside field 3 of a model, as signed bytes."""
    at, found = 0, b""

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value |= (proto[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if proto[at - 1] < 128:
                return value

    while at < len(proto):
        key, size = varint(), varint()
        if key == 3 << 3 | 2:
            end = at + size
            while at < end:
                inner, value = varint(), varint()
                if inner & 7 == 2:
                    found = proto[at : at + value] if inner >> 3 == 2 else found
                    at += value
        else:
            at += size
    return [byte - 256 if byte > 127 else byte for byte in found]


def test_byte_level_bpe(byte_level_library):
    tokenizer = load_tokenizer(gguf(gguf_of_byte_level(byte_level_library)))
    for text in NASTY.values():
        assert tokenizer.encode(text) == byte_level_library.encode(text, add_special_tokens=False).ids
    assert not tokenizer.add_bos and tokenizer.bos_id == 0 and tokenizer.eos_ids == {1}
    tool = byte_level_library.token_to_id("<tool>")
    assert tokenizer.encode("<s><tool>", parse_special=False)[-1] == tool
    assert tokenizer.special_ids == {0, 1}


def test_bpe_of_characters_between_white_space():
    """Characters that are no tokens are left out, and so is white space, as llama.cpp has it."""
    texts = ["<s>", "</s>", "你", "好", "你好", "a", "b", "ab"]
    meta = {f"tokenizer.ggml.{key}": value for key, value in {
        "model": "whitespace", "pre": "whitespace", "tokens": texts, "token_type": [3, 3, 1, 1, 1, 1, 1, 1],
        "merges": ["你 好", "a b"], "bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}.items()}
    tokenizer = load_tokenizer(gguf(meta))
    assert tokenizer.encode("你好 a\u3000b\nabz AB") == [0, 4, 5, 6, 7]
    assert tokenizer.decode([4, 5, 6, 7]) == "你好abab"
    assert load_tokenizer(gguf(meta | {"tokenizer.ggml.normalizer.lowercase": True})).encode("AB ") == [0, 7]


def test_words_that_begin_with_a_mark():
    texts = ["<s>", "</s>", "▁", "a", "b", "▁a", "▁b", "\n", "\n\n", *(f"<0x{n:02X}>" for n in range(256))]
    meta = {f"tokenizer.ggml.{key}": value for key, value in {
        "model": "gpt2", "pre": "mmbert", "tokens": texts, "token_type": [3, 3, *[1] * 7, *[6] * 256],
        "merges": ["▁ a", "▁ b", "\n \n"], "bos_token_id": 0, "eos_token_id": 1}.items()}
    tokenizer = load_tokenizer(gguf(meta))
    assert tokenizer.encode("a  b\n\na</s>b") == [5, 2, 6, 8, 5, 1, 6]
    assert tokenizer.encode("é") == [2, 9 + 0xC3, 9 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_wordpiece(wordpiece_library):
    tokenizer = load_tokenizer(gguf(gguf_of_wordpiece(wordpiece_library)))
    for text in NASTY.values():
        pair = wordpiece_library.encode(text, "the cat")
        assert tokenizer.encode_pair(text, "the cat") == (pair.ids, pair.type_ids)
        assert tokenizer.encode(text) == wordpiece_library.encode(text).ids
    assert tokenizer.mask_id == 4 and tokenizer.id_of("##" + "s") == wordpiece_library.token_to_id("##s")


def test_wordpiece_with_capitals_keeps_them(wordpiece_library):
    meta = gguf_of_wordpiece(wordpiece_library)
    meta["tokenizer.ggml.tokens"].append("▁Cat")
    meta["tokenizer.ggml.token_type"].append(1)
    assert load_tokenizer(gguf(meta)).encode("Cat")[1:-1] == [len(meta["tokenizer.ggml.tokens"]) - 1]
    meta["tokenizer.ggml.normalizer.lowercase"] = True
    assert load_tokenizer(gguf(meta)).encode("Cat") == wordpiece_library.encode("cat").ids


@pytest.mark.parametrize(("more", "options", "first", "last"), [
    ({}, {}, 1, None),
    ({"add_bos_token": False}, {}, None, None),
    ({"add_bos_token": False}, {"add_bos": True}, 1, None),
    ({"add_eos_token": True}, {}, 1, 2),
    ({"add_eos_token": True}, {"add_eos": False, "bos": "</s>"}, 2, None),
])
def test_bos_and_eos_follow_metadata_and_options(bpe_model, more, options, first, last):
    ids = load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model, **more)), options).encode("the")
    body = SentencePieceProcessor(model_proto=bpe_model).encode("the")
    assert ids == [*([] if first is None else [first]), *body, *([] if last is None else [last])]


def test_without_a_space_before_the_text_none_is_stripped(bpe_model):
    tokenizer = load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model, add_space_prefix=False)))
    for text in ("the cat", " the cat", "  the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ends_of_turn(byte_level_library):
    meta = gguf_of_byte_level(byte_level_library)
    for key in ("tokens", "token_type"):
        more = {"tokens": ["<|eot_id|>", "<turn>", "<|im_end|>", "<|end|>", "<|flush|>"], "token_type": [3, 3, 1, 4, 3]}
        meta[f"tokenizer.ggml.{key}"] += more[key]
    eot = meta["tokenizer.ggml.tokens"].index("<|eot_id|>")
    meta["tokenizer.ggml.eot_token_id"] = eot + 1
    tokenizer = load_tokenizer(gguf(meta))
    assert tokenizer.eos_ids == {1, eot, eot + 1, eot + 2, eot + 4}  # <|end|> ends messages where <|flush|> ends turns
    for id in (eot + 2, eot + 3):  # control tokens, whatever the file calls them
        assert tokenizer.encode(text := tokenizer.token_text(id)) == [id]
        assert id not in tokenizer.encode(text, parse_special=False)


def test_a_control_token_that_ends_texts_does_so_beside_another_end(bpe_model):
    meta = gguf_of_sentencepiece(bpe_model, eos_token_id=7)
    assert load_tokenizer(gguf(meta)).eos_ids == {2, 7}
    meta["tokenizer.ggml.token_type"][2] = 1
    assert load_tokenizer(gguf(meta)).eos_ids == {7}


@pytest.mark.parametrize(("key", "attribute", "default"), [
    ("bos", "bos_id", 1), ("unknown", "unk_id", 0), ("padding", "pad_id", None)])
def test_an_id_beyond_the_vocabulary_is_the_default(bpe_model, key, attribute, default):
    tokenizer = load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model, **{f"{key}_token_id": 1 << 20})))
    assert getattr(tokenizer, attribute) == default


def test_spaces_are_squeezed_for_unigram_vocabularies_alone(bpe_model):
    plain = load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model)))
    squeezed = load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model, remove_extra_whitespaces=True)))
    assert squeezed.encode("  the  cat ") == plain.encode("  the  cat ")


@pytest.mark.parametrize("types", [None, {6: 1}])
def test_tokens_of_bytes_are_known_by_their_texts(bpe_model, types):
    meta = gguf_of_sentencepiece(bpe_model)
    expected = load_tokenizer(gguf(dict(meta))).encode("🦜 the\n")
    meta["tokenizer.ggml.token_type"] = [types.get(t, t) for t in meta["tokenizer.ggml.token_type"]] if types else []
    assert load_tokenizer(gguf(meta)).encode("🦜 the\n") == expected


def test_user_defined_tokens_are_text_and_always_matched(bpe_model):
    meta = gguf_of_sentencepiece(bpe_model, add_space_prefix=False)
    extra = ["  ", "   ", "\n\n", "<b>"]
    for key, values in (("tokens", extra), ("scores", [-1000.0] * 4), ("token_type", [4] * 4)):
        meta[f"tokenizer.ggml.{key}"] = meta[f"tokenizer.ggml.{key}"] + values
    first = len(meta["tokenizer.ggml.tokens"]) - 4
    tokenizer = load_tokenizer(gguf(meta))
    ids = tokenizer.encode("    \n\n\n<b>", add_special=False, parse_special=False)
    assert [id for id in ids if id >= first] == [first + 1, first + 2, first + 3]
    assert tokenizer.decode(ids) == "    \n\n\n<b>"


def test_added_tokens_may_swallow_the_white_space_behind_them(bpe_model):
    meta = gguf_of_sentencepiece(bpe_model)
    kept, plain = (load_tokenizer(gguf(meta), options) for options in ({"keep_space_after": "<unk> <s>"}, {}))
    assert kept.encode("<s> the</s> \n the") == plain.encode("<s> the</s>the") != plain.encode("<s>the</s>the")


def test_repeated_and_empty_tokens_are_survived(bpe_model):
    meta = gguf_of_sentencepiece(bpe_model)
    for key, value in (("tokens", ["▁the", "a\0b", "", ""]), ("scores", [0.0] * 4), ("token_type", [1, 1, 1, 5])):
        meta[f"tokenizer.ggml.{key}"] = meta[f"tokenizer.ggml.{key}"] + value
    tokenizer = load_tokenizer(gguf(meta))
    assert tokenizer.encode("the") == load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model))).encode("the")
    assert tokenizer.vocab_size == len(meta["tokenizer.ggml.tokens"])
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""


def test_a_default_role_that_is_ordinary_text_is_none(byte_level_library):
    meta = gguf_of_byte_level(byte_level_library)
    del meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]
    meta["tokenizer.ggml.token_type"][1] = 1  # </s>
    tokenizer = load_tokenizer(gguf(meta))
    assert tokenizer.bos_id is None and tokenizer.eos_ids == frozenset()


def test_numpy_arrays_do_as_well_as_lists(bpe_model):
    import numpy as np

    meta = gguf_of_sentencepiece(bpe_model)
    lists = load_tokenizer(gguf(dict(meta)))
    for key in ("scores", "token_type", "tokens"):
        meta[f"tokenizer.ggml.{key}"] = np.array(meta[f"tokenizer.ggml.{key}"])
    assert load_tokenizer(gguf(meta)).encode("the cat 🦜") == lists.encode("the cat 🦜")


@pytest.mark.parametrize(("key", "value", "message"), [
    ("model", "rwkv", r"tokenizer\.ggml\.model 'rwkv' is not supported; known: .*gpt2"),
    ("model", ["llama"], "is not supported"),
    ("model", "none", "has no tokenizer"),
])
def test_models_that_are_not_supported(bpe_model, key, value, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model, **{key: value})))


@pytest.mark.parametrize(("key", "value", "message"), [
    ("tokens", [], "tokens should be a list of tokens"),
    ("tokens", "abc", "tokens should be a list"),
    ("tokens", ["a", 1], "tokens should be text"),
    ("tokens", ["a" * 100_000], "tokens has a token of more than 65536 characters"),
    ("scores", [0.0], "scores should have .* numbers, one per token, has 1"),
    ("scores", ["x"], "scores should be a list of numbers"),
    ("scores", [float("nan")], "scores should be a list of numbers"),
    ("token_type", [[1]], "token_type should be a list of numbers"),
    ("add_bos_token", 1, "add_bos_token should be true or false, is 1"),
    ("add_space_prefix", "no", "add_space_prefix should be true or false"),
    ("bos_token_id", "1", "bos_token_id should be the number of a token, is '1'"),
    ("eos_token_id", True, "eos_token_id should be the number of a token, is True"),
    ("eot_token_id", 2.0, "eot_token_id should be the number of a token, is 2.0"),
    ("padding_token_id", [1], r"padding_token_id should be the number of a token, is \[1\]"),
])
def test_metadata_that_contradicts_itself(bpe_model, key, value, message):
    with pytest.raises(FormatError, match=rf"model\.gguf: tokenizer\.ggml\.{message}"):
        load_tokenizer(gguf(gguf_of_sentencepiece(bpe_model, **{key: value})))


@pytest.mark.parametrize(("merges", "message"), [
    (["ab"], r"merges\[0\] should be two tokens, is 'ab'"),
    (["x nothing"], "merges do not fit"),
    (["quick brown"], "merges do not fit the vocabulary: one makes 'quickbrown', which is no token"),
    (["a " + "b" * 60_000], "makes 'abbb.{90,110}, which is no token"),
    ([1], "merges should be text"),
])
def test_merges_that_do_not_fit(byte_level_library, merges, message):
    with pytest.raises(FormatError, match=message):
        load_tokenizer(gguf(gguf_of_byte_level(byte_level_library, merges=merges)))


def test_of_merges_that_stand_twice_the_first_counts(byte_level_library):
    meta = gguf_of_byte_level(byte_level_library)
    merges = meta["tokenizer.ggml.merges"]
    twice = load_tokenizer(gguf(meta | {"tokenizer.ggml.merges": [*merges, *merges[:40]]}))
    for text in NASTY.values():
        assert twice.encode(text) == load_tokenizer(gguf(meta)).encode(text)


def test_merges_that_are_missing(byte_level_library):
    """Without them the same text would be other ids, all of single bytes."""
    meta = gguf_of_byte_level(byte_level_library)
    del meta["tokenizer.ggml.merges"]
    with pytest.raises(FormatError, match=r"model\.gguf: tokenizer\.ggml\.merges is missing"):
        load_tokenizer(gguf(meta))
    assert load_tokenizer(gguf(meta | {"tokenizer.ggml.merges": []})).vocab_size == len(meta["tokenizer.ggml.tokens"])


def test_a_chat_template_that_is_no_text(byte_level_library):
    meta = gguf_of_byte_level(byte_level_library) | {"tokenizer.chat_template": 7}
    with pytest.raises(FormatError, match=r"model\.gguf: tokenizer\.chat_template should be text, is 7"):
        load_tokenizer(gguf(meta))
