"""Prices of a plan on a cluster: memory of each device, and scripts of a batch for the simulator."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from numflow.network.cost import StepCost, Workload, step_cost, tables, weight_bytes
from numflow.network.describe import state_bytes
from numflow.network.windows import cache_windows, kept_tokens, token_bytes
from numflow.ops import EXCHANGES, Cache, Network, Step, Weight, param
from numflow.partition.cut.plan import DevicePart, Plan, layer_of
from numflow.partition.price.events import Collective, Receive, Script, Send, Work
from numflow.partition.price.hardware import Cluster, Link
from numflow.partition.price.outline import Outline, outline


@dataclass(frozen=True)
class Style:
    """Costs of an engine's way to execute a plan.

    element:   bytes of an activation on a link. step: further overhead of every step in seconds.
    start:     overhead of every device at the start of a batch (creating or waking threads), in seconds.
    star:      all_reduce by one device, which receives, adds and returns partial sums sequentially; otherwise ring, or
               direct reads of all other devices, whichever is faster.
    poll:      seconds until a device notices that others are done.
    overlaps:  several batches run concurrently (pipelining).
    """

    name: str
    element: int = 4
    step: float = 0.0
    start: float = 0.0
    star: bool = False
    poll: float = 0.0
    overlaps: bool = True


NUMFLOW = Style("numflow")
# Half-precision partial sums added by one worker, a synchronisation after nearly every kernel, a new thread per worker
# and step, waiting by sleeps of 1 microsecond, which Linux rounds up to its timer slack of 50; no pipelining.
INFERFLOW = Style("as Inferflow executes", 2, 8e-6, 40e-6, True, 55e-6, False)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a device: weights, KV caches of all queries, scratch buffers of a batch. limit: the device's memory."""

    weights: float
    cache: float
    scratch: float
    limit: float

    @property
    def used(self) -> float:
        """Total bytes."""
        return self.weights + self.cache + self.scratch

    @property
    def fits(self) -> bool:
        """Whether the total is within the limit."""
        return self.used <= self.limit


@dataclass(frozen=True)
class Holding:
    """Sizes in an executor. weigh: bytes of a weight. hold: bytes of a cached token of one cache. look_up: bytes of
    a table of positions or token types, if different from matrices."""

    weigh: Callable[[Weight], float] = weight_bytes
    hold: Callable[[Cache], float] | None = None
    look_up: Callable[[Weight], float] | None = None

    def weights(self, network: Network) -> float:
        """Bytes of all weights."""
        look_up = self.look_up or self.weigh
        looked_up = tables(network) if self.look_up is not None else ()
        return sum((look_up if name in looked_up else self.weigh)(weight) for name, weight in network.weights.items())


