"""Rate limits of each API key: requests per minute, tokens per minute and per day. Without keys all clients share one.
"""

import time
from collections.abc import Callable
from math import ceil

from numflow.server.http.errors import ApiError

MINUTE, DAY = 60.0, 86400.0


class Allowance:
    """A token bucket: `most` in a period, refilled steadily. The level may become negative, as the length of an answer
    is not known beforehand.

    most: capacity; 0: no limit.
    """

    def __init__(self, most: int, period: float, now: float):
        self.most, self._period, self._left, self._updated = most, period, float(most), now

    def wait(self, now: float) -> float:
        """Seconds until the level is at least 1; 0 if it is."""
        if not self.most:
            return 0.0
        self._left = min(self.most, self._left + (now - self._updated) * self.most / self._period)
        self._updated = now
        return 0.0 if self._left >= 1 else (1 - self._left) * self._period / self.most

    def take(self, count: float) -> None:
        """Take `count` from the bucket, or give it back if negative."""
        self._left -= count


class Limits:
    """The buckets of all keys.

    requests: per minute. tokens: prompt and answer tokens per minute. daily: the same per day. 0: no limit.
    """

    def __init__(self, requests: int, tokens: int, daily: int, clock: Callable[[], float] = time.monotonic):
        self._most = {"requests": (requests, MINUTE), "tokens": (tokens, MINUTE), "tokens of a day": (daily, DAY)}
        self._clock = clock
        self._owners: dict[str, dict[str, Allowance]] = {}

    def _of(self, owner: str) -> dict[str, Allowance]:
        if owner not in self._owners:  # at most as many as configured keys
            now = self._clock()
            self._owners[owner] = {name: Allowance(most, period, now) for name, (most, period) in self._most.items()}
        return self._owners[owner]

    def request(self, owner: str) -> None:
        """Count a request.

        Raises:
            ApiError: the limit of requests or of tokens is reached.
        """
        found, now = self._of(owner), self._clock()
        waits = {name: one.wait(now) for name, one in found.items()}
        name, seconds = max(waits.items(), key=lambda pair: pair[1])
        if seconds > 0:
            unit = {"requests": "requests per minute", "tokens": "tokens per minute"}.get(name, "tokens per day")
            raise ApiError(429, f"this key has reached its limit of {found[name].most} {unit}; try again in "
                           f"{ceil(seconds)} s", code="rate_limit_exceeded",
                           headers={"Retry-After": str(ceil(seconds))})
        found["requests"].take(1)

    def tokens(self, owner: str, count: int) -> None:
        """Count tokens of a prompt or an answer."""
        found, now = self._of(owner), self._clock()
        for name in ("tokens", "tokens of a day"):
            found[name].wait(now)
            found[name].take(count)
