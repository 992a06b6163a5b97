"""All-reduce and all-gather of a group by NCCL: each device's thread makes one call, in the device's stream.

A `Clique` holds the NCCL communicators of a group whose devices are on different GPUs. The first thread creates the
communicators of all ranks at once (comm_init_all), so no thread blocks in the library for a device that never comes.
After that, each thread calls for its own rank. If a device fails, NCCL kernels of the other ranks wait forever on their
GPUs: `abort` ends them.

Functions of the library in use (nccl4py's bindings): comm_init_all, all_reduce, all_gather, comm_destroy, comm_abort.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from numflow.cuda.compiler import compat
from numflow.cuda.device.device import Device, Ref
from numflow.errors import DeviceError

log = logging.getLogger("numflow.cuda")
CHOICES = ("auto", "copies", "nccl")
FLOAT32, SUM = 7, 0  # ncclDataType_t and ncclRedOp_t
ENTER_S = 2.0        # seconds for calls in progress to return before their communicators are aborted
END_S = 10.0         # seconds for communicators to be destroyed


class Clique:
    """The NCCL communicators of a group.

    library: nccl.bindings.nccl. cards: GPU index of each rank, in the order of the group, all different.
    must:    raise an error if the communicators cannot be created; else `ready` returns False, and copies are used.
    """

    def __init__(self, library: ModuleType, cards: Sequence[int], must: bool = False):
        self._library, self.cards, self._must = library, list(cards), must
        self._state, self._making = threading.Condition(), threading.Lock()
        self._comms: list[Any] | None = None
        self._posted, self._inside = [0] * len(cards), 0
        self._aborted = self._failed = False
        self.failure = ""

    def ready(self) -> bool:
        """Whether there are communicators; creates them on the first call. All ranks get the same answer.

        Raises:
            DeviceError: the run was aborted, or NCCL is required and cannot create communicators.
        """
        if self._comms is None and not self.failure:
            with self._making:
                self._make()
        if self.failure and self._must:
            raise DeviceError(self.failure)
        return not self.failure

    def all_reduce(self, rank: int, device: Any, source: Ref, target: Ref, count: int) -> None:
        """f32 [count] at `target` = the sum over all ranks of f32 [count] at `source`, which may equal `target`.

        In stream order.
        """
        addresses, queue = (device.address(source), device.address(target)), device.lend()
        self._post(rank, lambda comm: self._library.all_reduce(*addresses, count, FLOAT32, SUM, comm, queue))

    def all_gather(self, rank: int, device: Any, target: Ref, count: int) -> None:
        """f32 [ranks, count] at `target`: row r becomes row r of rank r. In stream order."""
        address, queue = device.address(target), device.lend()
        own = address + 4 * rank * count
        self._post(rank, lambda comm: self._library.all_gather(own, address, count, FLOAT32, comm, queue))

    def abort(self) -> None:
        """Refuse calls until `reset`. If all ranks have made the same number of calls, their kernels will finish, and
        the communicators stay. Otherwise, abort the communicators: kernels that wait for a missing rank end."""
        with self._state:
            self._aborted = True
            if self._comms is None or (len(set(self._posted)) == 1 and not self._failed):
                return
            self._state.wait_for(lambda: not self._inside, ENTER_S)
            comms, self._comms = self._comms, None
        self._end(comms, self._library.comm_abort)

    def reset(self) -> None:
        """Return to the initial state. All devices must be idle."""
        with self._state:
            self._posted = [0] * len(self.cards)
            self._aborted = self._failed = False

    def close(self) -> None:
        """Destroy the communicators after their work has finished. A second call does nothing."""
        with self._state:
            comms, self._comms = self._comms, None
        if comms is not None:
            self._end(comms, self._library.comm_destroy)

    def _make(self) -> None:
        with self._state:
            self._refuse()
            if self._comms is not None or self.failure:
                return
        try:
            comms = self._library.comm_init_all(len(self.cards), self.cards)
        except (self._library.NCCLError, RuntimeError) as error:
            self.failure = f"NCCL cannot join GPUs {', '.join(map(str, self.cards))}: {error}"
            if not self._must:
                log.warning("%s; copies are used instead", self.failure)
            return
        with self._state:
            if not self._aborted:
                self._comms = list(comms)
                return
        self._end(list(comms), self._library.comm_abort)
        self._refuse()

    def _post(self, rank: int, call: Callable[[Any], None]) -> None:
        """Make a call for a rank. The call may block until other ranks call, so no lock is held meanwhile."""
        with self._state:
            self._refuse()
            if self._comms is None:
                raise DeviceError(f"the communicators of GPUs {', '.join(map(str, self.cards))} are closed")
            comm = self._comms[rank]
            self._posted[rank] += 1
            self._inside += 1
        failed = True
        try:
            call(comm)
            failed = False
        except self._library.NCCLError as error:
            raise DeviceError(f"NCCL between GPUs {', '.join(map(str, self.cards))}: {error}") from None
        finally:
            with self._state:
                self._inside -= 1
                self._failed |= failed
                self._state.notify_all()

    def _refuse(self) -> None:
        if self._aborted:
            raise DeviceError(f"GPUs {', '.join(map(str, self.cards))} were about to exchange data when the run was "
                              "broken off")

    def _end(self, comms: Sequence[Any], function: Callable[[Any], None]) -> None:
        """Destroy or abort communicators. Each call may wait for those of the other ranks, so each gets a thread."""
        def end(comm: Any) -> None:
            with contextlib.suppress(self._library.NCCLError):  # the communicator is unusable in any case
                function(comm)

        threads = [threading.Thread(target=end, args=(comm,), daemon=True, name="numflow-nccl-end") for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(END_S)


def clique(choice: str, device: Device, group: Sequence[int], numbers: Mapping[int, int]) -> Clique | None:
    """The Clique of a group of devices; None if they exchange by copies.

    choice:  "copies"; "nccl"; "auto": NCCL if it is possible.
    device:  any of the devices.
    numbers: GPU index of each device of this process, taken modulo the number of GPUs.

    Raises:
        DeviceError: choice is "nccl", and NCCL cannot be used; the message has the reason.
    """
    if choice == "copies" or len(group) < 2:
        return None
    try:
        cards = _cards(device, numbers)
        return Clique(compat.nccl(), [cards[index] for index in group], choice == "nccl")
    except DeviceError as error:
        if choice == "nccl":
            raise DeviceError(f"collectives 'nccl': {error}; 'copies' need only a driver") from None
        return None


def _cards(device: Device, numbers: Mapping[int, int]) -> dict[int, int]:
    """GPU of each device. All must differ: NCCL hangs if two ranks, or ranks of two groups, share a GPU."""
    if not device.cards:
        raise DeviceError(f"{device.name} is not a GPU")
    cards: dict[int, int] = {}
    for index, number in numbers.items():
        card = number % device.cards
        if card in cards.values():
            raise DeviceError(f"NCCL needs a GPU for each device; of {len(numbers)} devices, two are on GPU {card} "
                              f"of {device.cards}")
        cards[index] = card
    return cards
