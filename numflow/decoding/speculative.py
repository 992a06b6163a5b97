"""Speculative decoding: which of the tokens that somebody guessed may stay, so that the text is as if nobody had.

Two ways, both exact:

- The guess is compared with what the sampler picks by itself: the tokens are the very same. A guess x passes with the
  probability p(x). For greedy requests, and for guesses nobody knows a probability of (n-grams).
- Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a guess that was drawn from q passes with the
  probability min(1, p(x) / q(x)), and otherwise something is drawn from what p has more than q. The distribution is
  the same, the tokens for a seed are not. The part 1 - (distance of p and q) of the guesses passes, the most there
  can be.
"""

from collections import deque
from typing import NamedTuple
from weakref import WeakSet

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


class StepTimes:
    """What a step takes in which every text runs so many guesses behind its token, in seconds.

    Shared by all texts of a model that guess, and kept apart by how many of them there are. Of the latest steps the
    lower quartile counts, as other work on the machine makes steps longer and never shorter. A number of guesses that
    was never run is estimated from the nearest one that was.
    """

    LATEST = 7

    def __init__(self) -> None:
        self._latest: dict[int, dict[int, deque[float]]] = {}
        self._texts: WeakSet[object] = WeakSet()

    def enter(self, text: object) -> None:
        """A text guesses from now on."""
        self._texts.add(text)

    def leave(self, text: object) -> None:
        """It does not any more."""
        self._texts.discard(text)

    def observe(self, guesses: int, seconds: float) -> None:
        """A step with so many guesses took so long."""
        known = self._latest.setdefault(len(self._texts), {})
        known.setdefault(guesses, deque(maxlen=self.LATEST)).append(seconds)

    def estimate(self, guesses: int) -> float:
        """Seconds of a step with so many guesses; without any observation, in runs of a single row."""
        known, assumed = self._latest.get(len(self._texts)), self._assumed(guesses)
        if not known:
            return assumed
        nearest = min(known, key=lambda count: (abs(count - guesses), count))
        latest = sorted(known[nearest])
        return latest[len(latest) // 4] * assumed / self._assumed(nearest)

    def _assumed(self, guesses: int) -> float:
        """Of kernels that read the weights once for four rows, and then compute all the time."""
        rows = max(1, len(self._texts)) * (1 + guesses)
        return 1 + 0.1 * (rows - 1) + 0.25 * max(0, rows - 4)


class DraftLength:
    """How many tokens to guess: the number that promises the most tokens for the time.

    most: tokens at once, at most. rate: how often the latest guesses were right.

    The first k guesses of a step all pass with the probability rate ** k, so a step with k of them gives
    1 + rate + ... + rate ** k tokens.
    """

    MEMORY = 0.9  # weight of what was, with every step
    PROBE = 16  # where guessing does not pay, one token is tried every so many steps

    def __init__(self, most: int, rate: float = 0.7):
        self.most = most
        self._right, self._tried = rate, 1.0
        self._idle = 0

    @property
    def rate(self) -> float:
        """Of the guesses that were looked at, those that were right."""
        return self._right / self._tried

    def update(self, guessed: int, right: int) -> None:
        """Of so many guesses in a row the first `right` were right. What comes after a wrong one tells nothing."""
        if guessed:
            self._right = self.MEMORY * self._right + right
            self._tried = self.MEMORY * self._tried + min(right + 1, guessed)

    def choose(self, times: StepTimes, guess_s: float = 0.0) -> int:
        """Tokens to guess now. guess_s: seconds that a guess takes."""
        best, chosen, tokens = 1 / times.estimate(0), 0, 1.0
        for count in range(1, self.most + 1):
            tokens += self.rate**count
            speed = tokens / (times.estimate(count) + count * guess_s)
            if speed > best:
                best, chosen = speed, count
        self._idle = 0 if chosen else self._idle + 1
        if self._idle == self.PROBE:
            self._idle, chosen = 0, 1
        return chosen
