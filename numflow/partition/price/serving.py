"""Simulation of serving: queries arrive, are batched, and pass through the stages of a plan."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from numflow.errors import RequestError
from numflow.network.cost import Workload
from numflow.partition.price.events import Interval, Script, Simulator
from numflow.partition.price.hardware import Cluster

Scripts = Callable[[Sequence[Workload]], Mapping[str, Script]]


@dataclass(frozen=True)
class Queries:
    """Simulated demand: `count` queries with `prompt` prompt tokens and `new` generated tokens.

    rate: arrivals per second (Poisson process); None: `at_once` queries are always active.

    Raises:
        RequestError: a value is not positive.
    """

    count: int
    prompt: int = 128
    new: int = 64
    at_once: int = 1
    rate: float | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("count", "prompt", "new", "at_once"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} of simulated queries should be at least 1, is {getattr(self, name)}")
        if self.rate is not None and not self.rate > 0:
            raise RequestError(f"rate of simulated queries should be above 0, is {self.rate:g}")


@dataclass(frozen=True)
class SimulatedEngine:
    """Settings of the simulated engine.

    max_batch: queries per batch. lanes: concurrent batches, which plans by layer pipeline.
    chunk:     prompt tokens of a batch. between: seconds between batches of a lane (sampling).
    """

    max_batch: int = 32
    lanes: int = 1
    chunk: int = 512
    between: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Results of a simulation.

    seconds: time until the last query ended. throughput: generated tokens/s of all queries. speed: generated tokens/s
    of a query after its first token, median. first: seconds to the first token, median. latencies: of all queries.
    busy: fraction of time each device worked. spans: activities of devices.
    """

    seconds: float
    throughput: float
    speed: float
    first: float
    latencies: tuple[float, ...]
    busy: Mapping[str, float]
    spans: Sequence[Interval]


class _Query:
    def __init__(self, came: float, prompt: int, new: int):
        self.came, self.waiting, self.wanted, self.written, self.cached = came, prompt, new, 0, 0
        self.first: float | None = None
        self.ended = 0.0


class _Lane:
    def __init__(self):
        self.queries: list[_Query] = []
        self.parts: list[tuple[_Query, int]] = []  # of the current batch: (query, prompt tokens); 0 for decoding
        self.job: int | None = None


def simulate(cluster: Cluster, scripts: Scripts, queries: Queries, service: SimulatedEngine | None = None,
             record: bool = False) -> Outcome:
    """Serve queries on the devices of a cluster.

    scripts: returns each device's script for a batch.
    record:  keep activities, for a timeline.
    """
    return _Run(cluster, scripts, queries, service or SimulatedEngine(), record).outcome()


class _Run:
    def __init__(self, cluster, scripts, queries: Queries, service: SimulatedEngine, record: bool):
        self.scripts, self.queries, self.service = scripts, queries, service
        self.simulator = Simulator(cluster, self._done, record)
        self.lanes = [_Lane() for _ in range(service.lanes)]
        self.waiting: list[_Query] = []
        self.ended: list[_Query] = []
        self.left = queries.count
        if queries.rate is None:
            for _ in range(min(queries.at_once, queries.count)):
                self._come()
        else:
            rng, when = random.Random(queries.seed), 0.0
            for _ in range(queries.count):
                when += rng.expovariate(queries.rate)
                self.simulator.at(when, self._come)

    def outcome(self) -> Outcome:
        seconds = self.simulator.run()
        speeds = [(q.wanted - 1) / (q.ended - q.first) for q in self.ended if q.wanted > 1]
        return Outcome(seconds, len(self.ended) * self.queries.new / seconds, _median(speeds),
                       _median([q.first - q.came for q in self.ended]),
                       tuple(sorted(q.ended - q.came for q in self.ended)),
                       {name: busy / seconds for name, busy in self.simulator.busy.items()},
                       self.simulator.spans or [])

    def _come(self) -> None:
        self.left -= 1
        self.waiting.append(_Query(self.simulator.now, self.queries.prompt, self.queries.new))
        # Simultaneous arrivals are spread over the lanes before a lane starts.
        self.simulator.at(self.simulator.now, self._start_idle)

    def _start_idle(self) -> None:
        for lane in self.lanes:
            if lane.job is None and not lane.parts:
                self._start(lane)

    def _start(self, lane: _Lane) -> None:
        """Start the lane's next batch: all decoding queries, and prompts up to the chunk size."""
        held = sum(len(other.queries) for other in self.lanes) + len(self.waiting)
        share = -(-held // len(self.lanes))
        while self.waiting and len(lane.queries) < min(self.service.max_batch, share):
            lane.queries.append(self.waiting.pop(0))
        room, parts = self.service.chunk, []
        for query in lane.queries:
            tokens = min(query.waiting, room)
            room -= tokens
            if tokens or not query.waiting:
                parts.append((query, tokens))
        if parts:
            lane.parts = parts
            lane.job = self.simulator.issue(self.scripts(_loads(parts)))

    def _done(self, job: int, now: float) -> None:
        lane = next(lane for lane in self.lanes if lane.job == job)
        for query, tokens in lane.parts:
            query.waiting -= tokens
            query.cached += tokens or 1
            if not query.waiting:
                query.first = now if query.first is None else query.first
                query.written += 1
        for query in [query for query in lane.queries if query.written == query.wanted]:
            query.ended = now
            lane.queries.remove(query)
            self.ended.append(query)
            if self.queries.rate is None and self.left:
                self._come()
        lane.job = None
        self.simulator.at(now + self.service.between, lambda: self._again(lane))

    def _again(self, lane: _Lane) -> None:
        lane.parts = []
        self._start(lane)


def _loads(parts) -> list[Workload]:
    """Loads of a batch: all decoding queries as one load of their mean length, and one load per prompt."""
    decoding = [query.cached for query, tokens in parts if not tokens]
    loads = [Workload(1, tokens, query.cached, int(tokens == query.waiting)) for query, tokens in parts if tokens]
    if decoding:
        loads.append(Workload(len(decoding), 1, round(sum(decoding) / len(decoding))))
    return loads


def _median(values) -> float:
    values = sorted(values)
    return values[len(values) // 2] if values else 0.0
