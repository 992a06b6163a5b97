"""vocab.txt: WordPiece, one token a line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.errors import FormatError
from numflow.tokenizer import pieces, wrapping
from numflow.tokenizer.added import add_to_library, collect
from numflow.tokenizer.names import names
from numflow.tokenizer.roles import resolve
from numflow.tokenizer.side_files import SideFiles, read_text, text_of
from numflow.tokenizer.tokenizer import Tokenizer
from numflow.tokenizer.vocabulary import LibraryVocabulary

_ROLES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_MAX_WORD = 100  # characters; a longer word is unknown


def load(path: Path, checkpoint: Any, options: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a vocab.txt and its side files.

    Raises:
        FormatError: a file is damaged, or the vocabulary has no unknown token.
        TokenizerError: an option does not fit.
    """
    vocab = {text: id for id, text in enumerate(read_text(path).removesuffix("\n").replace("\r\n", "\n").split("\n"))}
    side = SideFiles(checkpoint)
    given = {role: text_of(token) or _ROLES.get(role) for role, token in side.roles().items()}
    unk = options.get("unk", given["unk"])
    if unk not in vocab:
        raise FormatError(f"{path}: no token {unk!r} for unknown text")
    library = build(vocab, unk, lowercase=side.flag("do_lower_case") is not False,
                    strip_accents=side.flag("strip_accents"), chinese=side.flag("tokenize_chinese_chars") is not False)
    add_to_library(library, collect(vocab, len(vocab), _ROLES.values(), side, options), str(path))
    vocabulary = LibraryVocabulary(library, pieces.wordpiece(), str(path))
    roles = resolve(vocabulary, given, options)
    around = wrapping.around(roles.cls, roles.sep, [] if roles.sep is None else [roles.sep], second_type=1)
    return Tokenizer(vocabulary, roles, around)


def build(vocab: dict[str, int], unk: str, lowercase: bool, strip_accents: bool | None, chinese: bool = True) -> Any:
    """A `tokenizers.Tokenizer` for WordPiece. strip_accents None: as lowercase. chinese: whether each ideograph is a
    word."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers, pre_tokenizers

    library = Library(models.WordPiece(vocab=vocab, unk_token=unk, max_input_chars_per_word=_MAX_WORD))
    parts = names()["wordpiece"]
    library.normalizer = getattr(normalizers, parts["normalizer"])(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese)
    library.pre_tokenizer = getattr(pre_tokenizers, parts["pre_tokenizer"])()
    return library
