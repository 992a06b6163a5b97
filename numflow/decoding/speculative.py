"""Speculative decoding: acceptance of draft tokens, and the number of tokens to draft.

Two exact methods of acceptance:

- Comparison with the token that the sampler picks: the tokens are identical to those without drafts. A draft x is
  accepted with probability p(x). Used for greedy requests, and for drafts without a distribution (n-grams).
- Rejection sampling (Leviathan et al. 2023, Chen et al. 2023): a draft x sampled from q is accepted with probability
  min(1, p(x) / q(x)); after a rejection a token is sampled from max(p - q, 0), normalised. The distribution is the same
  as without drafts, the tokens for a seed are not. The acceptance rate is 1 - (total variation distance of p and q),
  the maximum possible.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

from numflow.decoding.select import draw

MAX_DRAFTS = 16  # maximum draft tokens of one sequence in one step


class Distribution(NamedTuple):
    """Distribution over ids int64 [n], ascending, with probabilities float64 [n]."""

    ids: np.ndarray
    probabilities: np.ndarray

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Probabilities float64 [m] of any ids [m]."""
        indices = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[indices] == ids, self.probabilities[indices], 0.0)


def verify(p: Distribution, draft: int, q: Distribution, accept: float, other: float) -> int:
    """Rejection sampling: a token distributed as p, either the draft (sampled from q) or another token.

    accept, other: random numbers 0 .. 1 for the acceptance and for the other token.
    """
    p_draft, q_draft = (float(d.of(np.array([draft]))[0]) for d in (p, q))
    if accept * q_draft < p_draft:
        return draft
    residual = np.maximum(p.probabilities - q.of(p.ids), 0)
    if not np.any(residual):  # p and q are equal up to rounding
        residual = p.probabilities
    return draw(p.ids, residual, other)


class StepTimes:
    """Measured seconds of a round by number of drafts. A round is drafting plus the step that runs the drafts.

    All texts with the same kind of drafter share the measurements, which are separate for each number of such texts.
    The estimate is the lower quartile of the latest rounds, since other work on the machine only lengthens rounds.
    Numbers of drafts that were never run are interpolated or extrapolated linearly.

    Rounds without drafts and a few with drafts are measured first. If drafts do not pay off, they are retried after
    `FIRST` rounds; the wait doubles each time (exponential backoff).

    clock: monotonic clock in seconds.
    """

    LATEST, ENOUGH, TRIAL = 5, 2, 2  # rounds kept, rounds needed for an estimate, drafts of a measuring round
    FIRST, MOST = 256, 8192  # first and maximum number of rounds before drafts are retried
    SHARE = 50  # minimum rounds between two trials, as a multiple of the cost of a trial in rounds

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._latest: dict[int, dict[int, deque[float]]] = {}
        self._texts: WeakSet[object] = WeakSet()
        self._clock, self._begin, self._open = clock, 0.0, False
        self._wait, self._idle, self._trying = self.FIRST, 0, 0

    def enter(self, text: object) -> None:
        """Register a text that is about to draft; the first of them starts a round."""
        self._texts.add(text)
        if not self._open:
            self._begin, self._open = self._clock(), True

    def leave(self, text: object) -> None:
        """Unregister a text that drafts no more."""
        self._texts.discard(text)
        self._open = self._open and bool(self._texts)

    def ended(self, drafts: int) -> None:
        """End the round in which a text ran `drafts` drafts."""
        self._open = False
        self.observe(drafts, self._clock() - self._begin)

    def observe(self, drafts: int, seconds: float) -> None:
        """Record the duration of a round with `drafts` drafts."""
        rounds = self._latest.setdefault(len(self._texts), {})
        rounds.setdefault(drafts, deque(maxlen=self.LATEST)).append(seconds)

    def to_measure(self) -> int | None:
        """Number of drafts to run now for a measurement; None if there are enough measurements."""
        measured = self._latest.get(len(self._texts), {})
        if len(measured.get(0, ())) < self.ENOUGH:
            return 0
        return None if any(len(rounds) >= self.ENOUGH for drafts, rounds in measured.items() if drafts) else self.TRIAL

    def estimates(self, most: int) -> list[float]:
        """Estimated seconds of rounds with 0 to `most` drafts. Needs measurements without drafts and with some
        drafts."""
        rounds = self._latest[len(self._texts)]
        counts = sorted(rounds)
        seconds_of = {count: sorted(rounds[count])[len(rounds[count]) // 4] for count in counts}
        found = []
        for low, high in zip(counts, [*counts[1:], most + 1], strict=True):
            first, last = (low, high) if high in seconds_of else (0, low)
            slope = max(0.0, seconds_of[last] - seconds_of[first]) / max(1, last - first)
            found += [seconds_of[low] + slope * (count - low) for count in range(low, high)]
        return found[:most + 1]

    def reset_backoff(self) -> None:
        """Reset the backoff: drafts pay off now."""
        self._wait, self._idle, self._trying = self.FIRST, 0, 0

    def should_retry(self, rounds: int, loss: float) -> bool:
        """Whether a text retries a draft, though drafts have not paid off for `rounds` rounds.

        loss: cost of a round with one draft that does not pay off, in rounds without drafts.
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
    """Choice of the number of draft tokens: the number with the highest expected tokens per second.

    most: maximum number of draft tokens. rate: acceptance rate of the latest drafts.

    The first k drafts of a step are all accepted with probability rate ** k, so a step with k drafts gives
    1 + rate + ... + rate ** k tokens on average.
    """

    MEMORY = 0.9  # decay of earlier counts per step
    GAIN = 1.05  # minimum speed-up: the cost of drafts outside their rounds is not measured
    PAUSE = 16  # rounds without drafts after drafts did not pay off

    def __init__(self, most: int, rate: float = 0.7):
        self.most = most
        self._accepted, self._checked = rate, 1.0
        self._pause = self._paused = 0

    @property
    def rate(self) -> float:
        """Acceptance rate: accepted drafts / checked drafts."""
        return self._accepted / self._checked

    def update(self, drafted: int, right: int) -> None:
        """Record that the first `right` of `drafted` drafts were accepted. Drafts after a rejected one are not
        checked."""
        if drafted:
            self._accepted = self.MEMORY * self._accepted + right
            self._checked = self.MEMORY * self._checked + min(right + 1, drafted)

    def pauses(self) -> bool:
        """Whether drafting pauses in this round because drafts did not pay off; counts the round."""
        if not self._pause:
            return False
        self._pause -= 1
        return True

    def choose(self, times: StepTimes) -> int:
        """Number of tokens to draft now."""
        if self.pauses():
            return 0
        if (trial := times.to_measure()) is not None:
            return min(trial, self.most)
        seconds, rate = times.estimates(self.most), self.rate
        best, chosen, tokens = self.GAIN / seconds[0], 0, 1.0
        for count in range(1, self.most + 1):
            tokens += rate**count
            if tokens > best * seconds[count]:
                best, chosen = tokens / seconds[count], count
        if chosen:
            times.reset_backoff()
            return chosen
        if times.should_retry(1 + self._paused, seconds[1] / seconds[0] - 1 - rate):
            self._paused = 0
            return 1
        self._pause = self._paused = self.PAUSE - 1
        return 0
