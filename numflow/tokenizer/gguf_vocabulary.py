"""Vocabularies inside GGUF files: SentencePiece (BPE and unigram), byte-level BPE and WordPiece."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.errors import FormatError, TokenizerError, quoted
from numflow.tokenizer import bpe_files, pieces, pretokenize, spm, wordpiece_file, wrapping
from numflow.tokenizer.added import AddedTokens, add_to_library
from numflow.tokenizer.names import names
from numflow.tokenizer.roles import END_TEXTS, resolve
from numflow.tokenizer.tokenizer import ROLES, Tokenizer
from numflow.tokenizer.vocabulary import AddedToken, LibraryVocabulary, Vocabulary

MAX_TOKEN = 1 << 16  # characters
_END_TEXTS = frozenset(END_TEXTS)
_END = "</s>"  # also an end token, if it is a control token
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_ROLE_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # keys with other names, spelt so


@dataclass(frozen=True)
class Table:
    """tokenizer.ggml.*, checked: one text, score and type (spm.NORMAL ...) per id."""

    where: str
    meta: Mapping[str, Any]
    texts: list[str]
    scores: np.ndarray
    types: np.ndarray

    def get(self, key: str, default: Any = None) -> Any:
        return self.meta.get(f"tokenizer.ggml.{key}", default)

    def id(self, role: str, default: int | None = None) -> int | None:
        """Id of a role, None if negative.

        A missing key, or an id beyond the vocabulary, means the default, unless the file marks the default token as
        ordinary text.

        Raises:
            FormatError: not a whole number.
        """
        id = self.get(key := f"{_ROLE_KEYS.get(role, role)}_token_id")
        if id is not None and type(id) is not int:
            raise FormatError(f"{self.where}: tokenizer.ggml.{key} should be the number of a token, is {quoted(id)}")
        if id is not None and id < len(self.texts):
            return id if id >= 0 else None
        if default is None or default >= len(self.texts):
            return None
        ordinary = self.types[default] == spm.NORMAL and (self.types != spm.NORMAL).any()
        return None if ordinary else default

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; a missing key means the default."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}: tokenizer.ggml.{key} should be true or false, is {quoted(value)}")
        return value

    def added(self, keep: str | None = None) -> list[AddedToken]:
        """Added tokens, matched as whole texts: control tokens and user-defined tokens, which are text.

        keep: tokens (separated by spaces) that keep the white space after them, while others strip it; None: all keep
            it.
        """
        ids = np.flatnonzero(np.isin(self.types, (spm.CONTROL, spm.USER_DEFINED, spm.UNKNOWN)))
        kept_texts = () if keep is None else keep.split()
        return [AddedToken(int(id), text := self.texts[id], special=bool(self.types[id] != spm.USER_DEFINED),
                           rstrip=keep is not None and text not in kept_texts) for id in ids]

    def unused(self) -> frozenset[int]:
        """Rows of the model without a token; their texts are placeholders, such as [PAD31999]."""
        return frozenset(np.flatnonzero(self.types == spm.UNUSED).tolist())


def load(meta: Mapping[str, Any], options: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata.

    Raises:
        TokenizerError: the file has no tokenizer, or one of an unsupported kind.
        FormatError: its tables contradict each other.
    """
    model = meta.get("tokenizer.ggml.model", "none")
    if model == "none":
        raise TokenizerError(f"{where}: the file has no tokenizer (tokenizer.ggml.model)")
    known = names()["gguf_models"]
    if not isinstance(model, str) or model not in known:
        raise TokenizerError(f"{where}: tokenizer.ggml.model {quoted(model)} is not supported; "
                             f"known: {', '.join(known)}")
    implied = names()["gguf_pre"].get(model)
    options = {**options, "pre": implied} if implied and "pre" not in options else options
    return ALGORITHMS[known[model]](_table(meta, where), options)


