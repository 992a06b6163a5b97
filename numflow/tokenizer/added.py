"""Added tokens: tokens matched as whole texts before the vocabulary's algorithm runs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from numflow.errors import FormatError, TokenizerError, quoted
from numflow.tokenizer.side_files import SideFiles
from numflow.tokenizer.vocabulary import AddedToken

MAX_ADDED = 10_000
_UNSPACED = re.compile(r"\S")


class AddedTokens:
    """Splits text at added tokens: the leftmost match first, of several the longest."""

    def __init__(self, tokens: Iterable[AddedToken]):
        self._tokens = {token.text: token for token in tokens if token.text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._scan = _character_class(self._lengths)
        self.ids = {text: token.id for text, token in self._tokens.items()}
        self.special_ids = frozenset(token.id for token in self._tokens.values() if token.special)

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """Split a text into texts (never empty) and ids; without parse_special, special tokens stay text."""
        parts: list[str | int] = []
        done = offset = 0
        while self._scan is not None and (found := self._scan.search(text, offset)):
            token = self._match_at(text, found.start(), parse_special)
            if token is None:
                offset = found.start() + 1
                continue
            before = text[done : found.start()]
            before = before.rstrip() if token.lstrip else before
            done = offset = found.start() + len(token.text)
            if token.rstrip:
                done = offset = after.start() if (after := _UNSPACED.search(text, done)) else len(text)
            parts += [before, token.id] if before else [token.id]
        return [*parts, text[done:]] if done < len(text) else parts

    def _match_at(self, text: str, start: int, parse_special: bool) -> AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._tokens.get(text[start : start + length])
            if token is not None and (parse_special or not token.special):
                return token
        return None


def _character_class(characters: Iterable[str]) -> re.Pattern[str] | None:
    characters = "".join(re.escape(c) for c in characters)
    return re.compile(f"[{characters}]") if characters else None


def collect(vocab: Mapping[str, int], count: int, texts: Iterable[str], side: SideFiles,
            options: Mapping[str, Any]) -> list[AddedToken]:
    """Added tokens of a vocabulary of `count` ids, in the order of their ids.

    Sources in order: tokens of the vocabulary (`texts`); tokens with ids in the side files; tokens only named there
    (roles, additional special tokens) and the options' language codes, which get the next ids if the vocabulary lacks
    them; the options' added_tokens.

    Raises:
        TokenizerError: an option's id is far beyond the vocabulary.
    """
    added = {text: AddedToken(vocab[text], text) for text in texts if text in vocab}
    added |= {token.text: token for token in side.added_tokens()}
    next_id = max([count - 1, *(token.id for token in added.values())]) + 1
    codes = (AddedToken(-1, f"__{code}__") for code in options.get("language_codes", ()))
    for token in (*side.named_tokens(), *codes):
        if token.text not in added:
            added[token.text] = replace(token, id=vocab.get(token.text, next_id))
            next_id = max(next_id, added[token.text].id + 1)
    for text, id in options.get("added_tokens", {}).items():
        if type(id) is not int or not 0 <= id < 2 * count + MAX_ADDED:
            raise TokenizerError(f"[tokenizer] added_tokens: {quoted(text)} should have an id near the {count} of "
                                 f"the file, has {quoted(id)}")
        added[text] = AddedToken(id, text)
    return sorted(added.values(), key=lambda token: token.id)


def add_to_library(library: Any, added: Iterable[AddedToken], where: str) -> None:
    """Add tokens to a `tokenizers.Tokenizer`, which gives the next ids to tokens that are not in its vocabulary.

    Raises:
        FormatError: a token would get a wrong id.
    """
    from tokenizers import AddedToken as LibraryToken

    for special, run in groupby(added, key=lambda token: token.special):
        tokens = list(run)
        made = [LibraryToken(t.text, special=special, normalized=False, lstrip=t.lstrip, rstrip=t.rstrip)
                for t in tokens]
        (library.add_special_tokens if special else library.add_tokens)(made)
        wrong = next((t for t in tokens if library.token_to_id(t.text) != t.id), None)
        if wrong is not None:
            raise FormatError(f"{where}: added token {quoted(wrong.text)} should have id {wrong.id}, which leaves "
                              f"a gap: it gets {library.token_to_id(wrong.text)}")