@dataclass(frozen=True)
class Prices:
    """Prices the steps of a plan on a cluster.

    kv_bytes: bytes of a cached value. weigh, hold: bytes of a weight, and of a cached token of one cache, in the
              executor; without `hold`, a token takes `kv_bytes` per value.
    holdings: by executor, if executors of the plan differ.
    factors:  measured time / priced time by kind of step (`kind_of`) or op, from a measured run.
    """

    plan: Plan
    cluster: Cluster
    style: Style = NUMFLOW
    kv_bytes: float = 2.0
    weigh: Callable[[Weight], float] = weight_bytes
    hold: Callable[[Cache], float] | None = None
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    _outlines: dict[tuple[int, str], Outline] = field(default_factory=dict, init=False, repr=False, compare=False)

    def memory(self, tokens: int, rows: int, queries: int = 1) -> dict[str, MemoryEstimate]:
        """Memory by device, for `tokens` cached tokens of all queries in total and batches of `rows` rows."""
        return {part.name: MemoryEstimate(
                    self.holding(part).weights(part.network),
                    self.cached_bytes(part.network, tokens, queries, self.holding(part).hold),
                    rows * 4 * sum(b.width for b in part.network.buffers.values() if b.rows != "logits"),
                    self.cluster.devices[part.name].memory)
                for part in self.plan.devices}

    def holding(self, part: DevicePart) -> Holding:
        """Sizes of a device's executor."""
        return self.holdings.get(part.executor) or Holding(self.weigh, self.hold)

    def cached_bytes(self, network: Network, tokens: int = 1, queries: int = 1,
                     hold: Callable[[Cache], float] | None = None) -> float:
        """Cache bytes of so many tokens of all queries in total; in an encoder-decoder, for as many source and target
        tokens. Layers with a window keep the last tokens of each query, recurrent layers a state."""
        hold = hold or self.hold or (lambda cache: token_bytes(cache, self.kv_bytes))
        windows = cache_windows(network)
        return queries * state_bytes(network) + sum(
            hold(cache) * kept_tokens(windows.get(name, 0), tokens, queries) for name, cache in network.caches.items())

    def scripts(self, loads: Sequence[Workload], entry: str = "main") -> dict[str, Script]:
        """Script of each device for a batch of these loads."""
        return {part.name: self._script(part, loads, entry) for part in self.plan.devices}

    def _script(self, part: DevicePart, loads, entry: str) -> Script:
        outlined = self._outline(part, entry)
        seconds = {kind: self.work(part, step, loads) for kind, step in enumerate(outlined.kinds)
                   if step.op not in EXCHANGES}
        done = [self._exchange(part, outlined.kinds[piece], loads) if isinstance(piece, int) else
                _work((seconds[kind], count) for kind, count in piece) for piece in outlined.pieces]
        start = [Work.of(0.0, self.style.start)] if self.style.start else []
        return [*start, *[done[index] for index in outlined.order]]

    def _outline(self, part: DevicePart, entry: str) -> Outline:
        """The outline of an entry, cached: it does not depend on the load."""
        key = part.index, entry
        if key not in self._outlines:
            self._outlines[key] = outline(part.network, entry, self.holding(part).weigh,
                                            kind_of if self.factors else None)
        return self._outlines[key]

    def work(self, part: DevicePart, step: Step, loads) -> tuple[float, float]:
        """Seconds of memory access and of computation, which overlap: a step takes the longer of the two.

        With `factors`, the measured time counts as computation, and memory time is at most the measured time.
        """
        device = self.cluster.devices[part.name]
        weigh = self.holding(part).weigh
        costs = [step_cost(part.network, step, load, self.kv_bytes, weigh) for load in loads]
        cost = sum(costs, StepCost())
        whole = sum(weigh(part.network.weights[name]) for name in step.weights.values())
        weights = min(sum(c.weights for c in costs), whole)  # loads of a batch share weights
        fixed = device.step + self.style.step
        memory = (weights + cost.cache + cost.activations) / device.bandwidth + fixed
        compute = cost.operations / device.operations + fixed
        factor = self.factors.get(kind_of(step), self.factors.get(step.op))
        if factor is None:
            return memory, compute
        measured = max(memory, compute) * factor
        return min(memory, measured), measured

    def _exchange(self, part: DevicePart, step: Step, loads):
        names = [device.name for device in self.plan.devices]
        view = (*step.inputs, *step.outputs)[0]
        wanted = part.network.buffers[view.buffer].rows == "logits"
        rows = sum(load.sequences * load.wanted if wanted else load.tokens for load in loads)
        if step.op == "send":
            return Send(names[param(step, "peer")], rows * view.width * self.style.element)
        if step.op == "receive":
            return Receive(names[param(step, "peer")])
        group = tuple(names[i] for i in param(step, "group"))
        if step.op == "all_gather":
            pieces = [end - begin for begin, end in param(step, "spans")]
            return Collective(group, self.gather_seconds(group, [rows * n * self.style.element for n in pieces]))
        adds = len(param(step, "adds"))
        return Collective(group, self.reduce_seconds(group, adds, rows * step.outputs[0].width * self.style.element))

    def reduce_seconds(self, group: Sequence[str], adds: int, nbytes: float) -> float:
        """Time of an all_reduce of `adds` partial sums of `nbytes` in a group."""
        link, others = self._slowest(group), len(group) - 1
        if self.style.star:
            device = self.cluster.devices[group[0]]
            added = (adds - 1) * (device.step + self.style.step + 3 * nbytes / device.bandwidth)
            return 2 * others * link.seconds(nbytes) + added + 2 * self.style.poll
        at_once = link.latency + others * nbytes / link.bandwidth
        ring = 2 * link.latency + 2 * others / len(group) * nbytes / link.bandwidth
        return min(at_once, ring) + self.style.poll

    def gather_seconds(self, group: Sequence[str], pieces: Sequence[float]) -> float:
        """Time of an all_gather in a group. pieces: bytes of each device's piece."""
        link = self._slowest(group)
        if self.style.star:
            return 2 * sum(link.seconds(nbytes) for nbytes in pieces[1:]) + 2 * self.style.poll
        return link.latency + (sum(pieces) - min(pieces)) / link.bandwidth + self.style.poll

    def _slowest(self, group: Sequence[str]) -> Link:
        links = [self.cluster.between(a, b) for a in group for b in group if a != b]
        latency = max(link.latency for link in links)
        if self.cluster.cores is not None and len(self.plan.devices) > self.cluster.cores:
            latency = max(latency, self.cluster.crowded)  # other devices occupy cores while waiting
        return Link(min(link.bandwidth for link in links), latency)


def kind_of(step: Step) -> str:
    """Label of a step without its layer: "attn_output" of "blk.3.attn_output"."""
    place = layer_of(step.label)
    return step.label if place is None else step.label.split("blk.", 1)[1].partition(".")[2]


def _work(steps: Iterable[tuple[tuple[float, float], int]]) -> Work:
    """Work from ((memory seconds, computation seconds), count) of steps; equal steps are merged."""
    counts: Counter[tuple[float, float]] = Counter()
    for seconds, count in steps:
        counts[seconds] += count
    return Work(tuple((*seconds, count) for seconds, count in counts.items()))
