"""Waiting for what another thread or process does. It is counted, not timed: a busy machine is given longer."""

import time
from collections.abc import Callable
from typing import Any

PAUSE = 0.02  # seconds between two looks


def until(condition: Callable[[], Any], what: str = "", seconds: float = 60) -> Any:
    """The first true value of `condition`, looked at PAUSE apart.

    what: named when none was found. seconds: of the pauses between looks, all of them together.
    """
    tries = int(seconds / PAUSE)
    for _ in range(tries):
        if found := condition():
            return found
        time.sleep(PAUSE)
    raise AssertionError(f"{what or 'what is waited for'} did not come in {tries} looks")
