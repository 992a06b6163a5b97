"""Tokenizers of every kind as GGUF metadata, read back."""

import json

import pytest

from numflow.errors import TokenizerError
from numflow.tokenizer import gguf_vocabulary, load_tokenizer
from numflow.tokenizer.gguf_table import metadata_of
from numflow.tokenizer.probes import probes
from tests.tokenizer.conftest import NASTY, checkpoint, load_library, train_sentencepiece, write_json

MODELS = {"byte_level_library": "gpt2", "wordpiece_library": "bert", "llama_style_library": "llama", "bpe": "llama",
          "unigram": "t5", "tokenizer.bin": "llama", "gguf llama": "llama", "gguf gpt2": "gpt2", "gguf t5": "t5",
          "gguf bert": "bert"}


def read(tokenizer, rows=None, **options):
    """The metadata, and the tokenizer that it is."""
    meta = metadata_of(tokenizer, rows or tokenizer.vocab_size, "model", **options)
    return meta, gguf_vocabulary.load(meta, {}, "model")


def of_sentencepiece(folder, config=None, **options):
    path = folder / "tokenizer.model"
    path.write_bytes(train_sentencepiece(**{"model_type": "bpe", "vocab_size": 450, "byte_fallback": True,
                                            "character_coverage": 0.98, "normalization_rule_name": "identity",
                                            "remove_extra_whitespaces": False, **options}))
    files = {"tokenizer.model": path, "tokenizer_config": write_json(folder / "tokenizer_config.json", config or {})}
    return load_tokenizer(checkpoint(files, path=folder))


def test_every_kind_gives_the_same_ids(every_tokenizer):
    seen = set()
    for name, tokenizer in every_tokenizer.items():
        kind = name.split(" ")[-1] if name.startswith("tokenizer.") else name
        if kind not in MODELS:
            continue
        seen.add(kind)
        meta, back = read(tokenizer)
        assert meta["tokenizer.ggml.model"] == MODELS[kind]
        for text in NASTY.values():
            if name != "tokenizer.bin" or "<s>" not in text:  # where special tokens in a text are text
                assert back.encode(text) == tokenizer.encode(text), (name, text)
                assert back.decode(back.encode(text)) == tokenizer.decode(tokenizer.encode(text)), (name, text)
    assert seen == set(MODELS)


def test_roles_ends_template_and_what_goes_around(byte_level_library, tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<tool>", "add_eos_token": True,
              "chat_template": "{{ messages }}"}
    meta, back = read(load_library(byte_level_library, tmp_path, config))
    assert (back.roles.bos, back.roles.eos, back.roles.pad) == (0, 1, 400)
    assert back.chat_template == "{{ messages }}" and back.encode("")[0] == 0 and back.encode("")[-1] == 1
    assert meta["tokenizer.ggml.token_type"][:2] == [3, 3] and meta["tokenizer.ggml.token_type"][400] == 4


def test_rows_without_tokens_and_tokens_without_rows(byte_level_library, tmp_path):
    tokenizer = load_library(byte_level_library, tmp_path)
    meta, back = read(tokenizer, tokenizer.vocab_size + 3)
    assert meta["tokenizer.ggml.tokens"][-3:] == ["[PAD401]", "[PAD402]", "[PAD403]"]
    assert back.encode("[PAD402]", add_special=False) == tokenizer.encode("[PAD402]", add_special=False)
    meta, back = read(tokenizer, 400)  # the last is an added one
    assert len(meta["tokenizer.ggml.tokens"]) == 400
    with pytest.raises(TokenizerError, match="the tokenizer has 401 tokens, the model 300"):
        read(tokenizer, 300)


def test_rows_without_tokens_add_nothing_to_a_text(every_tokenizer):
    """Models have more rows than tokenizers have tokens: neither format gives them a text."""
    for name, tokenizer in every_tokenizer.items():
        if name in MODELS or name.removeprefix("tokenizer.json ") in MODELS:
            size, ids = tokenizer.vocab_size, tokenizer.encode("the fox", add_special=False)
            back = read(tokenizer, size + 2)[1]
            assert back.token_text(size) == f"[PAD{size}]" and back.token_bytes(size) == b""
            more = [size, *ids, size + 1]
            assert back.decode(more) == tokenizer.decode(more) == tokenizer.decode(ids)


