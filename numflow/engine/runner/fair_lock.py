"""A lock that is taken in turns."""

import threading


class FairLock:
    """As threading.RLock, but a thread that lets go and takes it again at once does not keep others out."""

    def __init__(self):
        self._door, self._lock = threading.RLock(), threading.RLock()

    def acquire(self, timeout: float = -1) -> bool:
        """Take it, waiting for `timeout` seconds at most (-1: without end) at each of two places; whether it was."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks it
            return self._lock.acquire()
        if not self._door.acquire(timeout=timeout):  # who waits for the lock stands in the door
            return False
        try:
            return self._lock.acquire(timeout=timeout)
        finally:
            self._door.release()

    def release(self) -> None:
        """Let go."""
        self._lock.release()

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *_):
        self.release()
