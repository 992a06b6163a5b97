"""What the devices of a plan do together (ops.EXCHANGES), in plain Python: values pass through mailboxes."""

import threading
from collections import defaultdict, deque

import numpy as np

from numflow.errors import DeviceError


class World:
    """The mailboxes of all devices, which run in threads of one process. Every executor has a World of its own kind.

    same_bits: whether what a row gives does not depend on the rows beside it (NumPy promises nothing).

    abort: whoever waits, now or later, gets a DeviceError. reset: as new; all devices must be at rest.
    progress: grows as devices do things together. threads: of each device.
    """

    same_bits = False

    def __init__(self, networks, threads=None, shared=False):
        if shared:
            raise DeviceError("devices of backend 'reference' are threads of one process: use transport 'threads'")
        self.threads = [threads] * len(networks)
        self._boxes = defaultdict(deque)
        self._changed = threading.Condition()
        self.reset()

    def put(self, sender, receiver, x):
        """Leave a copy of x; never waits."""
        with self._changed:
            self._boxes[sender, receiver].append(x.copy())
            self.progress += 1
            self._changed.notify_all()

    def take(self, sender, receiver):
        """The next value that `sender` left for `receiver`; waits for it."""
        box = self._boxes[sender, receiver]
        with self._changed:
            self._changed.wait_for(lambda: box or self.aborted)
            if self.aborted:
                raise DeviceError(f"device {receiver} waited for device {sender} when the run was broken off")
            return box.popleft()

    def abort(self):
        with self._changed:
            self.aborted = True
            self._changed.notify_all()

    def reset(self):
        with self._changed:
            self._boxes.clear()
            self.aborted, self.progress = False, 0

    def close(self):
        self._boxes.clear()


def send(x, *, world, device, peer):
    """Hand x to device `peer`."""
    world.put(device, peer, x)


def receive(*, world, device, peer):
    """What device `peer` sent."""
    return world.take(peer, device)


def all_reduce(x=None, *, world, device, group, adds):
    """The sum of x over the devices `adds`, in their order, on every device of the group."""
    terms = _of_all(x, world, device, group)
    total = terms[adds[0]]
    for other in adds[1:]:
        total = total + terms[other]
    return total


def all_gather(x=None, *, world, device, group, spans):
    """Columns spans[i] are x of device group[i]."""
    pieces = _of_all(x, world, device, group)
    rows = max(len(piece) for piece in pieces.values())
    y = np.empty((rows, max(end for _, end in spans)), np.float32)
    for other, (begin, end) in zip(group, spans, strict=True):
        if end > begin:
            y[:, begin:end] = pieces[other]
    return y


def _of_all(x, world, device, group):
    """By device, what each of the group has; no rows where it has nothing."""
    x = np.empty((0, 0), np.float32) if x is None else x
    for other in group:
        world.put(device, other, x)
    return {other: world.take(other, device) for other in group}
