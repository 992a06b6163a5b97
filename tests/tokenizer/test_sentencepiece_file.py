"""tokenizer.model: ids are those of the `sentencepiece` package; special tokens follow the side files."""

import pytest
from sentencepiece import SentencePieceProcessor

from numflow.errors import FormatError, TokenizerError
from numflow.tokenizer import load_tokenizer
from tests.tokenizer.conftest import NASTY, checkpoint, train_sentencepiece, write_json


def load(folder, proto, config=None, options=None, **files):
    (folder / "tokenizer.model").write_bytes(proto)
    files = {name.replace("__", "."): write_json(folder / f"{name}.json", content) for name, content in files.items()}
    if config is not None:
        files["tokenizer_config"] = write_json(folder / "tokenizer_config.json", config)
    return load_tokenizer(checkpoint({"tokenizer.model": folder / "tokenizer.model", **files}), options)


def test_bpe_ids_are_the_package_s_with_bos_first(tmp_path, bpe_model):
    tokenizer, processor = load(tmp_path, bpe_model), SentencePieceProcessor(model_proto=bpe_model)
    for text in NASTY.values():
        assert tokenizer.encode(text, parse_special=False) == [1, *processor.encode(text)]
        assert tokenizer.decode(processor.encode(text)) == processor.decode(processor.encode(text))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id, tokenizer.pad_id) == (1, {2}, 0, None)
    first, second = [1, *processor.encode("a")], [1, *processor.encode("b")]
    assert tokenizer.encode_pair("a", "b") == (first + second, [0] * len(first) + [1] * len(second))


def test_unigram_ids_are_the_package_s_with_eos_last(tmp_path, unigram_model):
    tokenizer, processor = load(tmp_path, unigram_model), SentencePieceProcessor(model_proto=unigram_model)
    for text in NASTY.values():
        assert tokenizer.encode(text, parse_special=False) == [*processor.encode(text), 1]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id, tokenizer.pad_id) == (None, {1}, 2, 0)
    assert not tokenizer.add_bos


@pytest.mark.parametrize("begin", [True, False])
def test_the_tokens_of_an_encoder_stand_around_texts(tmp_path, begin):
    """[CLS] and [SEP] as the model's own begin and end, or as control pieces of a model that has no such."""
    first = {"bos_id": 1, "eos_id": 2, "bos_piece": "[CLS]", "eos_piece": "[SEP]"} if begin else {
        "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]"]}
    proto = train_sentencepiece(model_type="unigram", vocab_size=180, pad_id=0, unk_id=3 if begin else 1,
                                pad_piece="[PAD]", unk_piece="[UNK]", **first)
    tokenizer, processor = load(tmp_path, proto), SentencePieceProcessor(model_proto=proto)
    cls, sep = (processor.piece_to_id(piece) for piece in ("[CLS]", "[SEP]"))
    assert (tokenizer.roles.cls, tokenizer.roles.sep) == (cls, sep)
    one, other = processor.encode("the"), processor.encode("a man")
    assert tokenizer.encode("the") == [cls, *one, sep]
    assert tokenizer.encode_pair("the", "a man") == ([cls, *one, sep, *other, sep],
                                                     [0] * (len(one) + 2) + [1] * (len(other) + 1))
    assert load(tmp_path, proto, options={"add_eos": False}).encode("the") == [cls, *one]


def test_text_after_a_special_token_gets_its_space_unless_told_otherwise(tmp_path, bpe_model):
    processor = SentencePieceProcessor(model_proto=bpe_model)
    legacy, new = load(tmp_path, bpe_model), load(tmp_path, bpe_model, {"legacy": False})
    spaced = processor.encode("the")
    assert legacy.encode("the</s>the", add_special=False) == [*spaced, 2, *spaced]
    joined = new.encode("the</s>the", add_special=False)
    assert joined[: len(spaced) + 1] == [*spaced, 2] and joined[len(spaced) + 1 :] != spaced
    assert b"".join(map(new.token_bytes, joined[len(spaced) + 1 :])) == b"the"


def test_added_tokens_follow_the_model_s_own(tmp_path, bpe_model):
    count = SentencePieceProcessor(model_proto=bpe_model).GetPieceSize()
    table = {str(count): {"content": "<|user|>", "special": True, "rstrip": True},
             str(count + 1): {"content": "<tool>", "special": False}}
    config = {"added_tokens_decoder": table, "add_eos_token": True}
    tokenizer = load(tmp_path, bpe_model, config, {"added_tokens": {"[last]": count + 4}},
                     special_tokens_map={"additional_special_tokens": ["<x>", "<|user|>"]})
    assert tokenizer.vocab_size == count + 5
    ids = [tokenizer.id_of(text) for text in ("<|user|>", "<tool>", "<x>", "[last]")]
    assert ids == [count, count + 1, count + 2, count + 4]
    ids = tokenizer.encode("<|user|>  the<tool>")
    assert ids[:2] == [1, count] and ids[-2:] == [count + 1, 2]
    assert tokenizer.decode(ids) == "the<tool>"
    assert count not in tokenizer.encode("<|user|>", parse_special=False)
    assert count + 1 in tokenizer.encode("<tool>", parse_special=False)