def _table(meta: Mapping[str, Any], where: str) -> Table:
    texts = list(_list(meta, "tokens", where))
    if not texts:
        raise FormatError(f"{where}: tokenizer.ggml.tokens should be a list of tokens, is missing or empty")
    for key in ("tokens", "merges"):
        if wrong := set(map(type, _list(meta, key, where))) - {str, np.str_}:
            raise FormatError(f"{where}: tokenizer.ggml.{key} should be text, has {wrong.pop().__name__}")
    if max(map(len, texts)) > MAX_TOKEN:
        raise FormatError(f"{where}: tokenizer.ggml.tokens has a token of more than {MAX_TOKEN} characters")
    scores = _numbers(meta, "scores", where)
    types = _numbers(meta, "token_type", where)
    for key, values in (("scores", scores), ("token_type", types)):
        if len(values) not in (0, len(texts)):
            raise FormatError(f"{where}: tokenizer.ggml.{key} should have {len(texts)} numbers, one per token, "
                              f"has {len(values)}")
    types = types.astype(np.int64) if len(types) else np.full(len(texts), spm.NORMAL)
    types[(types < spm.NORMAL) | (types > spm.BYTE)] = spm.NORMAL
    for text in _END_TEXTS.intersection(texts):  # regardless of their type in the file
        types[texts.index(text)] = spm.CONTROL
    return Table(where, meta, texts, scores if len(scores) else np.zeros(len(texts)), types)


