"""Collectives of the devices of a plan (ops.EXCHANGES) in plain Python: values are passed through mailboxes."""

import numpy as np

from numflow.errors import DeviceError
from numflow.mailboxes import Mailboxes


class World(Mailboxes):
    """World of a plan's devices that are threads of one process; see executor.contract.World.

    networks: by index of device. threads: of each device. shared, remote: not supported. names: names of the devices.
    in_pieces: whether a long batch may be run in pieces. False: NumPy does not guarantee that a row's result is
    independent of the other rows.
    """

    in_pieces = False

    def __init__(self, networks, threads=None, shared=False, remote=None, names=None):
        if shared or remote is not None:
            raise DeviceError("devices of backend 'reference' are threads of one process: use transport 'threads'")
        super().__init__()
        self.threads = dict.fromkeys(networks, threads)

    def together(self, network, programs):
        """None: devices run in Python threads, there is no single call for all of them."""

    def close(self):
        self.reset()


def send(x, *, world, device, peer):
    """Send x to device `peer`."""
    world.put(device, peer, x.copy())


def receive(*, world, device, peer):
    """The value that device `peer` sent."""
    return world.take(peer, device)


def all_reduce(x=None, *, world, device, group, adds):
    """The sum of x over the devices `adds`, in their order, on every device of the group."""
    terms = _gathered(x, world, device, group)
    total = terms[adds[0]]
    for other in adds[1:]:
        total = total + terms[other]
    return total


def all_gather(x=None, *, world, device, group, spans):
    """Columns spans[i] are x of device group[i]."""
    pieces = _gathered(x, world, device, group)
    rows = max(len(piece) for piece in pieces.values())
    y = np.empty((rows, max(end for _, end in spans)), np.float32)
    for other, (begin, end) in zip(group, spans, strict=True):
        if end > begin:
            y[:, begin:end] = pieces[other]
    return y


def _gathered(x, world, device, group):
    """x of each device of the group, by device; an array without rows for None."""
    x = np.empty((0, 0), np.float32) if x is None else x
    for other in group:
        world.put(device, other, x.copy())
    return {other: world.take(other, device) for other in group}
