"""Exchange of arrays between devices in plain Python: slow, without requirements."""

import threading
from collections import defaultdict, deque

import numpy as np

from numflow.errors import DeviceError


class Mailboxes:
    """A queue of arrays for every pair of devices; any thread may put and take.

    abort: all present and later waits raise DeviceError. reset: clear all; no device may be running.
    progress: number of arrays put so far.
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
        self._changed = threading.Condition()
        self.aborted, self.progress = False, 0

    def put(self, sender: int, receiver: int, x: np.ndarray) -> None:
        """Put an array, which must not change afterwards; never waits."""
        with self._changed:
            self._boxes[sender, receiver].append(x)
            self.progress += 1
            self._changed.notify_all()

    def take(self, sender: int, receiver: int) -> np.ndarray:
        """Take the next array from `sender` for `receiver`; waits for it.

        Raises:
            DeviceError: the run was aborted.
        """
        box = self._boxes[sender, receiver]
        with self._changed:
            self._changed.wait_for(lambda: box or self.aborted)
            if self.aborted:
                raise DeviceError(f"device {receiver} waited for device {sender} when the run was broken off")
            return box.popleft()

    def abort(self) -> None:
        with self._changed:
            self.aborted = True
            self._changed.notify_all()

    def reset(self) -> None:
        with self._changed:
            for box in self._boxes.values():
                box.clear()
            self.aborted, self.progress = False, 0
