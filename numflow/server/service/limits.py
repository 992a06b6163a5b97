"""Limits of each API key: requests in a minute, tokens in a minute and in a day. Without keys all clients are one."""

import time
from collections.abc import Callable
from math import ceil

from numflow.server.http.errors import ApiError

MINUTE, DAY = 60.0, 86400.0


class Allowance:
    """So much in a period, which comes back steadily. What was not known beforehand may be owed.

    most: 0: as much as one likes.
    """

    def __init__(self, most: int, period: float, now: float):
        self.most, self._period, self._left, self._at = most, period, float(most), now

    def wait(self, now: float) -> float:
        """Seconds until something is left; 0 if it is."""
        if not self.most:
            return 0.0
        self._left = min(self.most, self._left + (now - self._at) * self.most / self._period)
        self._at = now
        return 0.0 if self._left >= 1 else (1 - self._left) * self._period / self.most

    def take(self, count: float) -> None:
        """Use some up, or give some back."""
        self._left -= count


class Limits:
    """The allowances of all keys.

    requests: in a minute. tokens: of prompts and answers, in a minute; daily: in a day. 0: any number.
    """

    def __init__(self, requests: int, tokens: int, daily: int, clock: Callable[[], float] = time.monotonic):
        self._most = {"requests": (requests, MINUTE), "tokens": (tokens, MINUTE), "tokens of a day": (daily, DAY)}
        self._clock = clock
        self._owners: dict[str, dict[str, Allowance]] = {}

    def _of(self, owner: str) -> dict[str, Allowance]:
        if owner not in self._owners:  # no more of them than keys are configured
            now = self._clock()
            self._owners[owner] = {name: Allowance(most, period, now) for name, (most, period) in self._most.items()}
        return self._owners[owner]

    def request(self, owner: str) -> None:
        """Count a request.

        Raises:
            ApiError: there are too many, or the tokens of earlier ones are more than the key may have.
        """
        found, now = self._of(owner), self._clock()
        waits = {name: one.wait(now) for name, one in found.items()}
        name, seconds = max(waits.items(), key=lambda pair: pair[1])
        if seconds > 0:
            what = "requests of a minute" if name == "requests" else "tokens of a minute" if name == "tokens" else name
            raise ApiError(429, f"this key has used up the {found[name].most} {what} that it may have; try again in "
                           f"{ceil(seconds)} s", code="rate_limit_exceeded",
                           headers={"Retry-After": str(ceil(seconds))})
        found["requests"].take(1)

    def tokens(self, owner: str, count: int) -> None:
        """Count tokens that were read or written."""
        found, now = self._of(owner), self._clock()
        for name in ("tokens", "tokens of a day"):
            found[name].wait(now)
            found[name].take(count)
