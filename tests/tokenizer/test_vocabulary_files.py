"""vocab.json with merges.txt, and vocab.txt: the same ids as the tokenizer that wrote them."""

import json

import pytest

from numflow.errors import FormatError, TokenizerError
from numflow.tokenizer import load_tokenizer
from tests.tokenizer.conftest import NASTY, checkpoint, write_json


def save_bpe(folder, library):
    model = json.loads(library.to_str())["model"]
    write_json(folder / "vocab.json", model["vocab"])
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""])
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return {name: folder / name for name in ("vocab.json", "merges.txt")}


def load(folder, files, config=None, options=None):
    if config is not None:
        files = files | {"tokenizer_config": write_json(folder / "tokenizer_config.json", config)}
    return load_tokenizer(checkpoint(files, path=folder), options)


def test_byte_level_bpe(byte_level_library, tmp_path):
    tokenizer = load(tmp_path, save_bpe(tmp_path, byte_level_library), {"bos_token": "<s>", "eos_token": "</s>"})
    for text in NASTY.values():
        assert tokenizer.encode(text) == byte_level_library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (0, {1}, {0, 1})


def test_bos_where_the_config_asks_for_it(byte_level_library, tmp_path):
    config = {"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = load(tmp_path, save_bpe(tmp_path, byte_level_library), config)
    assert tokenizer.add_bos and tokenizer.encode("</s>the") == tokenizer.encode("the")
    assert tokenizer.encode("the")[0] == 1


def test_cls_and_sep_go_around_text(byte_level_library, tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>",
              "mask_token": {"content": "<mask>", "lstrip": True}}
    tokenizer = load(tmp_path, save_bpe(tmp_path, byte_level_library), config)
    the = tokenizer.encode("the", add_special=False)
    assert tokenizer.encode_pair("the", "the") == ([0, *the, 1, 1, *the, 1], [0] * (2 * len(the) + 4))
    mask = len(json.loads((tmp_path / "vocab.json").read_text()))
    assert tokenizer.encode("the <mask>") == [0, *the, mask, 1] and tokenizer.mask_id == mask


def test_another_rule_for_cutting_text(byte_level_library, tmp_path):
    files = save_bpe(tmp_path, byte_level_library)
    digits = load(tmp_path, files, options={"pre": "starcoder"}).encode("1234")
    assert len(digits) == 4
    with pytest.raises(TokenizerError, match="'nonsense' is not a known pre-tokenizer"):
        load(tmp_path, files, options={"pre": "nonsense"})


@pytest.mark.parametrize(("name", "content", "message"), [
    ("vocab.json", "[]", "should be a JSON object"),
    ("vocab.json", '{"a": "b"}', "token 'a' should have an id, has 'b'"),
    ("vocab.json", '{"a": 99999999999}', "token 'a' should have an id"),
    ("vocab.json", '{"a": 0}', "the merges do not fit"),
    ("vocab.json", "{", "not JSON"),
    ("vocab.json", '{"a": "' + "b" * 9000 + '"}', "token 'a' should have an id, has '.{,120}$"),
    ("vocab.json", '{"\\ud83d\\ude00": 0, "x\\udfff": 1}', r"has a lone surrogate, U\+DFFF, which is no character"),
    ("vocab.json", "[" * 100_000, "not JSON"),
    ("merges.txt", "#version\na b c\n", "line 2 should be two tokens"),
    ("merges.txt", "x nothing", "the merges do not fit"),
])
def test_broken_files(byte_level_library, tmp_path, name, content, message):
    files = save_bpe(tmp_path, byte_level_library)
    files[name].write_text(content)
    with pytest.raises(FormatError, match=message):
        load(tmp_path, files)


def test_wordpiece(wordpiece_library, tmp_path):
    path = tmp_path / "vocab.txt"
    vocab = wordpiece_library.get_vocab()
    path.write_text("\n".join(sorted(vocab, key=vocab.get)) + "\n", encoding="utf-8")
    tokenizer = load(tmp_path, {"vocab.txt": path})
    for text in NASTY.values():
        pair = wordpiece_library.encode(text, "the cat")
        assert tokenizer.encode_pair(text, "the cat") == (pair.ids, pair.type_ids)
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id, tokenizer.eos_ids) == (0, 1, 4, frozenset())
    cased = load(tmp_path, {"vocab.txt": path}, {"do_lower_case": False})
    assert 1 in cased.encode("THE CAT") and 1 not in tokenizer.encode("THE CAT")


@pytest.mark.parametrize(("content", "message"), [
    (b"a\nb\n", r"no token '\[UNK\]'"),
    (b"\xff\n", "not UTF-8 at byte 0"),
])
def test_a_broken_word_list(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        load(tmp_path, {"vocab.txt": path})