@pytest.mark.parametrize("steps, name", [
    ([("Digits", {"individual_digits": True}), ("ByteLevel", {"add_prefix_space": False})], "smollm"),
    ([("ByteLevel", {"add_prefix_space": False})], "gpt-2")])
def test_the_rule_that_cuts_text_is_found(byte_level_library, tmp_path, steps, name):
    from tokenizers import Tokenizer, pre_tokenizers

    library = Tokenizer.from_str(byte_level_library.to_str())
    library.pre_tokenizer = pre_tokenizers.Sequence([getattr(pre_tokenizers, kind)(**how) for kind, how in steps])
    assert read(load_library(library, tmp_path))[0]["tokenizer.ggml.pre"] == name


def test_a_rule_that_gguf_lacks_is_refused(byte_level_library, tmp_path):
    from tokenizers import Tokenizer, pre_tokenizers

    library = Tokenizer.from_str(byte_level_library.to_str())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(TokenizerError, match="no pre-tokenizer of GGUF files.*safetensors stores the tokenizer"):
        read(load_library(library, tmp_path))
    with pytest.raises(TokenizerError, match=r"as GGUF \(gpt2\) it would cut text otherwise"):
        read(load_library(library, tmp_path), pre="gpt-2")


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}, {
    "add_dummy_prefix": False, "user_defined_symbols": ["\u2581\u2581", "\u2581\u2581\u2581", "\n", "<extra>"]}])
def test_sentencepiece_models(tmp_path, options):
    tokenizer = of_sentencepiece(tmp_path, **options)
    meta, back = read(tokenizer)
    assert meta["tokenizer.ggml.add_space_prefix"] is options.get("add_dummy_prefix", True)
    assert ("  " in meta["tokenizer.ggml.tokens"]) == ("user_defined_symbols" in options)
    for text in probes():
        assert back.encode(text) == tokenizer.encode(text)


def test_sentencepiece_models_that_gguf_cannot_say(tmp_path):
    with pytest.raises(TokenizerError, match="replaces characters .nmt_nfkc."):
        read(of_sentencepiece(tmp_path, normalization_rule_name="nmt_nfkc"))
    with pytest.raises(TokenizerError, match=r"as GGUF \(llama\) it would cut text otherwise"):
        read(of_sentencepiece(tmp_path, remove_extra_whitespaces=True))


def test_merges_that_are_no_scores(llama_style_library, tmp_path):
    from tokenizers import Tokenizer

    state = json.loads(llama_style_library.to_str())
    state["model"]["merges"].remove(["\u2581", "hello"])
    state["model"]["merges"].append(["\u2581", "h"])
    state["model"]["vocab"]["\u2581h"] = len(state["model"]["vocab"])
    with pytest.raises(TokenizerError, match="its merges are not a SentencePiece model"):
        read(load_library(Tokenizer.from_str(json.dumps(state)), tmp_path))


def test_a_model_file_beside_helps(tmp_path, unigram_library, unigram_model):
    """A tokenizer.json that normalises in another way than GGUF does, and the tokenizer.model it was made of."""
    tokenizer = load_library(unigram_library, tmp_path, {"unk_token": "<unk>"})
    with pytest.raises(TokenizerError, match="it would cut text otherwise"):
        read(tokenizer)
    (tmp_path / "tokenizer.model").write_bytes(unigram_model)
    beside = load_tokenizer(checkpoint({"tokenizer.model": tmp_path / "tokenizer.model"}))
    with pytest.raises(TokenizerError, match="it would cut text otherwise"):  # nor is it the same as that
        read(tokenizer, also=[beside])
    assert read(beside, also=[beside])[0]["tokenizer.ggml.model"] == "t5"


def test_two_tokens_before_a_text_are_refused(byte_level_library, tmp_path):
    from tokenizers import Tokenizer, processors

    library = Tokenizer.from_str(byte_level_library.to_str())
    library.post_processor = processors.TemplateProcessing(single="<s> </s> $A", pair="$A $B",
                                                           special_tokens=[("<s>", 0), ("</s>", 1)])
    with pytest.raises(TokenizerError, match="puts 2 tokens before a text and 0 after it, GGUF files one at most"):
        read(load_library(library, tmp_path))
