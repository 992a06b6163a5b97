"""tokenizer.bin against a plain implementation of its algorithm."""

import json
import struct

import pytest

from numflow.errors import FormatError
from numflow.tokenizer import load_tokenizer
from tests.conftest import shared
from tests.tokenizer.conftest import NASTY, checkpoint, stream, write_scored


def read(path):
    data, at, tokens, scores = path.read_bytes(), 4, [], []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        tokens.append(data[at + 8 : at + 8 + length])
        scores.append(score)
        at += 8 + length
    return tokens, scores


def greedy_merging(path, text):
    """BOS, a space, then characters (bytes + 3 where there is none), merged best score first."""
    tokens, scores = read(path)
    ids_of = {token: id for id, token in reversed(list(enumerate(tokens)))}
    ids = [ids_of[b" "]] if text else []
    for character in text:
        raw = character.encode("utf-8")
        ids += [ids_of[raw]] if raw in ids_of else [byte + 3 for byte in raw]
    while True:
        best = max(((scores[ids_of[pair]], -n) for n in range(len(ids) - 1)
                    if (pair := tokens[ids[n]] + tokens[ids[n + 1]]) in ids_of), default=None)
        if best is None:
            return [1, *ids]
        n = -best[1]
        ids[n : n + 2] = [ids_of[tokens[ids[n]] + tokens[ids[n + 1]]]]


def load(path):
    return load_tokenizer(checkpoint({"tokenizer.bin": path}, format="llama2c", naming="llama2c"))


def test_ids_are_those_of_greedy_merging(tmp_path, bpe_model):
    path = write_scored(tmp_path / "tokenizer.bin", bpe_model)
    tokenizer = load(path)
    for name, text in NASTY.items():
        if name not in ("long run", "marks"):
            assert tokenizer.encode(text) == greedy_merging(path, text), name
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (1, {2}, 0)


def test_the_published_vocabulary():
    path = shared("data", "llama2c", "tok512.bin")
    tokenizer = load(path)
    assert tokenizer.vocab_size == 512
    assert tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
    for name, text in NASTY.items():
        if name not in ("long run", "marks"):
            assert tokenizer.encode(text) == greedy_merging(path, text), name
    for models in json.loads(shared("data", "llama2c", "expected.json").read_text())["expected"].values():
        for text in models.values():
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == text


def test_the_space_at_the_start_is_dropped_unless_the_text_goes_on(tmp_path, bpe_model):
    tokenizer = load(write_scored(tmp_path / "tokenizer.bin", bpe_model))
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode(ids) == tokenizer.decode(ids[1:]) == "the cat"
    assert tokenizer.decode(ids[1:], continues=True) == " the cat"
    assert tokenizer.decode(ids, skip_special=False) == "<s> the cat"


@pytest.mark.parametrize(("change", "message"), [
    (lambda data: data[:-1], "should fit in the file"),
    (lambda data: data + b"\0\0\0", "truncated at token"),
    (lambda data: data[:8] + struct.pack("<i", -1) + data[12:], "token 0 should fit"),
    (lambda data: data[:8] + struct.pack("<i", 2**30) + data[12:], "token 0 should fit"),
    (lambda data: data[:4], "should have more than 259 tokens"),
    (lambda data: b"", "should have more than 259 tokens"),
])
def test_a_broken_file_is_one_error(tmp_path, bpe_model, change, message):
    path = write_scored(tmp_path / "tokenizer.bin", bpe_model)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FormatError, match=rf"tokenizer\.bin: .*{message}"):
        load(path)
