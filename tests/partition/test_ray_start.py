"""Retries of a failing Ray start, without Ray."""

from types import SimpleNamespace

import pytest

from numflow.errors import DeviceError
from numflow.partition.cluster import connect


def _ray(*problems):
    """A stand-in for Ray whose starts fail with these errors, in order."""
    left, done = list(problems), []

    def init(**where):
        done.append(where)
        if left:
            raise left.pop(0)

    return SimpleNamespace(init=init, shutdown=lambda: done.append("shutdown")), done


LATE = Exception("The current node timed out during startup. This could happen because ...")


def test_a_busy_machine_is_asked_again():
    ray, done = _ray(LATE, LATE)
    connect._start(ray, {"include_dashboard": False})
    assert done[1:4:2] == ["shutdown", "shutdown"] and len(done) == 5


def test_one_that_never_starts_is_one_line():
    ray, _ = _ray(*[LATE] * 9)
    with pytest.raises(DeviceError, match="^Ray did not start on this machine in 3 times 30 s: .*$"):
        connect._start(ray, {})


def test_other_errors_are_not_asked_again():
    ray, done = _ray(ValueError("no"))
    with pytest.raises(ValueError):
        connect._start(ray, {})
    assert len(done) == 1
