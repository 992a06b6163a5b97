"""Speculative decoding: which of the tokens that somebody guessed may stay, so that the text is as if nobody had.

Two ways, both exact:

- The guess is compared with what the sampler picks by itself: the tokens are the very same. A guess x passes with the
  probability p(x). For greedy requests, and for guesses nobody knows a probability of (n-grams).
- Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a guess that was drawn from q passes with the
  probability min(1, p(x) / q(x)), and otherwise something is drawn from what p has more than q. The distribution is
  the same, the tokens for a seed are not. The part 1 - (distance of p and q) of the guesses passes, the most there
  can be.
"""

from typing import NamedTuple

import numpy as np

from numflow.decoding.select import draw


class Distribution(NamedTuple):
    """ids int64 [n], rising, with their probabilities float64 [n]."""

    ids: np.ndarray
    probabilities: np.ndarray

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Probabilities float64 [m] of any ids."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.probabilities[places], 0.0)


def verify(p: Distribution, guess: int, q: Distribution, accept: float, other: float) -> int:
    """A token distributed as p: the guess, which was drawn from q, or another one.

    accept, other: two random numbers 0 .. 1.
    """
    wanted, had = (float(d.of(np.array([guess]))[0]) for d in (p, q))
    if accept * had < wanted:
        return guess
    rest = np.maximum(p.probabilities - q.of(p.ids), 0)
    if not np.any(rest):  # p and q are the same but for rounding
        rest = p.probabilities
    return draw(p.ids, rest, other)


class DraftLength:
    """How many tokens to guess: the number that promises the most tokens for the time.

    cost:  of guessing a token, as a part of what a step of the model costs.
    extra: of running one more row in a step, likewise.
    most:  tokens at once, at most.
    rate:  how often the latest guesses were right; follows the last twenty or so.

    The first k guesses of a step all pass with the probability rate ** k, so a step with k of them gives
    1 + rate + ... + rate ** k tokens, for the time 1 + k (cost + extra).
    """

    MEMORY = 0.9  # weight of what was, with every step
    PROBE = 16  # where guessing does not pay, one token is tried every so many steps

    def __init__(self, most: int, cost: float = 0.0, extra: float = 0.1, rate: float = 0.7):
        self.most, self.cost, self.extra = most, cost, extra
        self._right, self._tried = rate, 1.0
        self._idle = 0

    @property
    def rate(self) -> float:
        """Of the guesses that were looked at, those that were right."""
        return self._right / self._tried

    def update(self, guessed: int, right: int) -> None:
        """Of so many guesses in a row the first `right` were right. What comes after a wrong one tells nothing."""
        self._right = self.MEMORY * self._right + right
        self._tried = self.MEMORY * self._tried + min(right + 1, guessed)

    def choose(self) -> int:
        """Tokens to guess now."""
        best, most, tokens = 1.0, 0, 1.0
        for count in range(1, self.most + 1):
            tokens += self.rate**count
            speed = tokens / (1 + count * (self.cost + self.extra))
            if speed > best:
                best, most = speed, count
        self._idle = 0 if most else self._idle + 1
        if self._idle == self.PROBE:
            self._idle, most = 0, 1
        return most
