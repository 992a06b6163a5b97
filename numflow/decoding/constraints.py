"""Constraints on the next token, independent of the sampling strategy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NEVER = -np.inf


@dataclass(frozen=True)
class Constraints:
    """Tokens and sequences excluded by a request and by the model's files.

    ends:            end tokens.
    no_repeat_ngram: size of n-grams that must not occur twice, the decoder's first tokens included; 0: off.
    min_tokens:      minimum number of new tokens before an end token.
    max_tokens:      maximum number of new tokens. forced_last: the only token allowed as the last of them.
    banned:          token sequences that are never generated.
    """

    ends: frozenset[int] = frozenset()
    no_repeat_ngram: int = 0
    min_tokens: int = 0
    max_tokens: int = 0
    forced_last: int | None = None
    banned: tuple[tuple[int, ...], ...] = ()

    def apply(self, scores: np.ndarray, before: Sequence[int] | np.ndarray, new: int) -> np.ndarray:
        """Scores float [V] of the next token (logits or log-probabilities), -inf for excluded tokens.

        before: all ids of the decoder, its first tokens included. new: number of generated ids among them.
        """
        if self.forced_last is not None and new + 1 == self.max_tokens:
            forced = np.full_like(scores, NEVER)
            forced[self.forced_last] = 0
            return forced
        excluded = self._repeated_ngrams(before) + self._completed_bans(before)
        if new < self.min_tokens:
            excluded += self.ends
        if excluded:
            scores = scores.copy()
            scores[[id for id in excluded if id < len(scores)]] = NEVER  # tokenizers may have more ids than the model
        return scores

    @cached_property
    def _bans(self) -> dict[int, dict[tuple[int, ...], list[int]]]:
        """Banned sequences: number of tokens before the last one -> these tokens -> last tokens."""
        bans: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *first, last in self.banned:
            bans.setdefault(len(first), {}).setdefault(tuple(first), []).append(last)
        return bans

    def _completed_bans(self, before) -> list[int]:
        """Tokens that would complete a banned sequence: one table look-up per length of sequence."""
        found: list[int] = []
        for size, lasts in self._bans.items():
            if size <= len(before):
                found += lasts.get(tuple(int(id) for id in before[len(before) - size:]), ())
        return found

    def _repeated_ngrams(self, before) -> list[int]:
        """Tokens that would complete an n-gram that occurred before."""
        size = self.no_repeat_ngram
        if not size or len(before) < size:
            return []
        ids = np.asarray(before)
        windows = np.lib.stride_tricks.sliding_window_view(ids, size)
        return windows[(windows[:, :-1] == ids[len(ids) - size + 1:]).all(1), -1].tolist()
