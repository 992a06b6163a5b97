"""Speculative decoding: the draft tokens that may stay, so that the text is as it would be without drafts.

Two ways, both exact:

- The draft is compared with what the sampler picks by itself: the tokens are the very same. A draft x passes with the
  probability p(x). For greedy requests, and for drafts nobody knows a probability of (n-grams).
- Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a draft that was drawn from q passes with the
  probability min(1, p(x) / q(x)), and otherwise something is drawn from what p has more than q. The distribution is
  the same, the tokens for a seed are not. The part 1 - (distance of p and q) of the drafts passes, the most there
  can be.
"""

from collections import deque
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

from numflow.decoding.select import draw

MAX_DRAFTS = 16  # tokens proposed for one sequence in one step, at most


class Distribution(NamedTuple):
    """ids int64 [n], rising, with their probabilities float64 [n]."""

    ids: np.ndarray
    probabilities: np.ndarray

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Probabilities float64 [m] of any ids."""
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.probabilities[places], 0.0)


def verify(p: Distribution, draft: int, q: Distribution, accept: float, other: float) -> int:
    """A token distributed as p: the draft, which was drawn from q, or another one.

    accept, other: two random numbers 0 .. 1.
    """
    wanted, had = (float(d.of(np.array([draft]))[0]) for d in (p, q))
    if accept * had < wanted:
        return draft
    rest = np.maximum(p.probabilities - q.of(p.ids), 0)
    if not np.any(rest):  # p and q are the same but for rounding
        rest = p.probabilities
    return draw(p.ids, rest, other)


class StepTimes:
    """Seconds of a step in which every text runs so many drafts behind its token.

    Shared by all texts of a model that draft, and kept apart by how many of them there are. Of the latest steps the
    lower quartile counts, as other work on the machine makes steps longer and never shorter. A number of drafts that
    was never run is estimated from the nearest one that was.
    """

    LATEST = 7

    def __init__(self) -> None:
        self._latest: dict[int, dict[int, deque[float]]] = {}
        self._texts: WeakSet[object] = WeakSet()

    def enter(self, text: object) -> None:
        """A text drafts from now on."""
        self._texts.add(text)

    def leave(self, text: object) -> None:
        """It does not any more."""
        self._texts.discard(text)

    def observe(self, drafts: int, seconds: float) -> None:
        """A step with so many drafts took so long."""
        known = self._latest.setdefault(len(self._texts), {})
        known.setdefault(drafts, deque(maxlen=self.LATEST)).append(seconds)

    def estimate(self, drafts: int) -> float:
        """Seconds of a step with so many drafts; without any observation, in runs of a single row."""
        known, assumed = self._latest.get(len(self._texts)), self._assumed(drafts)
        if not known:
            return assumed
        nearest = min(known, key=lambda count: (abs(count - drafts), count))
        latest = sorted(known[nearest])
        return latest[len(latest) // 4] * assumed / self._assumed(nearest)

    def _assumed(self, drafts: int) -> float:
        """Of kernels that read the weights once for four rows, and then compute all the time."""
        rows = max(1, len(self._texts)) * (1 + drafts)
        return 1 + 0.1 * (rows - 1) + 0.25 * max(0, rows - 4)


class DraftLength:
    """Choice of how many tokens to draft: the number that promises the most tokens for the time.

    most: tokens at once, at most. rate: how often the latest drafts were right.

    The first k drafts of a step all pass with the probability rate ** k, so a step with k of them gives
    1 + rate + ... + rate ** k tokens.
    """

    MEMORY = 0.9  # weight of what was, with every step
    PROBE = 16  # where drafting does not pay, one token is tried every so many steps

    def __init__(self, most: int, rate: float = 0.7):
        self.most = most
        self._right, self._tried = rate, 1.0
        self._idle = 0

    @property
    def rate(self) -> float:
        """Of the drafts that were looked at, those that were right."""
        return self._right / self._tried

    def update(self, drafted: int, right: int) -> None:
        """Of so many drafts in a row the first `right` were right. What comes after a wrong one tells nothing."""
        if drafted:
            self._right = self.MEMORY * self._right + right
            self._tried = self.MEMORY * self._tried + min(right + 1, drafted)

    def choose(self, times: StepTimes, draft_s: float = 0.0) -> int:
        """Tokens to draft now. draft_s: seconds that a draft takes."""
        best, chosen, tokens = 1 / times.estimate(0), 0, 1.0
        for count in range(1, self.most + 1):
            tokens += self.rate**count
            speed = tokens / (times.estimate(count) + count * draft_s)
            if speed > best:
                best, chosen = speed, count
        self._idle = 0 if chosen else self._idle + 1
        if self._idle == self.PROBE:
            self._idle, chosen = 0, 1
        return chosen
