"""Vocabularies inside GGUF files: SentencePiece (BPE and unigram), byte-level BPE and WordPiece."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.errors import FormatError, TokenizerError, did_you_mean
from numflow.tokenizer import pieces, pretokenize, spm, wrapping
from numflow.tokenizer.roles import resolve
from numflow.tokenizer.tokenizer import Tokenizer
from numflow.tokenizer.vocabulary import AddedToken, AddedTokens, LibraryVocabulary, Vocabulary

_ROLE_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask",
              "cls": "cls"}


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
        id = self.get(f"{_ROLE_KEYS[role]}_token_id", default)
        return int(id) if id is not None and 0 <= int(id) < len(self.texts) else None

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
    if model not in MODELS:
        raise TokenizerError(f"{where}: tokenizer.ggml.model {model!r} is not supported{did_you_mean(model, MODELS)}")
    return MODELS[model](_table(meta, where), options)


def _table(meta: Mapping[str, Any], where: str) -> Table:
    texts = meta.get("tokenizer.ggml.tokens")
    if texts is None or len(texts) == 0:
        raise FormatError(f"{where}: tokenizer.ggml.tokens should be a list of tokens, is missing or empty")
    count = len(texts)
    texts = [t if isinstance(t, str) else bytes(t).decode("utf-8", errors="replace") for t in texts]
    scores = np.asarray(meta.get("tokenizer.ggml.scores", np.zeros(count)), dtype=np.float32)
    types = np.asarray(meta.get("tokenizer.ggml.token_type", np.full(count, spm.NORMAL)), dtype=np.int64)
    for key, array in (("scores", scores), ("token_type", types)):
        if array.shape != (count,):
            raise FormatError(f"{where}: tokenizer.ggml.{key} should have {count} entries, one per token, "
                              f"has {array.size}")
    return Table(where, meta, texts, scores, types)


def _finish(table: Table, options: Mapping[str, Any], vocabulary: Vocabulary, defaults: Mapping[str, int | None],
            add_bos: bool, add_eos: bool) -> Tokenizer:
    """Roles, and what goes around text, from the metadata's keys; then the options."""
    given = {role: table.id(role, defaults.get(role)) for role in _ROLE_KEYS}
    ends = (table.get(f"{name}_token_id") for name in ("eot", "eom"))
    roles = resolve(vocabulary, given, options, frozenset(int(id) for id in ends if id is not None))
    add_bos = options.get("add_bos", table.get("add_bos_token", add_bos)) and roles.bos is not None
    add_eos = options.get("add_eos", table.get("add_eos_token", add_eos)) and roles.eos is not None
    around = wrapping.around(roles.bos if add_bos else None, roles.eos if add_eos else None)
    return Tokenizer(vocabulary, roles, around, options.get("chat_template", table.meta.get("tokenizer.chat_template")))


