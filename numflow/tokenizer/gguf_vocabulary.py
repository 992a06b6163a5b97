"""Vocabularies inside GGUF files: SentencePiece (BPE and unigram), byte-level BPE and WordPiece."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.errors import FormatError, TokenizerError
from numflow.tokenizer import bpe_files, pieces, pretokenize, spm, wordpiece_file, wrapping
from numflow.tokenizer.added import AddedTokens, add_to_library
from numflow.tokenizer.names import names
from numflow.tokenizer.roles import resolve
from numflow.tokenizer.tokenizer import ROLES, Tokenizer
from numflow.tokenizer.vocabulary import AddedToken, LibraryVocabulary, Vocabulary

_ROLE_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # where the key has another name; so spelt


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
        """Id of a role; a missing key means the default, an id outside the vocabulary none."""
        id = self.get(f"{_ROLE_KEYS.get(role, role)}_token_id", default)
        return id if type(id) is int and 0 <= id < len(self.texts) else None

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; a missing key means the default."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self.where}: tokenizer.ggml.{key} should be true or false, is {value!r}")
        return value

    def added(self) -> list[AddedToken]:
        """Tokens matched as whole texts: control tokens, and the user-defined ones, which are text."""
        ids = np.flatnonzero(np.isin(self.types, (spm.CONTROL, spm.USER_DEFINED, spm.UNKNOWN)))
        return [AddedToken(int(id), self.texts[id], special=bool(self.types[id] != spm.USER_DEFINED)) for id in ids]


def load(meta: Mapping[str, Any], options: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata.

    Raises:
        TokenizerError: the file has none, or one of a kind that is not supported.
        FormatError: its tables contradict each other.
    """
    model = meta.get("tokenizer.ggml.model")
    if model in (None, "none"):
        raise TokenizerError(f"{where}: the file has no tokenizer (tokenizer.ggml.model is {model or 'missing'})")
    known = names()["gguf_models"]
    if model not in known:
        raise TokenizerError(f"{where}: tokenizer.ggml.model {model!r} is not supported; known: {', '.join(known)}")
    implied = names()["gguf_pre"].get(model)
    options = {**options, "pre": implied} if implied and "pre" not in options else options
    return ALGORITHMS[known[model]](_table(meta, where), options)


def _table(meta: Mapping[str, Any], where: str) -> Table:
    texts = _list(meta, "tokens", where)
    if not texts:
        raise FormatError(f"{where}: tokenizer.ggml.tokens should be a list of tokens, is missing or empty")
    for key in ("tokens", "merges"):
        if wrong := set(map(type, _list(meta, key, where))) - {str}:
            raise FormatError(f"{where}: tokenizer.ggml.{key} should be text, has {wrong.pop().__name__}")
    columns = []
    for key, default in (("scores", 0.0), ("token_type", spm.NORMAL)):
        column = np.asarray(_list(meta, key, where) or [default] * len(texts))
        if column.shape != (len(texts),) or column.dtype.kind not in "iuf":
            raise FormatError(f"{where}: tokenizer.ggml.{key} should have {len(texts)} numbers, one per token")
        columns.append(column)
    return Table(where, meta, texts, columns[0].astype(np.float32), columns[1].astype(np.int64))


def _list(meta: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = meta.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(value, list | tuple | np.ndarray):
        raise FormatError(f"{where}: tokenizer.ggml.{key} should be a list, is {value!r}")
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


def _finish(table: Table, options: Mapping[str, Any], vocabulary: Vocabulary, defaults: Mapping[str, int | None],
            add_bos: bool, add_eos: bool) -> Tokenizer:
    """Roles, and what goes around text, from the metadata's keys; then the options."""
    given = {role: table.id(role, defaults.get(role)) for role in ROLES}
    roles = resolve(vocabulary, given, options, frozenset({table.id("eot"), table.id("eom")} - {None}))
    add_bos = options.get("add_bos", table.flag("add_bos_token", add_bos))
    add_eos = options.get("add_eos", table.flag("add_eos_token", add_eos))
    around = wrapping.around(roles.bos if add_bos else None, roles.eos if add_eos else None)
    return Tokenizer(vocabulary, roles, around, options.get("chat_template", table.meta.get("tokenizer.chat_template")))


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
    charsmap = table.get("precompiled_charsmap")
    charsmap = b"" if charsmap is None else np.asarray(charsmap).astype(np.int64).astype(np.uint8).tobytes()
    proto = spm.write_proto(table.texts, table.scores, table.types, kind, unk, prefix,
                            table.flag("remove_extra_whitespaces", False), charsmap)
    added = AddedTokens(table.added())
    vocabulary = spm.SentencePieceVocabulary(proto, added, strip_first=prefix, texts=table.texts, where=table.where)
    return _finish(table, options, vocabulary, defaults, add_bos, add_eos)


def _byte_level_bpe(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    rule = pretokenize.rule_of(options.get("pre", table.get("pre", "default")), table.where)
    vocab = {text: id for id, text in enumerate(table.texts)}
    marked = rule.get("spaces") == "mark"
    unk = table.id("unk") if marked else None
    library = bpe_files.build(vocab, _merges(table), rule, table.where, unk=None if unk is None else table.texts[unk])
    add_to_library(library, table.added(), table.where)
    vocabulary = LibraryVocabulary(library, pieces.metaspace(strip_first=False) if marked else pieces.byte_level)
    return _finish(table, options, vocabulary, {"bos": 11, "eos": 11}, rule.get("add_bos", False), add_eos=False)


def _merges(table: Table) -> list[tuple[str, str]]:
    merges = []
    for n, merge in enumerate(table.get("merges", ())):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise FormatError(f"{table.where}: tokenizer.ggml.merges[{n}] should be two tokens, is {merge!r}")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _wordpiece(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    """The file marks the first piece of a word with U+2581; WordPiece marks the others with ##."""
    texts = [_wordpiece_text(text, type) for text, type in zip(table.texts, table.types.tolist(), strict=True)]
    unk = table.id("unk", _WORDPIECE_ROLES["unk"])
    if unk is None:
        raise FormatError(f"{table.where}: tokenizer.ggml.unknown_token_id is no id of {len(texts)} tokens")
    lowercase = table.flag("normalizer.lowercase", not any(t != t.lower() for t in texts if not _bracketed(t)))
    strip_accents = table.flag("normalizer.strip_accents", lowercase)
    library = wordpiece_file.build({t: id for id, t in enumerate(texts)}, texts[unk], lowercase, strip_accents)
    add_to_library(library, table.added(), table.where)
    vocabulary = LibraryVocabulary(library, pieces.wordpiece())
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
