"""Collectives between the devices of a plan (ops.EXCHANGES) in plain Python: values pass through mailboxes."""

import numpy as np

from numflow.errors import DeviceError
from numflow.mailboxes import Mailboxes


class World(Mailboxes):
    """Meeting point of a plan's devices: threads of one process. Every executor has a World of its own kind.

    networks: of the devices, by index. threads: of each device. remote: ways to devices that are elsewhere.
    names: of the devices. in_pieces: whether a long batch may go through in pieces: NumPy does not promise that
    what a row gives does not depend on the rows beside it.
    """

    in_pieces = False

    def __init__(self, networks, threads=None, shared=False, remote=None, names=None):
        if shared or remote is not None:
            raise DeviceError("devices of backend 'reference' are threads of one process: use transport 'threads'")
        super().__init__()
        self.threads = dict.fromkeys(networks, threads)

    def together(self, network, programs):
        """Devices run in threads of Python: there is no call for all of them."""

    def close(self):
        self.reset()


def send(x, *, world, device, peer):
    """Hand x to device `peer`."""
    world.put(device, peer, x.copy())


def receive(*, world, device, peer):
    """The value that device `peer` sent."""
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
        world.put(device, other, x.copy())
    return {other: world.take(other, device) for other in group}
