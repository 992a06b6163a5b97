"""A discrete-event simulator of devices that compute, exchange data and wait.

Each device processes a FIFO queue of jobs. A job has a script for each device: work, and exchanges with other devices.
Work is slower while several devices share the cores and memory of a host. Messages wait for a busy link.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from numflow.partition.price.hardware import Cluster


@dataclass(frozen=True)
class Work:
    """Consecutive steps of a device without exchanges.

    steps: for each kind of step, seconds of memory access and of computation without contention, and the number of
    steps.
           A step takes the longer of the two times.
    """

    steps: tuple[tuple[float, float, int], ...]

    @classmethod
    def of(cls, memory: float, compute: float) -> "Work":
        """One step."""
        return cls(((memory, compute, 1),))

    def seconds(self, memory_share: float = 1.0, core_share: float = 1.0) -> float:
        """Time with a share of the host's memory bandwidth and of a core."""
        return sum(max(memory / memory_share, compute / core_share) * count for memory, compute, count in self.steps)

    @cached_property
    def alone(self) -> float:
        """Time without contention."""
        return self.seconds()


@dataclass(frozen=True)
class Send:
    """Send `nbytes` to another device without waiting; a link carries one message at a time in each direction."""

    to: str
    nbytes: float


@dataclass(frozen=True)
class Receive:
    """Wait for the next message from another device."""

    source: str


@dataclass(frozen=True)
class Collective:
    """A collective exchange: all devices of `group` continue `seconds` after the last has arrived."""

    group: tuple[str, ...]
    seconds: float


Script = Sequence[Work | Send | Receive | Collective]


class Interval(NamedTuple):
    """Activity of a device from `begin` to `end`: "work", "exchange" (of a collective) or "wait"."""

    device: str
    begin: float
    end: float
    what: str
    job: int


@dataclass
class _Worker:
    queue: deque = field(default_factory=deque)  # (job number, script)
    at: int = 0                # index in the first script
    work: Work | None = None   # current work; `left` is the remaining fraction
    left: float = 0.0
    since: float = 0.0         # begin of the current activity
    waits: bool = False


