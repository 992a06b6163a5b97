"""A fake driver with asynchronous streams: work runs only when somebody waits for it, in any order that events allow.

A copy or launch that lacks an event between streams runs too early or too late under some seed, which shows in the
results: memory that was not written yet is NaN, and a reused buffer holds other values.
"""

import ctypes
import random
import threading
from collections import deque

from tests.cuda.fake_driver import OK, FakeDriver


class Event:
    """A CUDA event: how many times it was recorded, and how many of these records have been reached."""

    recorded = come = 0


class LazyDriver(FakeDriver):
    """seed: of the order in which streams make progress. swaps: how often execution switched to another stream."""

    def __init__(self, devices=1, seed=0):
        super().__init__(devices)
        self._dice, self._lock, self._queues = random.Random(seed), threading.RLock(), {}
        self.swaps, self._last = 0, None

    def cuStreamCreate(self, flags):
        stream = object()
        with self._lock:
            self._queues[stream] = deque()
        return OK, stream

    def cuStreamDestroy(self, stream):
        self.cuStreamSynchronize(stream)
        with self._lock:
            del self._queues[stream]
        return (OK,)

    def cuStreamSynchronize(self, stream):
        assert stream not in self.captured, "waiting while a stream records"
        self._until(lambda: not self._queues[stream])
        return (OK,)

    def cuMemFree(self, address):
        self._until(lambda: not any(self._queues.values()))  # like cuMemFree, which waits for all running work
        return super().cuMemFree(address)

    cuMemFreeHost = cuMemFree

    def cuMemcpyAsync(self, to, source, nbytes, stream):
        assert stream not in self.captured, "uploading while a stream records"
        return self._put(stream, lambda: ctypes.memmove(to, source, nbytes))

    def cuEventCreate(self, flags):
        return OK, Event()

    def cuEventRecord(self, event, stream):
        with self._lock:
            event.recorded += 1
            return self._put(stream, lambda number=event.recorded: setattr(event, "come", number))

    def cuStreamWaitEvent(self, stream, event, flags):
        with self._lock:
            return self._put(stream, lambda: None, lambda number=event.recorded: event.come >= number)

    def cuEventSynchronize(self, event):
        number = event.recorded
        self._until(lambda: event.come >= number)
        return (OK,)

    def cuGraphLaunch(self, graph, stream):
        self.replays += 1
        for work in graph:
            self._put(stream, lambda work=work: self._run(*work))
        return (OK,)

    def _launched(self, stream, *work):
        self._put(stream, lambda: self._run(*work))

    def _put(self, stream, act, ready=lambda: True):
        with self._lock:
            self._queues[stream].append((ready, act))
        return (OK,)

    def _until(self, reached):
        """Let randomly chosen streams make progress, one operation at a time, until the condition holds."""
        with self._lock:
            while not reached():
                able = [stream for stream, queue in self._queues.items() if queue and queue[0][0]()]
                assert able, "all streams wait for each other"
                stream = self._dice.choice(able)
                self.swaps += stream is not self._last
                self._last = stream
                self._queues[stream].popleft()[1]()
