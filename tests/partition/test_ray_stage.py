"""Messages between actors, and an actor's GPUs. Without Ray: peers are objects of this process."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from numflow.errors import DeviceError
from numflow.partition.cluster.stage import ActorMailboxes, _on_gpus


class Late:
    """An array that a GPU has not finished: available after `done` is set."""

    def __init__(self, value, error=None):
        self.value, self.error, self.done = value, error, threading.Event()

    def __array__(self, dtype=None, copy=None):
        assert self.done.wait(10)
        if self.error is not None:
            raise self.error
        return np.full((1, 2), self.value, np.float32)


def actors():
    """Mailboxes of two actors, with devices 0 and 1."""
    boxes = [ActorMailboxes({0: 0, 1: 1}) for _ in range(2)]
    peers = {number: SimpleNamespace(deliver=SimpleNamespace(options=lambda box=box, **_: SimpleNamespace(
        remote=box.arrived))) for number, box in enumerate(boxes)}
    for box in boxes:
        box.peers = peers
    return boxes


def test_arrays_go_at_once_and_late_ones_in_order():
    first, second = actors()
    late = [Late(1), Late(2)]
    first.put(0, 1, np.full((1, 2), 5, np.float32))
    for value in late:
        first.put(0, 1, value)  # nobody waits here
    assert second.take(0, 1)[0, 0] == 5
    late[1].done.set()
    late[0].done.set()
    assert [second.take(0, 1)[0, 0] for _ in late] == [1, 2]


def test_the_receiver_hears_of_a_gpu_that_failed():
    first, second = actors()
    late = Late(1, DeviceError("the GPU's driver returns CUDA_ERROR_ECC_UNCORRECTABLE"))
    first.put(0, 1, late)
    late.done.set()
    with pytest.raises(DeviceError, match="ECC_UNCORRECTABLE"):
        second.take(0, 1)


def test_values_of_a_run_that_was_broken_off_are_dropped():
    first, second = actors()
    late = Late(1)
    first.put(0, 1, late)
    second.run = first.run = 1
    late.done.set()
    first.put(0, 1, np.full((1, 2), 7, np.float32))
    assert second.take(0, 1)[0, 0] == 7


def test_devices_are_the_gpus_that_the_actor_has():
    seen = {}
    executor = SimpleNamespace(Program="program", World=lambda *given, names: seen.update(given=given, names=names))
    found = _on_gpus(executor, {"2": 0, "3": 1})
    found.World({2: "network", 3: "network"}, None, False, "mailboxes", names={2: "2", 3: "3"})
    assert found.Program == "program" and seen == {
        "given": ({2: "network", 3: "network"}, None, False, "mailboxes"), "names": {2: "0", 3: "1"}}