def _sentencepiece_bpe(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    return _sentencepiece(table, options, spm.BPE, {"bos": 1, "eos": 2, "unk": 0}, add_bos=True, add_eos=False)


def _sentencepiece_unigram(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    return _sentencepiece(table, options, spm.UNIGRAM, {"eos": 1, "unk": 2, "pad": 0}, add_bos=False, add_eos=True)


def _sentencepiece(table: Table, options: Mapping[str, Any], kind: int, defaults: Mapping[str, int | None],
                   add_bos: bool, add_eos: bool) -> Tokenizer:
    prefix = bool(table.get("add_space_prefix", True))
    unknown = np.flatnonzero(table.types == spm.UNKNOWN)
    unk = table.id("unk", int(unknown[0]) if len(unknown) else defaults["unk"])
    if unk is None:
        raise FormatError(f"{table.where}: tokenizer.ggml.unknown_token_id is no id of {len(table.texts)} tokens")
    charsmap = table.get("precompiled_charsmap")
    charsmap = b"" if charsmap is None else np.asarray(charsmap).astype(np.uint8).tobytes()
    proto = spm.write_proto(table.texts, table.scores, table.types, kind, unk, prefix,
                            bool(table.get("remove_extra_whitespaces", False)), charsmap)
    added = AddedTokens(table.added())
    vocabulary = spm.SentencePieceVocabulary(proto, added, strip_first=prefix, texts=table.texts, where=table.where)
    return _finish(table, options, vocabulary, defaults, add_bos, add_eos)


def _byte_level_bpe(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    rule = pretokenize.rule_of(options.get("pre", table.get("pre", "default")), table.where)
    marked = rule.get("spaces") == "mark"
    vocab = {text: id for id, text in enumerate(table.texts)}
    try:
        model = models.BPE(vocab=vocab, merges=_merges(table), ignore_merges=rule.get("ignore_merges", False),
                           byte_fallback=marked, fuse_unk=marked, unk_token=_unk_text(table) if marked else None)
    except Exception as error:  # the library raises nothing more specific
        raise FormatError(f"{table.where}: tokenizer.ggml.merges do not fit the tokens: {error}") from None
    library = Library(model)
    library.normalizer, library.pre_tokenizer = pretokenize.build(rule)
    _add_tokens(library, table.added())
    vocabulary = LibraryVocabulary(library, pieces.metaspace(strip_first=False) if marked else pieces.byte_level)
    return _finish(table, options, vocabulary, {"bos": 11, "eos": 11}, rule.get("add_bos", False), add_eos=False)


def _unk_text(table: Table) -> str | None:
    id = table.id("unk")
    return None if id is None else table.texts[id]


def _merges(table: Table) -> list[tuple[str, str]]:
    merges = []
    for n, merge in enumerate(table.get("merges", ())):
        merge = merge if isinstance(merge, str) else bytes(merge).decode("utf-8", errors="replace")
        cut = merge.find(" ", 1)
        if cut < 0:
            raise FormatError(f"{table.where}: tokenizer.ggml.merges[{n}] should be two tokens, is {merge!r}")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _add_tokens(library: Any, added: Sequence[AddedToken]) -> None:
    from tokenizers import AddedToken as LibraryToken

    for special in (True, False):
        tokens = [LibraryToken(t.text, special=special, normalized=False) for t in added if t.special is special]
        (library.add_special_tokens if special else library.add_tokens)(tokens)


def _wordpiece(table: Table, options: Mapping[str, Any]) -> Tokenizer:
    """The file marks the first piece of a word with U+2581; WordPiece marks the others with ##."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers, pre_tokenizers

    texts = [_wordpiece_text(text, type) for text, type in zip(table.texts, table.types.tolist(), strict=True)]
    unk = table.id("unk", 100)
    if unk is None:
        raise FormatError(f"{table.where}: tokenizer.ggml.unknown_token_id is no id of {len(texts)} tokens")
    vocab = {text: id for id, text in enumerate(texts)}
    library = Library(models.WordPiece(vocab=vocab, unk_token=texts[unk], max_input_chars_per_word=100))
    lowercase = bool(table.get("normalizer.lowercase", not any(t != t.lower() for t in texts if not _bracketed(t))))
    strip = table.get("normalizer.strip_accents", lowercase)
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=bool(strip))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _add_tokens(library, table.added())
    vocabulary = LibraryVocabulary(library, pieces.wordpiece())
    given = {role: table.id(role, default) for role, default in _WORDPIECE_ROLES.items()}
    roles = resolve(vocabulary, given | {"cls": given["bos"]}, options)
    around = wrapping.around(roles.cls, roles.sep, [] if roles.sep is None else [roles.sep], second_type=1)
    return Tokenizer(vocabulary, roles, around.changed(roles.bos, None, options.get("add_bos"), None))


_WORDPIECE_ROLES = {"bos": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103, "eos": None}


def _bracketed(text: str) -> bool:
    return text.startswith("[") and text.endswith("]")


def _wordpiece_text(text: str, type: int) -> str:
    if type != spm.NORMAL or _bracketed(text):
        return text
    return text[1:] if text.startswith("\u2581") else "##" + text


MODELS = {"llama": _sentencepiece_bpe, "t5": _sentencepiece_unigram, "gpt2": _byte_level_bpe, "gemma4": _byte_level_bpe,
          "bert": _wordpiece}