class Simulator:
    """Runs jobs on the devices of a cluster.

    done: called with (job number, time) when all devices have finished a job; may issue more jobs.
    now:  simulated time in seconds. spans: activities of devices by end time; None if not recorded.
    """

    def __init__(self, cluster: Cluster, done: Callable[[int, float], None], record: bool = True):
        self.cluster, self.done, self.now = cluster, done, 0.0
        self.spans: list[Interval] | None = [] if record else None
        self.busy = dict.fromkeys(cluster.devices, 0.0)
        self._workers = {name: _Worker() for name in cluster.devices}
        self._arrived: dict[tuple[str, str], deque[float]] = {}
        self._link_free: dict[tuple[str, str], float] = {}
        self._meeting: dict[tuple[tuple[str, ...], int], int] = {}  # (group, job) -> number of arrived devices
        self._ends: list[tuple[float, tuple[str, ...]]] = []  # pending collectives
        self._open: dict[int, int] = {}
        self._jobs = 0
        self._alarms: list = []

    def issue(self, scripts: Mapping[str, Script]) -> int:
        """Append a job to the devices' queues; returns its number."""
        job, self._jobs = self._jobs, self._jobs + 1
        self._open[job] = len(scripts)
        for name, script in scripts.items():
            worker = self._workers[name]
            worker.queue.append((job, script))
            if len(worker.queue) == 1:
                worker.at, worker.since = 0, self.now
        return job

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call a function at a simulated time."""
        self._alarms.append((when, call))
        self._alarms.sort(key=lambda alarm: alarm[0], reverse=True)

    def run(self) -> float:
        """Simulate until all jobs are done; returns the final time.

        Raises:
            RuntimeError: deadlock, because scripts do not match.
        """
        while True:
            while self._settle():
                pass
            seconds = self._seconds()
            step = self._next(seconds)
            if step is None:
                waiting = [name for name, worker in self._workers.items() if worker.queue]
                if waiting:
                    raise RuntimeError(f"devices {', '.join(waiting)} wait for each other for ever")
                return self.now
            self._advance(step, seconds)

    def _settle(self) -> bool:
        """Advance all devices that can proceed without time passing; whether any did."""
        moved = [self._go_on(name, worker) for name, worker in self._workers.items()  # a list, so that all advance
                 if worker.queue and worker.work is None and not worker.waits]
        return any(moved)

    def _go_on(self, name: str, worker: _Worker) -> bool:
        job, script = worker.queue[0]
        if worker.at == len(script):
            self._finish(name, worker, job)
            return True
        item = script[worker.at]
        if isinstance(item, Work):
            self._span(name, worker, "wait", job)
            worker.work, worker.left = item, 1.0
            return True
        if isinstance(item, Send):
            begin = max(self.now, self._link_free.get((name, item.to), 0.0))
            link = self.cluster.between(name, item.to)
            self._link_free[name, item.to] = begin + item.nbytes / link.bandwidth
            self._arrived.setdefault((name, item.to), deque()).append(begin + link.seconds(item.nbytes))
            worker.at += 1
            return True
        if isinstance(item, Receive):
            message = self._arrived.get((item.source, name))
            if not message or message[0] > self.now:
                return False
            message.popleft()
            worker.at += 1
            return True
        return self._meet(item, worker, job)

    def _meet(self, item: Collective, worker: _Worker, job: int) -> bool:
        worker.waits = True
        came = self._meeting.get((item.group, job), 0) + 1
        self._meeting[item.group, job] = came
        if came == len(item.group):
            del self._meeting[item.group, job]
            for name in item.group:
                other = self._workers[name]
                self._span(name, other, "wait", job)
            self._ends.append((self.now + item.seconds, item.group))
        return True

    def _finish(self, name: str, worker: _Worker, job: int) -> None:
        worker.queue.popleft()
        worker.at, worker.since = 0, self.now
        self._open[job] -= 1
        if not self._open[job]:
            del self._open[job]
            self.done(job, self.now)

    def _next(self, seconds: Mapping[str, float]) -> float | None:
        """Seconds until the next event; None for no event. seconds: result of `_seconds`."""
        times = [self._workers[name].left * whole for name, whole in seconds.items()]
        times += [end - self.now for end, _ in self._ends]
        times += [messages[0] - self.now for messages in self._arrived.values() if messages and messages[0] > self.now]
        times += [self._alarms[-1][0] - self.now] if self._alarms else []
        return max(0.0, min(times)) if times else None

    def _advance(self, step: float, seconds: Mapping[str, float]) -> None:
        """Advance the time, and finish due activities. seconds: result of `_seconds`."""
        done = []
        for name, whole in seconds.items():
            worker = self._workers[name]
            worker.left -= step / whole if whole else 1.0
            if worker.left <= 1e-9:
                done.append((name, worker))
        self.now += step
        for name, worker in done:
            self.busy[name] += self.now - worker.since
            self._span(name, worker, "work", worker.queue[0][0])
            worker.work, worker.at = None, worker.at + 1
        for end, group in [entry for entry in self._ends if entry[0] <= self.now + 1e-12]:
            self._ends.remove((end, group))
            for name in group:
                worker = self._workers[name]
                self._span(name, worker, "exchange", worker.queue[0][0])
                worker.waits, worker.at = False, worker.at + 1
        while self._alarms and self._alarms[-1][0] <= self.now + 1e-12:
            self._alarms.pop()[1]()

    def _seconds(self) -> dict[str, float]:
        """Total duration of each busy device's work with the current contention."""
        working = {name: worker.work for name, worker in self._workers.items() if worker.work is not None}
        if self.cluster.cores is None:
            return {name: work.alone for name, work in working.items()}
        devices, host_bandwidth = self.cluster.devices, self.cluster.host_bandwidth or float("inf")
        active = Counter(devices[name].host for name in working)
        found = {}
        for name, work in working.items():
            device, count = devices[name], active[devices[name].host]
            memory = min(1.0, host_bandwidth / (count * device.bandwidth))
            found[name] = work.seconds(memory, min(1.0, self.cluster.cores / count))
        return found

    def _span(self, name: str, worker: _Worker, what: str, job: int) -> None:
        if self.spans is not None and self.now > worker.since:
            self.spans.append(Interval(name, worker.since, self.now, what, job))
        worker.since = self.now
