"""Values on their way from one device to another, in plain Python: the slow way that always works."""

import threading
from collections import defaultdict, deque

import numpy as np

from numflow.errors import DeviceError


class Mailboxes:
    """A queue of arrays for every pair of devices; any thread may put and take.

    abort: whoever waits, now or later, gets a DeviceError. reset: as new; all devices must be at rest.
    progress: grows with every value that is put.
    """

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
        self._changed = threading.Condition()
        self.aborted, self.progress = False, 0

    def put(self, sender: int, receiver: int, x: np.ndarray) -> None:
        """Leave an array, which nobody changes any more; never waits."""
        with self._changed:
            self._boxes[sender, receiver].append(x)
            self.progress += 1
            self._changed.notify_all()

    def take(self, sender: int, receiver: int) -> np.ndarray:
        """The next array that `sender` left for `receiver`; waits for it.

        Raises:
            DeviceError: the run was broken off.
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
