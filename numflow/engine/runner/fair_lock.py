"""Reentrant lock that waiting threads take in turns."""

import threading


class FairLock:
    """As threading.RLock, but a thread that releases and acquires at once does not starve waiting threads."""

    def __init__(self):
        self._door, self._lock = threading.RLock(), threading.RLock()

    def acquire(self, timeout: float = -1) -> bool:
        """Acquire the lock; waits at most `timeout` seconds (-1: no limit) for each of two locks. Returns whether it
        was acquired."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition does
            return self._lock.acquire()
        if not self._door.acquire(timeout=timeout):  # the thread that waits for the lock holds the door
            return False
        try:
            return self._lock.acquire(timeout=timeout)
        finally:
            self._door.release()

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *_):
        self.release()
