"""Small vocabularies of every kind, trained here on a few lines, and texts that tokenizers stumble over.

What the `tokenizers` and `sentencepiece` packages say about the same files is the truth the tests hold ours against.
"""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from numflow.tokenizer import load_tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog, and it's 1234 times faster than we're.",
    "def f(x):\n    return x + 1  # a comment\n",
    "你好，世界。日本語のテスト。한국어 문장.",
    "مرحبا بالعالم שלום עולם",
    "the cat sat on the mat; the dog ate the cat's hat. Naïve café, Ångström.",
    "one two three four five six seven eight nine ten hello world hello there",
] * 4

# Each is held against the reference, streamed, decoded.
NASTY = {
    "empty": "",
    "space": " ",
    "spaces": "  two  spaces   and   tabs\t\tend ",
    "english": "Hello world, it's we're I'LL don't 'Tis.",
    "digits": "1 12 123 1234 3.14159 ٣٤٥ ½ Ⅷ",
    "chinese, japanese, korean": "你好，世界！日本語のテスト 한국어",
    "joined emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 end",
    "right to left": "مرحبا بالعالم‎ שלום ‏עולם 123",
    "code": "def f(x):\n\tif x>=0:\n        return {'a': [x**2, ~x]}  # !=\r\n\r\n",
    "line ends": "a\rb\r\nc\n\nd\n \n e\x0bf\x0cg\u2028h\u2029i\x85j",
    "control": "\x01\x02\x07\x1b[0m\x7f\u200b\ufeff\u202e",
    "nul": "a\x00b\x00\x00",
    "combining": "e\u0301 u\u0308\u0327 ﬀ Å \u1e9b\u0323",
    "private and unassigned": "\ue000\U000f0000\u0378\uffff",
    "special": "<s>hi</s> <unk> <|end|> [MASK][CLS] <pad><0x41>",
    "marks": "▁a ▁▁b Ġc ##d Ċ",
    "long run": "ab" * 600 + " " * 70 + "!" * 300,
}


class _Checkpoint(SimpleNamespace):
    """What load_tokenizer uses of a Checkpoint."""

    @property
    def folder(self):
        return self.path if self.path.is_dir() else self.path.parent


def checkpoint(files, format="safetensors", naming="hf", config=None, path="."):
    return _Checkpoint(path=Path(path), format=format, naming=naming, config=config or {}, files=files)


def gguf(config):
    return checkpoint({}, format="gguf", naming="gguf", config=config, path="model.gguf")


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def train_sentencepiece(**options):
    """The bytes of a SentencePiece model of LINES."""
    from sentencepiece import SentencePieceTrainer

    out = io.BytesIO()
    lines = [line for text in LINES for line in text.split("\n") if line]
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, minloglevel=3, hard_vocab_limit=False,
                               num_threads=1, **options)
    return out.getvalue()


@pytest.fixture(scope="session")
def bpe_model():
    """SentencePiece BPE with byte tokens and an untouched text, as decoder-only models have it."""
    return train_sentencepiece(model_type="bpe", vocab_size=450, byte_fallback=True, character_coverage=0.98,
                               normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True)


