"""A fake NCCL: the functions of nccl4py, over streams of a fake driver.

A rank's call goes into its stream and is executed once all ranks have called, as in the library. Sums are taken from
the last rank to the first, unlike the order of copies. Results of an aborted communicator are NaN.
"""

import ctypes
import itertools
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tests.cuda.fake_driver import OK
from tests.cuda.lazy_driver import LazyDriver


class PatientDriver(LazyDriver):
    """A LazyDriver whose waits for a blocked stream also wait for other threads. Streams are integers, as real handles
    are."""

    def __init__(self, devices=2, seed=0):
        super().__init__(devices, seed)
        self._changed, self._numbers, self.streams = threading.Condition(self._lock), itertools.count(0x1000), []

    def cuStreamCreate(self, flags):
        with self._lock:
            self.streams.append(next(self._numbers))
            self._queues[self.streams[-1]] = deque()
            return OK, self.streams[-1]

    def put(self, stream, act, ready=lambda: True):
        """Append an operation that is not the driver's own to a stream."""
        assert stream not in self.captured, "a stream that records was given a collective"
        self._put(stream, act, ready)

    def wake(self):
        """Notify waiting threads that a stream may be able to continue."""
        with self._changed:
            self._changed.notify_all()

    def _put(self, stream, act, ready=lambda: True):
        self.wake()
        return super()._put(stream, act, ready)

    def _until(self, reached):
        with self._changed:
            while not reached():
                able = [stream for stream, queue in self._queues.items() if queue and queue[0][0]()]
                if able:
                    self._queues[self._dice.choice(able)].popleft()[1]()
                    self._changed.notify_all()
                else:
                    assert self._changed.wait(20), "all streams wait for each other"


@dataclass(eq=False)
class Communicator:
    """One rank's communicator. state: "alive", "aborted" or "destroyed". rounds: shared by all ranks: the calls of
    each."""

    rank: int
    ranks: int
    rounds: list[dict[int, np.ndarray]]
    state: str = "alive"
    calls: int = 0


@dataclass
class FakeNccl:
    """The library. calls: (function, rank, elements, stream) of each call. made: all communicators. refuse: fail to
    make any."""

    driver: PatientDriver
    refuse: bool = False
    calls: list[tuple] = field(default_factory=list)
    made: list[Communicator] = field(default_factory=list)
    cards: list[list[int]] = field(default_factory=list)

    class NCCLError(Exception):
        pass

    def get_version(self):
        return 23203

    def comm_init_all(self, count, cards):
        assert len(set(cards)) == count == len(cards), "the library hangs where ranks share a card"
        if self.refuse:
            raise self.NCCLError("UnhandledCudaError (1): unhandled cuda error")
        rounds = []
        comms = [Communicator(rank, count, rounds) for rank in range(count)]
        self.cards.append(cards)
        self.made += comms
        return comms

    def all_reduce(self, source, place, count, datatype, op, comm, queue):
        assert (datatype, op) == (7, 0)
        self._call("all_reduce", comm, queue, source, count,
                   lambda brought: sum(brought[rank] for rank in reversed(range(comm.ranks))), place)

    def all_gather(self, source, place, count, datatype, comm, queue):
        assert datatype == 7 and source == place + 4 * count * comm.rank, "in place: no copy"
        self._call("all_gather", comm, queue, source, count,
                   lambda brought: np.concatenate([brought[rank] for rank in range(comm.ranks)]), place)

    def comm_abort(self, comm):
        self._end(comm, "aborted")

    def comm_destroy(self, comm):
        assert comm.calls == len(comm.rounds), "a rank has not called as often as others: this waits for ever"
        self._end(comm, "destroyed")

    def _end(self, comm, state):
        assert comm.state == "alive", "the library would crash"
        comm.state = state
        self.driver.wake()

    def _call(self, name, comm, queue, source, count, result, place):
        assert comm.state == "alive", "the library would crash"
        self.calls.append((name, comm.rank, count, queue))
        with self.driver._lock:
            if comm.calls == len(comm.rounds):
                comm.rounds.append({})
            brought = comm.rounds[comm.calls]
            comm.calls += 1

        def bring():
            brought[comm.rank] = _floats(source, count).copy()

        def fetch():
            whole = result(brought) if comm.state != "aborted" else np.full(count, np.nan, np.float32)
            _floats(place, whole.size)[:] = whole

        self.driver.put(queue, bring)
        self.driver.put(queue, fetch, lambda: len(brought) == comm.ranks or comm.state == "aborted")


def _floats(address, count):
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
