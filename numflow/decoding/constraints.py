"""Constraints on the next token, whatever strategy picks one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NEVER = -np.inf


@dataclass(frozen=True)
class Constraints:
    """Tokens and sequences ruled out by a request and by the model's own files.

    ends:            tokens that end a text.
    no_repeat_ngram: no sequence of so many tokens comes twice, the decoder's first tokens included; 0: off.
    min_tokens:      so many new tokens come before an end token may.
    max_tokens:      new tokens at most. forced_last: the only token that may come as the last of them.
    banned:          token sequences that never come.
    """

    ends: frozenset[int] = frozenset()
    no_repeat_ngram: int = 0
    min_tokens: int = 0
    max_tokens: int = 0
    forced_last: int | None = None
    banned: tuple[tuple[int, ...], ...] = ()

    def apply(self, scores: np.ndarray, before: Sequence[int] | np.ndarray, new: int) -> np.ndarray:
        """Scores float [V] of the next token (logits or log-probabilities), -inf where a token may not come.

        before: all ids the decoder has, its first ones included. new: how many of them are new.
        """
        if self.forced_last is not None and new + 1 == self.max_tokens:
            forced = np.full_like(scores, NEVER)
            forced[self.forced_last] = 0
            return forced
        out = self._repeats(before) + self._completing(before)
        if new < self.min_tokens:
            out += self.ends
        if out:
            scores = scores.copy()
            scores[[id for id in out if id < len(scores)]] = NEVER  # tokenizers may have more ids than the model
        return scores

    @cached_property
    def _bans(self) -> dict[int, dict[tuple[int, ...], list[int]]]:
        """The banned sequences: length of what comes before the last token -> it -> the last tokens."""
        bans: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *first, last in self.banned:
            bans.setdefault(len(first), {}).setdefault(tuple(first), []).append(last)
        return bans

    def _completing(self, before) -> list[int]:
        """Tokens that would complete a banned sequence: a look into a table for each length that sequences have."""
        found: list[int] = []
        for size, lasts in self._bans.items():
            if size <= len(before):
                found += lasts.get(tuple(int(id) for id in before[len(before) - size:]), ())
        return found

    def _repeats(self, before) -> list[int]:
        """Tokens that would complete a sequence that has been."""
        size = self.no_repeat_ngram
        if not size or len(before) < size:
            return []
        ids = np.asarray(before)
        windows = np.lib.stride_tricks.sliding_window_view(ids, size)
        return windows[(windows[:, :-1] == ids[len(ids) - size + 1:]).all(1), -1].tolist()