def _numbers(meta: Mapping[str, Any], key: str, where: str) -> np.ndarray:
    """A list of finite numbers that fit 32 bits, as float64; empty if the key is missing."""
    try:
        values = np.asarray(_list(meta, key, where), dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        values = np.array(np.nan)
    if values.ndim != 1 or not (np.abs(values) < 2.0**32).all():
        raise FormatError(f"{where}: tokenizer.ggml.{key} should be a list of numbers")
    return values


def _list(meta: Mapping[str, Any], key: str, where: str) -> Any:
    value = meta.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(value, list | tuple | np.ndarray):
        raise FormatError(f"{where}: tokenizer.ggml.{key} should be a list, is {quoted(value)}")
    return value


def _finish(table: Table, options: Mapping[str, Any], vocabulary: Vocabulary, defaults: Mapping[str, int | None],
            add_bos: bool, add_eos: bool) -> Tokenizer:
    """Tokenizer with roles and special tokens around a text from the metadata, overridden by the options."""
    given = {role: table.id(role, defaults.get(role)) for role in ROLES}
    ends = {id for role in ("eot", "eom") if (id := table.id(role)) is not None}
    ends |= {id} & vocabulary.special_ids if (id := vocabulary.added.get(_END)) is not None else set()
    roles = resolve(vocabulary, given, options, frozenset(ends))
    add_bos = options.get("add_bos", table.flag("add_bos_token", add_bos))
    add_eos = options.get("add_eos", table.flag("add_eos_token", add_eos))
    around = wrapping.each(roles.bos if add_bos else None, roles.eos if add_eos else None)
    return Tokenizer(vocabulary, roles, around, options.get("chat_template", _chat_template(table)))


def _chat_template(table: Table) -> str | None:
    template = table.meta.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise FormatError(f"{table.where}: tokenizer.chat_template should be text, is {quoted(template)}")
    return template


def _sentencepiece_bpe(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    return _sentencepiece(table, options, spm.BPE, {"bos": 1, "eos": 2, "unk": 0}, add_bos=True, add_eos=False)


def _sentencepiece_unigram(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    return _sentencepiece(table, options, spm.UNIGRAM, {"eos": 1, "unk": 2, "pad": 0}, add_bos=False, add_eos=True)


def _sentencepiece(table: Table, options: Mapping[str, Any], kind: int, defaults: Mapping[str, int | None],
                   add_bos: bool, add_eos: bool) -> Tokenizer:
    prefix = table.flag("add_space_prefix", True)
    unknown = np.flatnonzero(table.types == spm.UNKNOWN)
    unk = table.id("unk", int(unknown[0]) if len(unknown) else defaults["unk"])
    if unk is None:
        raise FormatError(f"{table.where}: tokenizer.ggml.unknown_token_id is no id of {len(table.texts)} tokens")
    charsmap = _numbers(table.meta, "precompiled_charsmap", table.where).astype(np.int64).astype(np.uint8).tobytes()
    collapse_spaces = table.flag("remove_extra_whitespaces", False) and kind == spm.UNIGRAM
    types = table.types if kind == spm.UNIGRAM else _with_bytes(table)
    proto = spm.write_proto(table.texts, table.scores, types, kind, unk, prefix, collapse_spaces, charsmap)
    added = AddedTokens(table.added(options.get("keep_space_after")))
    vocabulary = spm.SentencePieceVocabulary(proto, added, strip_first=prefix, texts=table.texts, where=table.where,
                                            unused=table.unused())
    return _finish(table, options, vocabulary, defaults, add_bos, add_eos)


def _with_bytes(table: Table) -> np.ndarray:
    """Token types; byte tokens are recognised by their texts if the file has not marked all of them."""
    if (table.types == spm.BYTE).sum() == 256 or len(_BYTES.intersection(table.texts)) < 256:
        return table.types
    named = np.array([text in _BYTES for text in table.texts])
    return np.where(named & (table.types == spm.NORMAL), spm.BYTE, table.types)


def _byte_level_bpe(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    rule = pretokenize.rule_of(options.get("pre", table.get("pre", "default")), table.where)
    vocab = dict(zip(table.texts, range(len(table.texts)), strict=True))
    characters = "spaces" in rule
    unk = table.id("unk") if characters and rule["spaces"] != "drop" else None
    library = bpe_files.build(vocab, _merges(table), rule, table.where, unk=None if unk is None else table.texts[unk])
    if table.flag("normalizer.lowercase", False):
        library.normalizer = pretokenize.build(rule, lowercase=True)[0]
    add_to_library(library, table.added(), table.where)
    piece = pieces.metaspace(strip_first=rule["spaces"] == "mark words") if characters else pieces.byte_level
    vocabulary = LibraryVocabulary(library, piece, table.where, table.unused())
    return _finish(table, options, vocabulary, {"bos": 11, "eos": 11}, rule.get("add_bos", False), add_eos=False)


def _merges(table: Table) -> list[tuple[str, str]]:
    if table.get("merges") is None:
        raise FormatError(f"{table.where}: tokenizer.ggml.merges is missing: tokens of more than a byte are made by it")
    merges = [tuple(merge.split(" ")) for merge in table.get("merges")]
    wrong = next((n for n, merge in enumerate(merges) if len(merge) != 2), None)
    if wrong is not None:
        raise FormatError(f"{table.where}: tokenizer.ggml.merges[{wrong}] should be two tokens, "
                          f"is {quoted(table.get('merges')[wrong])}")
    return list(dict.fromkeys(merges))  # of equal merges, the first one counts


def _wordpiece(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    """WordPiece tokenizer. The file marks the first piece of a word by U+2581; WordPiece marks the others by ##."""
    texts = [_wordpiece_text(text, type) for text, type in zip(table.texts, table.types.tolist(), strict=True)]
    unk = table.id("unk", _WORDPIECE_ROLES["unk"])
    if unk is None:
        raise FormatError(f"{table.where}: tokenizer.ggml.unknown_token_id is no id of {len(texts)} tokens")
    lowercase = table.flag("normalizer.lowercase", not any(t != t.lower() for t in texts if not _bracketed(t)))
    strip_accents = table.flag("normalizer.strip_accents", lowercase)
    library = wordpiece_file.build({t: id for id, t in enumerate(texts)}, texts[unk], lowercase, strip_accents)
    add_to_library(library, table.added(), table.where)
    vocabulary = LibraryVocabulary(library, pieces.wordpiece(), table.where, table.unused())
    given = {role: table.id(role, default) for role, default in _WORDPIECE_ROLES.items()}
    roles = resolve(vocabulary, given | {"cls": given["bos"]}, options)
    around = wrapping.around(roles.cls, roles.sep, [] if roles.sep is None else [roles.sep], second_type=1)
    return Tokenizer(vocabulary, roles, around)


_WORDPIECE_ROLES = {"bos": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103, "eos": None}


def _bracketed(text: str) -> bool:
    return text.startswith("[") and text.endswith("]")


def _wordpiece_text(text: str, type: int) -> str:
    if type != spm.NORMAL or _bracketed(text):
        return text
    return text[1:] if text.startswith("\u2581") else "##" + text


ALGORITHMS = {"sentencepiece bpe": _sentencepiece_bpe, "sentencepiece unigram": _sentencepiece_unigram,
              "byte-level bpe": _byte_level_bpe, "wordpiece": _wordpiece}
