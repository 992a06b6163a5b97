"""Interface of vocabularies, and the vocabulary of the `tokenizers` package."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

from numflow.errors import FormatError, NumflowError, TokenizerError

LONG = 1 << 14  # characters from which a text is encoded without holding the GIL


@dataclass(frozen=True)
class AddedToken:
    """A token matched as a whole text. lstrip, rstrip: whether white space before or after the token is removed."""

    id: int
    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False


class Vocabulary(Protocol):
    """Token ids of a text without special tokens around it, and the bytes of each token.

    size:        highest id + 1.
    added:       tokens matched as whole texts before the vocabulary's algorithm runs, text -> id.
    special_ids: ids that are no text: skipped by `decode`, not matched without parse_special.
    unused:      rows of the model without a token: they add nothing to a text.
    """

    @property
    def size(self) -> int: ...
    @property
    def added(self) -> Mapping[str, int]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def unused(self) -> frozenset[int]: ...

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids of `text`, without special tokens."""

    def text(self, token: int) -> str | None:
        """Written form of a token ("Ġthe", "▁the", "##s"), None for an unused id."""

    def id(self, text: str) -> int | None:
        """Id of the token with the written form `text`, added tokens first."""

    def piece(self, token: int, first: bool) -> bytes:
        """Bytes of a token in decoded text. first: whether the token is the first of the text."""


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Convert all exceptions of the `tokenizers` package, including Rust panics, to FormatError."""
    try:
        yield
    except (NumflowError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package raises Exception; a panic is a BaseException
        raise FormatError(f"{where}: {' '.join(str(error).split())[:300]}") from None


class LibraryVocabulary:
    """Vocabulary of a `tokenizers.Tokenizer`, with a rule for the bytes of a token.

    The library's decoder returns a string and cannot represent incomplete characters; the rule (see pieces.py) gives
    the same text token by token, as bytes.
    """

    def __init__(self, library: Any, piece: Callable[[str, bool], bytes], where: str,
                 unused: frozenset[int] = frozenset()):
        self.library, self.unused = library, unused
        self._where = where
        self._piece = piece
        self._lock, self._without_special = Lock(), None
        library.no_truncation()
        library.no_padding()
        added = library.get_added_tokens_decoder()
        self.added = {token.content: id for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.size = max(library.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids = self._encode(text, parse_special)
        if not parse_special and not self.special_ids.isdisjoint(ids):
            # The algorithm itself has merged a special token: split its text, so that it cannot match as a whole.
            found = [re.escape(t) for id in self.special_ids.intersection(ids) if len(t := self.text(id) or "") > 1]
            cuts = sorted({match.start() + 1 for t in found for match in re.finditer(t, text)})
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
            ids = [id for part in parts for id in self._encode(part, parse_special)] if cuts else ids
        return ids

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        library = self.library if parse_special else self._plainly
        with library_errors(self._where):
            if len(text) < LONG:
                return library.encode(text, add_special_tokens=False).ids
            return library.encode_batch_fast([text], add_special_tokens=False)[0].ids  # releases the GIL

    @property
    def _plainly(self) -> Any:
        """Copy of the library's tokenizer that encodes special tokens as ordinary text, which is a setting of the
        object."""
        with self._lock:
            if self._without_special is None:
                with library_errors(self._where):
                    self._without_special = deepcopy(self.library)
                self._without_special.encode_special_tokens = True
            return self._without_special

    def text(self, token: int) -> str | None:
        return self.library.id_to_token(token) if token >= 0 else None

    def id(self, text: str) -> int | None:
        return self.library.token_to_id(text)

    def piece(self, token: int, first: bool) -> bytes:
        text = self.text(token)
        return b"" if text is None or token in self.unused else self._piece(text, first)


def check_text(text: str) -> None:
    """Raise TokenizerError if `text` is not Unicode text (a lone surrogate); the message names the character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise TokenizerError(f"text has a lone surrogate, U+{code:04X}, at character {error.start}: "
                             "it is not Unicode text") from None
