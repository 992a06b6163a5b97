"""Speculative decoding: the draft tokens that may stay, so that the text is as it would be without drafts.

Two ways, both exact:

- The draft is compared with what the sampler picks by itself: the tokens are the very same. A draft x passes with the
  probability p(x). For greedy requests, and for drafts nobody knows a probability of (n-grams).
- Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a draft that was drawn from q passes with the
  probability min(1, p(x) / q(x)), and otherwise something is drawn from what p has more than q. The distribution is
  the same, the tokens for a seed are not. The part 1 - (distance of p and q) of the drafts passes, the most there
  can be.
"""

import time
from collections import deque
from collections.abc import Callable
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
    """Seconds of a round: drafting, and the step in which every text runs so many drafts behind its token.

    Shared by all texts that one source drafts for, and kept apart by how many of them there are. Of the latest rounds
    the lower quartile counts, as other work on the machine makes rounds longer and never shorter. Numbers of drafts
    that were never run lie on the line through those that were.

    Rounds without drafts and a few with some are measured first. Where drafts do not pay they are tried again after
    `FIRST` rounds, and after twice as many each time that they still do not.

    clock: seconds that rise.
    """

    LATEST, ENOUGH, TRIAL = 5, 2, 2  # rounds that are kept, that are needed, and drafts of those for their time
    FIRST, MOST = 256, 8192  # rounds without drafts before they are tried again
    SHARE = 50  # times what a trial costs, in rounds: as many rounds at least are between two of them

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._latest: dict[int, dict[int, deque[float]]] = {}
        self._texts: WeakSet[object] = WeakSet()
        self._clock, self._begin, self._open = clock, 0.0, False
        self._wait, self._idle, self._trying = self.FIRST, 0, 0

    def enter(self, text: object) -> None:
        """A text is about to draft, the first of a round or a further one."""
        self._texts.add(text)
        if not self._open:
            self._begin, self._open = self._clock(), True

    def leave(self, text: object) -> None:
        """It does not draft any more."""
        self._texts.discard(text)
        self._open = self._open and bool(self._texts)

    def ended(self, drafts: int) -> None:
        """The round in which a text ran so many drafts is over."""
        self._open = False
        self.observe(drafts, self._clock() - self._begin)

    def observe(self, drafts: int, seconds: float) -> None:
        """A round with so many drafts took so long."""
        known = self._latest.setdefault(len(self._texts), {})
        known.setdefault(drafts, deque(maxlen=self.LATEST)).append(seconds)

    def unknown(self) -> int | None:
        """The number of drafts to run now so that its time is known; None where enough is."""
        known = self._latest.get(len(self._texts), {})
        if len(known.get(0, ())) < self.ENOUGH:
            return 0
        return None if any(len(rounds) >= self.ENOUGH for drafts, rounds in known.items() if drafts) else self.TRIAL

    def estimates(self, most: int) -> list[float]:
        """Seconds of rounds with 0 to `most` drafts, of which those without drafts and some with them are known."""
        rounds = self._latest[len(self._texts)]
        counts = sorted(rounds)
        known = {count: sorted(rounds[count])[len(rounds[count]) // 4] for count in counts}
        found = []
        for low, high in zip(counts, [*counts[1:], most + 1], strict=True):
            first, last = (low, high) if high in known else (0, low)
            slope = max(0.0, known[last] - known[first]) / max(1, last - first)
            found += [known[low] + slope * (count - low) for count in range(low, high)]
        return found[:most + 1]

    def paid(self) -> None:
        """Drafts pay just now."""
        self._wait, self._idle, self._trying = self.FIRST, 0, 0

    def due(self, rounds: int, loss: float) -> bool:
        """Whether a text for which drafts have not paid for so many rounds is to try one all the same.

        loss: of a round with one draft, in rounds without.
        """
        if self._trying:
            self._trying -= 1
            return True
        self._idle += rounds
        if self._idle < max(self._wait, self.SHARE * self.ENOUGH * loss) * max(1, len(self._texts)):
            return False
        self._idle, self._wait, self._trying = 0, min(self.MOST, 2 * self._wait), self.ENOUGH - 1
        return True


class DraftLength:
    """Choice of how many tokens to draft: the number that promises the most tokens for the time.

    most: tokens at once, at most. rate: how often the latest drafts were right.

    The first k drafts of a step all pass with the probability rate ** k, so a step with k of them gives
    1 + rate + ... + rate ** k tokens.
    """

    MEMORY = 0.9  # weight of what was, with every step
    GAIN = 1.05  # of tokens for the time, at least: what drafts cost beside their rounds is not measured
    REST = 16  # rounds before it is asked again whether drafts pay, where they do not

    def __init__(self, most: int, rate: float = 0.7):
        self.most = most
        self._right, self._tried = rate, 1.0
        self._rest = self._rested = 0

    @property
    def rate(self) -> float:
        """Of the drafts that were looked at, those that were right."""
        return self._right / self._tried

    def update(self, drafted: int, right: int) -> None:
        """Of so many drafts in a row the first `right` were right. What comes after a wrong one tells nothing."""
        if drafted:
            self._right = self.MEMORY * self._right + right
            self._tried = self.MEMORY * self._tried + min(right + 1, drafted)

    def rests(self) -> bool:
        """Whether drafts did not pay just before, and nobody asks again yet; one round of that passes."""
        if not self._rest:
            return False
        self._rest -= 1
        return True

    def choose(self, times: StepTimes) -> int:
        """Tokens to draft now."""
        if self.rests():
            return 0
        if (trial := times.unknown()) is not None:
            return min(trial, self.most)
        seconds, rate = times.estimates(self.most), self.rate
        best, chosen, tokens = self.GAIN / seconds[0], 0, 1.0
        for count in range(1, self.most + 1):
            tokens += rate**count
            if tokens > best * seconds[count]:
                best, chosen = tokens / seconds[count], count
        if chosen:
            times.paid()
            return chosen
        if times.due(1 + self._rested, seconds[1] / seconds[0] - 1 - rate):
            self._rested = 0
            return 1
        self._rest = self._rested = self.REST - 1
        return 0
