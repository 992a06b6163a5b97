"""tokenizer.json: ids and texts are the `tokenizers` package's own."""

import json

import pytest

from numflow.errors import FormatError, TokenizerError
from numflow.tokenizer import load_tokenizer
from numflow.tokenizer.pieces import piece_rule
from tests.tokenizer.conftest import LIBRARIES, NASTY, checkpoint, load_library, stream, write_json


@pytest.mark.parametrize("name", LIBRARIES)
def test_ids_and_texts_are_the_library_s(request, tmp_path, name):
    library = request.getfixturevalue(name)
    tokenizer = load_library(library, tmp_path)
    for text in NASTY.values():
        expected = library.encode(text).ids
        if not text.startswith("<s>"):  # the library puts a second BOS before one in the text, we do not
            assert tokenizer.encode(text) == expected
        assert tokenizer.encode(text, add_special=False) == library.encode(text, add_special_tokens=False).ids
        pair = library.encode(text, "hello")
        assert tokenizer.encode_pair(text, "hello") == (pair.ids, pair.type_ids)
        for skip in (True, False):
            decoded = library.decode(expected, skip_special_tokens=skip)
            if "\ufffd" not in decoded:
                assert tokenizer.decode(expected, skip_special=skip) == decoded
                assert "".join(stream(tokenizer, expected, skip_special=skip)) == decoded


def test_truncation_and_padding_of_the_file_are_left_out(wordpiece_library, tmp_path):
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(wordpiece_library.to_str())
    library.enable_truncation(4)
    library.enable_padding(length=20)
    tokenizer = load_library(library, tmp_path)
    assert tokenizer.encode("the cat sat on the mat") == wordpiece_library.encode("the cat sat on the mat").ids


def test_roles_come_from_the_side_files(byte_level_library, tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "</s>", "unk_token": None}
    tokenizer = load_library(byte_level_library, tmp_path, config)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.unk_id) == (0, {1}, 1, None)
    assert tokenizer.add_bos and tokenizer.special_ids == {0, 1}
    assert tokenizer.vocab_size == byte_level_library.get_vocab_size()


def test_every_end_of_turn_is_an_end(byte_level_library, tmp_path):
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(byte_level_library.to_str())
    library.add_special_tokens(["<|im_end|>", "<|end|>", "<|other|>"])
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [1, 5]}))
    library.save(str(tmp_path / "tokenizer.json"))
    files = {"tokenizer.json": tmp_path / "tokenizer.json", "generation_config": generation}
    tokenizer = load_tokenizer(checkpoint(files, config={"eos_token_id": 7}))
    ends = {library.token_to_id("<|im_end|>"), library.token_to_id("<|end|>")}
    assert tokenizer.eos_ids == {1, 5, 7} | ends
    library.add_special_tokens(["<|return|>"])
    turn_end = library.token_to_id("<|return|>")
    assert load_library(library, tmp_path).eos_ids == {library.token_to_id("<|im_end|>"), turn_end}


@pytest.mark.parametrize(("config", "options", "first", "last"), [
    ({"bos_token": "<s>", "eos_token": "</s>"}, {}, 0, None),
    ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}, {}, None, None),
    ({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}, {"add_bos": True}, 0, None),
    ({"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}, {}, 0, 1),
    ({}, {"bos": "</s>", "add_bos": True, "eos": "<s>", "add_eos": True}, 1, 0),
])
def test_bos_and_eos_follow_files_and_options(byte_level_library, tmp_path, config, options, first, last):
    tokenizer = load_library(byte_level_library, tmp_path, config, options)
    body = byte_level_library.encode("hello", add_special_tokens=False).ids
    if first == 1:
        first = [1, 0]  # the file's own BOS is then just a token that the post-processor adds
    else:
        first = [] if first is None else [first]
    assert tokenizer.encode("hello") == [*first, *body, *([] if last is None else [last])]


def test_an_option_that_names_no_token(byte_level_library, tmp_path):
    with pytest.raises(TokenizerError, match=r"\[tokenizer\] pad: no token '<nothing>'"):
        load_library(byte_level_library, tmp_path, options={"pad": "<nothing>"})


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"model": {"type": "BPE"}}', '{"version": "1.0"}'])
def test_a_broken_file_is_one_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(FormatError, match=r"tokenizer\.json: not a tokenizer\.json: ") as error:
        load_tokenizer(checkpoint({"tokenizer.json": path}))
    assert "\n" not in str(error.value)


def test_a_vocabulary_without_its_unknown_token_is_one_error(wordpiece_library, tmp_path):
    content = json.loads(wordpiece_library.to_str())
    content["model"]["unk_token"] = "[NONE]"
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(checkpoint({"tokenizer.json": path}))
    with pytest.raises(FormatError, match="Missing"):
        tokenizer.encode("🦜")


def test_a_decoder_that_cannot_go_token_by_token_is_refused():
    with pytest.raises(TokenizerError, match="'CTC'"):
        piece_rule({"type": "CTC"})


@pytest.mark.parametrize(("decoder", "tokens", "expected"), [
    (None, ["a", "b"], "a b"),
    ({"type": "ByteLevel"}, ["Ġa", "Ċ", "Ã", "©", " raw"], " a\né raw"),
    ({"type": "WordPiece", "prefix": "##", "cleanup": False}, ["a", "##b", "."], "ab ."),
    ({"type": "WordPiece", "prefix": "##", "cleanup": True}, ["##a", "##b", ".", "n't"], "##ab.n't"),
    ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, ["▁a", "▁b"], "a b"),
    ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}, ["▁a", "▁b"], " a b"),
    ({"type": "Strip", "content": "x", "start": 1, "stop": 2}, ["xxaxxx", "xb"], "xaxb"),
    ({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}, ["_a", "<0xC3>", "<0xA9>", "_b"], "aé b"),
])
def test_decoders_worked_by_hand(decoder, tokens, expected):
    rule = piece_rule(decoder)
    assert b"".join(rule(token, n == 0) for n, token in enumerate(tokens)).decode() == expected


def test_an_id_that_is_far_too_high(byte_level_library, tmp_path):
    """The library would make a place for each id below it."""
    content = json.loads(byte_level_library.to_str())
    content["model"]["vocab"]["X"] = 1 << 31
    path = write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(FormatError, match=r"tokenizer\.json: token 'X' has id 2147483648; expected less than 16777216"):
        load_tokenizer(checkpoint({"tokenizer.json": path}))


def test_types_of_tokens(byte_level_library, tmp_path):
    def load(single):
        content = json.loads(byte_level_library.to_str())
        content["post_processor"]["single"] = single
        return load_tokenizer(checkpoint({"tokenizer.json": write_json(tmp_path / "tokenizer.json", content)}))

    around = {"SpecialToken": {"id": "<s>", "type_id": 2}}
    tokenizer = load([around, {"Sequence": {"id": "A", "type_id": 1}}])
    assert tokenizer.encode("<s>a") == tokenizer.encode("a") and tokenizer.encode_pair("a")[1] == [2, 1]
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: post_processor: .* types below 256, found 2147483648"):
        load([{"Sequence": {"id": "A", "type_id": 1 << 31}}])