@pytest.fixture(scope="session")
def unigram_model():
    """SentencePiece unigram that normalises text, with padding first and no BOS, as encoder-decoders have it."""
    return train_sentencepiece(model_type="unigram", vocab_size=180, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


@pytest.fixture(scope="session")
def byte_level_library():
    """A byte-level BPE of the `tokenizers` package with two special tokens and one that is text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(LINES, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    library.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)])
    return library


@pytest.fixture(scope="session")
def wordpiece_library():
    """WordPiece of the `tokenizers` package with [CLS] A [SEP] B [SEP]."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.train_from_iterator(LINES, trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False))
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return library


@pytest.fixture(scope="session")
def unigram_library(unigram_model):
    """The unigram model as tokenizer.json has it: metaspaces before and after."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    processor = SentencePieceProcessor(model_proto=unigram_model)
    pieces = [(processor.IdToPiece(n), processor.GetScore(n)) for n in range(processor.GetPieceSize())]
    library = Tokenizer(models.Unigram(pieces, 2, False))
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<pad>", "</s>", "<unk>"])
    library.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    return library


@pytest.fixture(scope="session")
def llama_style_library():
    """BPE with byte tokens by the `tokenizers` package: spaces as U+2581, one stripped from the start."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{n:02X}>": 3 + n for n in range(256)}}
    for text in ("▁", "a", "b", "h", "e", "l", "o", "▁a", "he", "ll", "hell", "hello", "▁hello", "▁▁"):
        vocab[text] = len(vocab)
    merges = [("▁", "a"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁")]
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    return library


LIBRARIES = ("byte_level_library", "wordpiece_library", "unigram_library", "llama_style_library")


def load_library(library, folder, config=None, options=None):
    """Our Tokenizer of a `tokenizers.Tokenizer`, by way of its tokenizer.json."""
    path = folder / "tokenizer.json"
    library.save(str(path))
    files = {"tokenizer.json": path}
    if config is not None:
        files["tokenizer_config"] = write_json(folder / "tokenizer_config.json", config)
    return load_tokenizer(checkpoint(files, path=folder), options)


def gguf_of_sentencepiece(proto, **more):
    """The metadata a converter writes for a SentencePiece model: control tokens, user-defined ones, scores, types."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=proto)
    ids = range(processor.GetPieceSize())
    types = [3 if processor.IsControl(n) else 2 if processor.IsUnknown(n) else 6 if processor.IsByte(n) else 1
             for n in ids]
    roles = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unknown": processor.unk_id(),
             "padding": processor.pad_id()}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.IdToPiece(n) for n in ids],
        "tokenizer.ggml.scores": [processor.GetScore(n) for n in ids],
        "tokenizer.ggml.token_type": types,
        **{f"tokenizer.ggml.{role}_token_id": id for role, id in roles.items() if id >= 0},
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def gguf_of_byte_level(library, pre="gpt-2", **more):
    """The metadata a converter writes for a byte-level BPE."""
    model = json.loads(library.to_str())
    vocab = library.get_vocab(with_added_tokens=True)
    added = {token["id"]: 3 if token["special"] else 4 for token in model["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get),
        "tokenizer.ggml.token_type": [added.get(id, 1) for id in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def gguf_of_wordpiece(library, **more):
    """The metadata a converter writes for WordPiece: U+2581 before words, nothing before their other pieces."""
    vocab = library.get_vocab()
    texts = sorted(vocab, key=vocab.get)
    special = [text.startswith("[") and text.endswith("]") and len(text) > 2 for text in texts]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [text if s else text[2:] if text.startswith("##") else "▁" + text
                                  for text, s in zip(texts, special, strict=True)],
        "tokenizer.ggml.token_type": [3 if s else 1 for s in special],
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def write_scored(path, proto):
    """tokenizer.bin of a SentencePiece model whose ids 0 to 258 are unknown, BOS, EOS and the bytes."""
    import struct

    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_proto=proto)
    data = struct.pack("<i", 32)
    for n in range(processor.GetPieceSize()):
        text = processor.IdToPiece(n).replace("▁", " ").encode("utf-8")
        text = {1: b"\n<s>\n", 2: b"\n</s>\n"}.get(n, text)
        data += struct.pack("<fi", processor.GetScore(n), len(text)) + text
    path.write_bytes(data)
    return path


def stream(tokenizer, ids, **options):
    """The pieces of a stream, the last from flush."""
    decoder = tokenizer.stream(**options)
    return [*map(decoder.push, ids), decoder.flush()]


@pytest.fixture(scope="session")
def every_tokenizer(tmp_path_factory, request, bpe_model, unigram_model):
    """One Tokenizer of every kind of vocabulary, by name."""
    found = {}
    for name in LIBRARIES:
        config = {"unk_token": "<unk>"} if "unigram" in name else None
        folder = tmp_path_factory.mktemp(name)
        found[f"tokenizer.json {name}"] = load_library(request.getfixturevalue(name), folder, config)
    for name, proto in (("bpe", bpe_model), ("unigram", unigram_model)):
        path = tmp_path_factory.mktemp(name) / "tokenizer.model"
        path.write_bytes(proto)
        found[f"tokenizer.model {name}"] = load_tokenizer(checkpoint({"tokenizer.model": path}))
    scored = write_scored(tmp_path_factory.mktemp("scored") / "tokenizer.bin", bpe_model)
    found["tokenizer.bin"] = load_tokenizer(checkpoint({"tokenizer.bin": scored}))
    byte_level = request.getfixturevalue("byte_level_library")
    wordpiece = request.getfixturevalue("wordpiece_library")
    metadata = {"llama": gguf_of_sentencepiece(bpe_model), "gpt2": gguf_of_byte_level(byte_level),
                "t5": gguf_of_sentencepiece(unigram_model, model="t5", remove_extra_whitespaces=True),
                "bert": gguf_of_wordpiece(wordpiece)}
    found |= {f"gguf {name}": load_tokenizer(gguf(meta)) for name, meta in metadata.items()}
    return found
