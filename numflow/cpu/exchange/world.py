"""Shared memory of the devices of a plan: one region that all of their threads access, in one process or in several.

    line 0            not 0: the run is aborted, and no thread waits any more; then the time until which other programs
                      are assumed to compete for the cores
    lines             one for every thread in every channel: the number of rounds that it has done
    slots             of the channels, for values in transit

A channel is a group of devices (all_reduce, all_gather) or a pair of devices (send, receive). A value is transferred in
rounds of as many rows as a slot holds. A thread copies its share to a slot, counts the round in its line, and waits for
the lines of the other threads. A line is written by one thread only, so no atomic addition is needed. A group has two
slots per device, used alternately: a thread in a round has read everything of the round before the last. A pair has a
ring of slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numflow.cpu.exchange.lockstep import Lockstep
from numflow.cpu.memory.buffers import LINE, aligned, padded
from numflow.cpu.runtime.cores import default_threads, patience
from numflow.errors import DeviceError
from numflow.ops import Network, param

CROWDED = 8  # offset in line 0
SLOT_BYTES = 256 << 10
_RING_ROWS = 1024  # rows that a ring holds, within its limits
_RING = (4, 64)    # slots of a ring


@dataclass(frozen=True)
class Channel:
    """Channel of a group or a pair of devices; offsets in the region.

    lines: offset of the first line. threads: lines of each device, one device after the other.
    slots: offset of the first slot. slot_bytes: of each. ring: slots of a pair, 2 for each device of a group.
    """

    devices: tuple[int, ...]
    lines: int
    threads: tuple[int, ...]
    slots: int
    slot_bytes: int
    ring: int

    def first_line(self, device: int) -> int:
        """Offset of a device's lines."""
        return self.lines + LINE * sum(self.threads[:self.devices.index(device)])


class World:
    """The region, and the channels that the steps of the devices' networks need.

    networks: by index of device. threads: of each device; None: the cores are divided among the devices.
    shared:   whether other processes can open the region; a World is passed to them by pickling.
    remote:   object with `put` and `take` (Mailboxes) for remote devices; only `send` and `receive` use it.
    names:    names of the devices; ignored, since CPU devices have no indices.
    in_pieces: whether a long batch may be run in pieces: a row's result does not depend on the other rows.

    Raises:
        DeviceError: threads is not at least 1, or there is not enough shared memory.
    """

    in_pieces = True

    def __init__(self, networks: Mapping[int, Network], threads: int | None = None, shared: bool = False,
                 remote: Any = None, names: Mapping[int, str] | None = None):
        cores = default_threads()
        count = max(1, cores // len(networks)) if threads is None else threads
        if count < 1:
            raise DeviceError(f"threads should be at least 1, is {threads}")
        self.threads, self.remote = dict.fromkeys(networks, count), remote
        self.patience = patience(count * len(networks))
        widths = _widths(networks)
        offset = self._lines_end = LINE + LINE * sum(self.threads[d] for key in widths for d in key[1])
        lines, self.channels = LINE, {}
        for key, width in widths.items():
            kind, devices = key
            counts = tuple(self.threads[d] for d in devices)
            slot = max(SLOT_BYTES, 4 * padded(width))
            ring = min(max(-(-_RING_ROWS * 4 * padded(width) // slot), _RING[0]), _RING[1]) if kind == "pair" else 2
            self.channels[key] = Channel(devices, lines, counts, offset, slot, ring)
            lines += LINE * sum(counts)
            offset += slot * ring * (1 if kind == "pair" else len(devices))
        self._size, self._owner = offset, True
        self._shared: Any = None
        self._memory: Any = None
        if shared:
            self._create()
        else:
            self._memory = aligned(self._size, np.uint8)

    def _create(self) -> None:
        from multiprocessing.shared_memory import SharedMemory  # 2 MB that most processes never need

        try:
            self._shared = SharedMemory(create=True, size=self._size)
        except OSError as error:
            raise DeviceError(f"no {self._size / 1e6:.0f} MB of shared memory: {error.strerror}") from None
        self._memory = np.frombuffer(self._shared.buf, np.uint8)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_memory": None, "_shared": self._shared.name, "_owner": False}

    def __setstate__(self, state: dict) -> None:
        from multiprocessing.shared_memory import SharedMemory

        self.__dict__ |= state
        self._shared = SharedMemory(state["_shared"])
        self._memory = np.frombuffer(self._shared.buf, np.uint8)

    def together(self, network: Network, programs: Sequence[Any]) -> Lockstep | None:
        """A Lockstep that runs the programs of all devices, parts of `network`, by one call; None if there are remote
        devices."""
        return None if self.remote is not None else Lockstep(network, programs, self)

    @property
    def address(self) -> int:
        """Address of the region in this process."""
        return self._memory.ctypes.data

    @property
    def aborted(self) -> bool:
        """Whether the run is aborted."""
        return bool(self._counters[0])

    @property
    def progress(self) -> int:
        """A count that grows with every round of every thread."""
        rounds = int(self._counters[LINE // 8::LINE // 8].sum())
        return rounds if self.remote is None else rounds + self.remote.progress

    def abort(self) -> None:
        """Abort the run: no thread waits any more."""
        if self._memory is not None:
            self._counters[0] = 1
        if self.remote is not None:
            self.remote.abort()

    def reset(self) -> None:
        """Reset all counters; all devices must be idle."""
        self._counters[:] = 0
        if self.remote is not None:
            self.remote.reset()

    def close(self) -> None:
        """Free the region; may be called twice."""
        self._memory = None
        if self._shared is not None:
            self._shared.close()
            if self._owner:
                self._shared.unlink()
            self._shared = None

    @property
    def _counters(self) -> np.ndarray:
        return self._memory[:self._lines_end].view(np.int64)


def _widths(networks: Mapping[int, Network]) -> dict[tuple[str, tuple[int, ...]], int]:
    """Channels, ("group", devices) or ("pair", (from, to)), with the widest rows that go through them."""
    widths: dict[tuple[str, tuple[int, ...]], int] = {}
    for device, network in networks.items():
        for step in (step for steps in network.entries.values() for step in steps):
            if step.op == "send" and param(step, "peer") in networks:
                key, width = ("pair", (device, param(step, "peer"))), step.inputs[0].width
            elif step.op in ("all_reduce", "all_gather"):
                key, width = ("group", tuple(param(step, "group"))), step.outputs[0].width
            else:
                continue
            widths[key] = max(width, widths.get(key, 0))
    return widths
