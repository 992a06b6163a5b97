"""Sums and gathers of a group by NCCL, NVIDIA's library: one call of each device's thread, into its own queue.

A `Clique` is the communicators of a group whose devices have a card each. They are made together, by the first thread
that comes, so nobody waits in the library for a device that never comes; from then on each thread calls for its own
device. A device that fails leaves the others' GPUs waiting inside their kernels: `abort` lets them go.

What is called of the library (nccl4py's bindings): comm_init_all, all_reduce, all_gather, comm_destroy, comm_abort.
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
ENTER_S = 2.0        # for calls under way to return before communicators are aborted under them
END_S = 10.0         # for communicators to end


class Clique:
    """The communicators of a group.

    library: nccl.bindings.nccl. cards: GPU of each rank, in the order of the group, all different.
    must:    it is an error if they cannot be made; else `ready` says so, and copies do the work.
    """

    def __init__(self, library: ModuleType, cards: Sequence[int], must: bool = False):
        self._library, self.cards, self._must = library, list(cards), must
        self._state, self._making = threading.Condition(), threading.Lock()
        self._comms: list[Any] | None = None
        self._posted, self._inside = [0] * len(cards), 0
        self._aborted = self._failed = False
        self.failure = ""

    def ready(self) -> bool:
        """Whether there are communicators; makes them if need be. All ranks get the same answer.

        Raises:
            DeviceError: the run was broken off, or NCCL cannot make what it must.
        """
        if self._comms is None and not self.failure:
            with self._making:
                self._make()
        if self.failure and self._must:
            raise DeviceError(self.failure)
        return not self.failure

    def all_reduce(self, rank: int, device: Any, source: Ref, place: Ref, count: int) -> None:
        """f32 [count] at `place` = the sum of what all ranks have at `source`, which may be the same place.

        In the order of the device's queue.
        """
        addresses, queue = (device.address(source), device.address(place)), device.lend()
        self._post(rank, lambda comm: self._library.all_reduce(*addresses, count, FLOAT32, SUM, comm, queue))

    def all_gather(self, rank: int, device: Any, place: Ref, count: int) -> None:
        """f32 [ranks, count] at `place`: row r becomes that of rank r. In the order of the device's queue."""
        address, queue = device.address(place), device.lend()
        own = address + 4 * rank * count
        self._post(rank, lambda comm: self._library.all_gather(own, address, count, FLOAT32, comm, queue))

    def abort(self) -> None:
        """No call any more until `reset`. GPUs that wait for a rank that has not called are let go; where all have
        called as often, what they began comes to its end, and the communicators stay."""
        with self._state:
            self._aborted = True
            if self._comms is None or (len(set(self._posted)) == 1 and not self._failed):
                return
            self._state.wait_for(lambda: not self._inside, ENTER_S)
            comms, self._comms = self._comms, None
        self._end(comms, self._library.comm_abort)

    def reset(self) -> None:
        """As new; all devices must be at rest."""
        with self._state:
            self._posted = [0] * len(self.cards)
            self._aborted = self._failed = False

    def close(self) -> None:
        """End the communicators, once all that was begun is done; may be called twice."""
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
                log.warning("%s; they meet by copies", self.failure)
            return
        with self._state:
            if not self._aborted:
                self._comms = list(comms)
                return
        self._end(list(comms), self._library.comm_abort)
        self._refuse()

    def _post(self, rank: int, call: Callable[[Any], None]) -> None:
        """Call for a rank. It may wait for the others inside, so no lock is held."""
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
            raise DeviceError(f"GPUs {', '.join(map(str, self.cards))} were about to meet when the run was broken off")

    def _end(self, comms: Sequence[Any], how: Callable[[Any], None]) -> None:
        """End communicators. Each call may wait for those of the other ranks, so it gets a thread of its own."""
        def end(comm: Any) -> None:
            with contextlib.suppress(self._library.NCCLError):  # it is of no use any more, whatever it says
                how(comm)

        threads = [threading.Thread(target=end, args=(comm,), daemon=True, name="numflow-nccl-end") for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(END_S)


def clique(choice: str, device: Device, group: Sequence[int], numbers: Mapping[int, int]) -> Clique | None:
    """The clique of a group of devices; None: they meet by copies.

    choice:  "copies"; "nccl"; "auto": NCCL where it can be.
    device:  one of them.
    numbers: of the GPUs of all devices in this process, by index; those beyond the last GPU begin again.

    Raises:
        DeviceError: NCCL is wanted and cannot be, and why.
    """
    if choice == "copies" or len(group) < 2:
        return None
    try:
        cards = _cards(device, numbers)
        return Clique(compat.nccl(), [cards[index] for index in group], choice == "nccl")
    except DeviceError as error:
        if choice == "nccl":
            raise DeviceError(f"collectives 'nccl': {error}; 'copies' need no more than a driver") from None
        return None


def _cards(device: Device, numbers: Mapping[int, int]) -> dict[int, int]:
    """Card of each device; all different, since NCCL hangs where two ranks, or two cliques, share one."""
    if not device.cards:
        raise DeviceError(f"{device.name} is no card")
    found: dict[int, int] = {}
    for index, number in numbers.items():
        card = number % device.cards
        if card in found.values():
            raise DeviceError(f"NCCL wants a card for each device, and of {len(numbers)} devices two are on GPU {card} "
                              f"of {device.cards}")
        found[index] = card
    return found
