"""Vocabularies with scores as GGUF metadata: SentencePiece models, and tokenizer.json files converted from them."""

import base64
import struct
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from numflow.errors import TokenizerError
from numflow.tokenizer import spm
from numflow.tokenizer.names import names

_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}


def model_of(algorithm: str) -> str:
    """GGUF's name of an algorithm."""
    return next(name for name, found in names()["gguf_models"].items() if found == algorithm)


def of_sentencepiece(vocabulary: spm.SentencePieceVocabulary, where: str) -> dict[str, Any]:
    """GGUF table of a SentencePiece model with its added tokens.

    Raises:
        TokenizerError: the ids are remapped, or GGUF cannot express the normaliser.
    """
    if vocabulary.remap is not None:
        raise TokenizerError(f"{where}: a vocab.json gives the tokens of the SentencePiece model other ids, which "
                             "GGUF files cannot express")
    pieces, trainer, normalizer = _read_proto(vocabulary.proto)
    unigram = trainer.get(3, spm.UNIGRAM) == spm.UNIGRAM
    texts = [vocabulary.text(id) for id in range(vocabulary.size)]
    scores = [score for _, score, _ in pieces] + [-10000.0] * (len(texts) - len(pieces))
    types = [kind for _, _, kind in pieces] + [spm.UNUSED] * (len(texts) - len(pieces))
    for id in (*vocabulary.added.values(), *vocabulary.special_ids):
        if types[id] != spm.UNKNOWN:
            types[id] = spm.CONTROL if id in vocabulary.special_ids else spm.USER_DEFINED
    charsmap = np.frombuffer(normalizer.get(2, b""), np.uint8)
    if len(charsmap) and not unigram:
        raise TokenizerError(f"{where}: its SentencePiece model replaces characters ({normalizer.get(1, b'').decode()}"
                             "), which GGUF files do for unigram vocabularies only")
    algorithm = "sentencepiece unigram" if unigram else "sentencepiece bpe"
    return {"model": model_of(algorithm), "pre": "default", "tokens": texts, "scores": scores,
            "token_type": types, "add_space_prefix": bool(normalizer.get(3, 1)),
            **({"remove_extra_whitespaces": bool(normalizer.get(4, 1)), "precompiled_charsmap": charsmap}
               if unigram else {})}


def of_merges(model: Mapping[str, Any], state: Mapping[str, Any], base: dict[str, Any], where: str) -> dict[str, Any]:
    """GGUF table of a BPE with byte fallback: a SentencePiece model with scores converted to an order of merges.

    Raises:
        TokenizerError: no scores give these merges.
    """
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    made = [first + second for first, second in pairs]
    listed, vocab = set(pairs), model["vocab"]
    order = [text for text, _ in groupby(made)]
    types = [spm.BYTE if text in _BYTES and kind == spm.NORMAL else kind
             for text, kind in zip(base["tokens"], base["token_type"], strict=True)]
    plain = (text for text, kind in zip(base["tokens"], types, strict=True) if kind == spm.NORMAL)
    missing = next((text for text in plain for cut in range(1, len(text))
                    if text[:cut] in vocab and text[cut:] in vocab and (text[:cut], text[cut:]) not in listed), None)
    if len(set(order)) < len(order) or missing is not None:
        raise TokenizerError(f"{where}: its merges are not a SentencePiece model's, the only kind that GGUF files "
                             "have for tokens with spaces")
    rank = {text: -float(n) for n, text in enumerate(order)}
    if (unk := vocab.get(model.get("unk_token"))) is not None:
        types[unk] = spm.UNKNOWN
    return {"model": model_of("sentencepiece bpe"), "pre": "default", **base, "token_type": types,
            "scores": [rank.get(text, -float(len(order) + n)) for n, text in enumerate(base["tokens"])],
            "add_space_prefix": _prefixed(state)}


def of_unigram(model: Mapping[str, Any], state: Mapping[str, Any], base: dict[str, Any], where: str) -> dict[str, Any]:
    """GGUF table of a tokenizer.json with a unigram model."""
    types = [spm.BYTE if text in _BYTES and model.get("byte_fallback") else kind
             for text, kind in zip(base["tokens"], base["token_type"], strict=True)]
    if model.get("unk_id") is None:
        raise TokenizerError(f"{where}: a unigram vocabulary without an unknown token, which GGUF files need")
    types[model["unk_id"]] = spm.UNKNOWN
    scores = [score for _, score in model["vocab"]]
    charsmap = next((step["precompiled_charsmap"] for step in _parts(state.get("normalizer"))
                     if step["type"] == "Precompiled"), "") or ""
    collapse_spaces = any(step["type"] == "WhitespaceSplit" for step in _parts(state.get("pre_tokenizer"))) or any(
        step["type"] == "Replace" and "{2,}" in str(step["pattern"]) for step in _parts(state.get("normalizer")))
    return {"model": model_of("sentencepiece unigram"), "pre": "default", **base, "token_type": types,
            "scores": scores + [-10000.0] * (len(types) - len(scores)), "add_space_prefix": _prefixed(state),
            "remove_extra_whitespaces": collapse_spaces,
            "precompiled_charsmap": np.frombuffer(base64.b64decode(charsmap), np.uint8)}


def _prefixed(state: Mapping[str, Any]) -> bool:
    """Whether a dummy prefix space is added to a text."""
    steps = [*_parts(state.get("normalizer")), *_parts(state.get("pre_tokenizer"))]
    return any(step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"
                                             and step.get("add_prefix_space", True)) for step in steps)


def _parts(step: Any) -> Iterator[Mapping[str, Any]]:
    """A step of a tokenizer.json, or the steps of a sequence."""
    if step is None:
        return
    inner = step.get("normalizers") or step.get("pretokenizers")
    if inner is None:
        yield step
    for part in inner or ():
        yield from _parts(part)


def _read_proto(proto: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """Pieces (text, score, type), and fields of trainer and normalizer by number, of a serialised model."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(proto):
        if field == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            pieces.append((piece.get(1, b"").decode(errors="replace"), score, piece.get(3, spm.NORMAL)))
        elif field == 2:
            trainer |= dict(_fields(value))
        elif field == 3:
            normalizer |= dict(_fields(value))
    return pieces, trainer, normalizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protocol buffer's fields: integers, or bytes."""
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = data[offset]
            offset += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while offset < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind)
        size = varint() if size is None else size
        yield key >> 3, data[offset:offset + size]
        offset += size
