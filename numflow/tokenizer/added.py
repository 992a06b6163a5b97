"""Added tokens: those matched as whole texts before a vocabulary's own algorithm runs."""

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
    """Cuts text at added tokens: the leftmost match, and the longest there."""

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
        """Texts (never empty) and ids in order; special tokens stay text when parse_special is off."""
        parts: list[str | int] = []
        done = at = 0
        while self._scan is not None and (found := self._scan.search(text, at)):
            token = self._at(text, found.start(), parse_special)
            if token is None:
                at = found.start() + 1
                continue
            before = text[done : found.start()]
            before = before.rstrip() if token.lstrip else before
            done = at = found.start() + len(token.text)
            if token.rstrip:
                done = at = after.start() if (after := _UNSPACED.search(text, done)) else len(text)
            parts += [before, token.id] if before else [token.id]
        return [*parts, text[done:]] if done < len(text) else parts

    def _at(self, text: str, start: int, parse_special: bool) -> AddedToken | None:
        for length in self._lengths[text[start]]:
            token = self._tokens.get(text[start : start + length])
            if token is not None and (parse_special or not token.special):
                return token
        return None


def _character_class(characters: Iterable[str]) -> re.Pattern[str] | None:
    characters = "".join(re.escape(c) for c in characters)
    return re.compile(f"[{characters}]") if characters else None


def collect(vocab: Mapping[str, int], count: int, own: Iterable[str], side: SideFiles,
            options: Mapping[str, Any]) -> list[AddedToken]:
    """Added tokens of a vocabulary of `count` ids, in the order of their ids.

    In order: the vocabulary's `own`, those the side files give ids to, those they only name (roles, additional
    special tokens) and the options' language codes, which get the next ids where the vocabulary lacks them; last
    the options' added_tokens.

    Raises:
        TokenizerError: an option's id is far beyond the vocabulary.
    """
    added = {text: AddedToken(vocab[text], text) for text in own if text in vocab}
    added |= {token.text: token for token in side.added_tokens()}
    following = max([count - 1, *(token.id for token in added.values())]) + 1
    codes = (AddedToken(-1, f"__{code}__") for code in options.get("language_codes", ()))
    for token in (*side.named_tokens(), *codes):
        if token.text not in added:
            added[token.text] = replace(token, id=vocab.get(token.text, following))
            following = max(following, added[token.text].id + 1)
    for text, id in options.get("added_tokens", {}).items():
        if type(id) is not int or not 0 <= id < 2 * count + MAX_ADDED:
            raise TokenizerError(f"[tokenizer] added_tokens: {quoted(text)} should have an id near the {count} of "
                                 f"the file, has {quoted(id)}")
        added[text] = AddedToken(id, text)
    return sorted(added.values(), key=lambda token: token.id)


def add_to_library(library: Any, added: Iterable[AddedToken], where: str) -> None:
    """Add tokens to a `tokenizers.Tokenizer`, which gives the next ids to those not in its vocabulary.

    Raises:
        FormatError: a token would get another id than it should have.
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