def test_sentinels_count_down(tmp_path, unigram_model):
    count = SentencePieceProcessor(model_proto=unigram_model).GetPieceSize()
    tokenizer = load(tmp_path, unigram_model, {"additional_special_tokens": [f"<extra_id_{n}>" for n in range(10)]})
    assert [tokenizer.id_of(f"<extra_id_{n}>") for n in (0, 3, 9)] == [count + 9, count + 6, count]


def test_a_vocab_json_gives_pieces_other_ids(tmp_path, unigram_model):
    processor = SentencePieceProcessor(model_proto=unigram_model)
    pieces = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces += [p for n in reversed(range(processor.GetPieceSize())) if (p := processor.IdToPiece(n)) not in pieces]
    vocab = {piece: n for n, piece in enumerate(pieces) if piece != "▁the"}
    tokenizer = load(tmp_path, unigram_model, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
                     {"language_codes": ["en", "zh"]}, vocab__json=vocab)
    expected = [vocab.get(piece, 3) for piece in processor.encode("the cat sat", out_type=str)]
    assert tokenizer.encode("the cat sat", add_special=False) == expected and 3 in expected
    assert (tokenizer.id_of("__en__"), tokenizer.id_of("__zh__")) == (len(pieces), len(pieces) + 1)
    assert tokenizer.id_of(" ") == vocab["▁"]
    assert tokenizer.encode("__en__ cat", add_special=False)[0] == len(pieces)
    assert tokenizer.decode(tokenizer.encode("dog __zh__")) == "dog"


@pytest.mark.parametrize("change", [lambda b: b"", lambda b: b[:100], lambda b: b"\xff" * 50, lambda b: b[:-1]])
def test_a_broken_model_is_one_error(tmp_path, bpe_model, change):
    with pytest.raises(FormatError, match=r"tokenizer\.model: not a SentencePiece model"):
        load(tmp_path, change(bpe_model))


def test_a_hostile_normaliser_is_refused(tmp_path, unigram_model):
    import struct

    from numflow.tokenizer import spm

    table = struct.pack("<I", 1024) + struct.pack("<I", 0x7FFFFC00) * 256 + b"a\0"
    with pytest.raises(FormatError, match="not a SentencePiece model"):
        load(tmp_path, unigram_model + spm._message(3, spm._bytes(2, table)))


@pytest.mark.parametrize(("options", "message"), [
    ({"added_tokens": {"x": 10**9}}, r"added_tokens: 'x' should have an id near"),
    ({"added_tokens": {"x": "y"}}, r"added_tokens: 'x' should have an id near"),
    ({"eos": "<none>"}, r"eos: no token '<none>'"),
])
def test_options_that_do_not_fit(tmp_path, bpe_model, options, message):
    with pytest.raises(TokenizerError, match=message):
        load(tmp_path, bpe_model, options=options)


@pytest.mark.parametrize("table", [{"x": {"content": "a"}}, {"1": "a"}, {"-5": {"content": "a"}},
                                   {"9" * 12: {"content": "a"}}, []])
def test_a_broken_table_of_added_tokens(tmp_path, bpe_model, table):
    with pytest.raises(FormatError, match="added_tokens_decoder"):
        load(tmp_path, bpe_model, {"added_tokens_decoder": table})


def test_a_translator_with_a_vocabulary_of_its_own(tmp_path, unigram_model):
    processor = SentencePieceProcessor(model_proto=unigram_model)
    pieces = [processor.IdToPiece(n) for n in range(3, processor.GetPieceSize())]
    pieces = ["</s>", "<unk>", *pieces, ">>fra<<", "<pad>"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    (tmp_path / "source.spm").write_bytes(unigram_model)
    files = {"source.spm": tmp_path / "source.spm", "vocab.json": write_json(tmp_path / "vocab.json", vocab),
             "special_tokens_map": write_json(tmp_path / "map.json", {"eos_token": "</s>", "unk_token": "<unk>"})}
    tokenizer = load_tokenizer(checkpoint(files))
    words = [vocab[piece] for piece in processor.encode("the cat", out_type=str)]
    assert tokenizer.encode(">>fra<<the cat") == [vocab[">>fra<<"], *words, 0]
    assert tokenizer.decode(tokenizer.encode(">>fra<<the cat")) == "the cat"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.unk_id) == (None, {0}, 1)


def test_added_tokens_json(tmp_path, bpe_model):
    count = SentencePieceProcessor(model_proto=bpe_model).GetPieceSize()
    config = {"additional_special_tokens": ["<|user|>"]}
    tokenizer = load(tmp_path, bpe_model, config, added_tokens={"<|user|>": count, "<tool>": count + 1})
    assert tokenizer.encode("<|user|><tool>", add_special=False) == [count, count + 1]
    assert count in tokenizer.special_ids and count + 1 not in tokenizer.special_ids
