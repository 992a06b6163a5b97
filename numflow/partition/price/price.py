"""Price of a plan on a cluster: memory of each device, and scripts of a batch for the simulator."""

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

    element:   bytes of an activation on a link. step: seconds beside those of the device for every step.
    start:     seconds for every device at the start of a batch (threads that are made or woken).
    star:      partial sums go to one device, are added there and copied back, one message after the other; else every
               device takes part in a ring, or reads all others' at once where that is quicker.
    poll:      seconds until a device notices that others are done.
    overlaps:  batches of several lanes are under way at the same time.
    """

    name: str
    element: int = 4
    step: float = 0.0
    start: float = 0.0
    star: bool = False
    poll: float = 0.0
    overlaps: bool = True


NUMFLOW = Style("numflow")
# Half-precision partial sums merged by one worker, a synchronisation after nearly every kernel, a thread made for every
# worker and step, waiting by sleeps of a microsecond, which Linux rounds up to its timer slack of 50; no pipelining.
INFERFLOW = Style("as Inferflow executes", 2, 8e-6, 40e-6, True, 55e-6, False)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a device: weights, keys and values of all queries, scratch memory for a batch; limit: what it has."""

    weights: float
    cache: float
    scratch: float
    limit: float

    @property
    def used(self) -> float:
        """All together."""
        return self.weights + self.cache + self.scratch

    @property
    def fits(self) -> bool:
        """Whether the device has that much."""
        return self.used <= self.limit


@dataclass(frozen=True)
class Holding:
    """Sizes as an executor holds them. weigh: bytes of a weight; hold: of a cached token of one attention; look_up:
    bytes of a table of positions or token types, where those are held in another way than matrices."""

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

    kv_bytes: bytes of a cached value. weigh, hold: bytes of a weight, and of a cached token of one attention, as the
              executor holds them; without `hold`, a token takes `kv_bytes` for each value.
    holdings: by executor, where those of a plan hold things in different ways.
    factors:  by kind of step (`kind_of`) or by op, measured time / priced time, where a run was measured.
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
        """By device: for `tokens` cached tokens of all queries together and batches of `rows` rows."""
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
        """Bytes of so many tokens in the caches, of all queries together; of an encoder-decoder, as many that are read
        and as many that are written. Layers with a window keep the last ones of each query, recurrent ones a state."""
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
        return [*start, *[done[place] for place in outlined.order]]

    def _outline(self, part: DevicePart, entry: str) -> Outline:
        """Made once: it is the same for every load."""
        place = part.index, entry
        if place not in self._outlines:
            self._outlines[place] = outline(part.network, entry, self.holding(part).weigh,
                                            kind_of if self.factors else None)
        return self._outlines[place]

    def work(self, part: DevicePart, step: Step, loads) -> tuple[float, float]:
        """Seconds of waiting for memory and of calculating: the longer of the two hides the other.

        What was measured (`factors`) is time of a core, as long as memory is not slower still.
        """
        device = self.cluster.devices[part.name]
        weigh = self.holding(part).weigh
        costs = [step_cost(part.network, step, load, self.kv_bytes, weigh) for load in loads]
        cost = sum(costs, StepCost())
        whole = sum(weigh(part.network.weights[name]) for name in step.weights.values())
        weights = min(sum(c.weights for c in costs), whole)  # loads of a batch share them
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
        """Time to add `adds` partial sums of `nbytes` and to hand the sum to a group."""
        link, others = self._slowest(group), len(group) - 1
        if self.style.star:
            device = self.cluster.devices[group[0]]
            added = (adds - 1) * (device.step + self.style.step + 3 * nbytes / device.bandwidth)
            return 2 * others * link.seconds(nbytes) + added + 2 * self.style.poll
        at_once = link.latency + others * nbytes / link.bandwidth
        ring = 2 * link.latency + 2 * others / len(group) * nbytes / link.bandwidth
        return min(at_once, ring) + self.style.poll

    def gather_seconds(self, group: Sequence[str], pieces: Sequence[float]) -> float:
        """Time until every device of a group has all pieces (bytes of each)."""
        link = self._slowest(group)
        if self.style.star:
            return 2 * sum(link.seconds(nbytes) for nbytes in pieces[1:]) + 2 * self.style.poll
        return link.latency + (sum(pieces) - min(pieces)) / link.bandwidth + self.style.poll

    def _slowest(self, group: Sequence[str]) -> Link:
        links = [self.cluster.between(a, b) for a in group for b in group if a != b]
        latency = max(link.latency for link in links)
        if self.cluster.cores is not None and len(self.plan.devices) > self.cluster.cores:
            latency = max(latency, self.cluster.crowded)  # also of few devices: the others hold cores while they wait
        return Link(min(link.bandwidth for link in links), latency)


def kind_of(step: Step) -> str:
    """Label of a step without its layer: "attn_output" of "blk.3.attn_output"."""
    place = layer_of(step.label)
    return step.label if place is None else step.label.split("blk.", 1)[1].partition(".")[2]


def _work(steps: Iterable[tuple[tuple[float, float], int]]) -> Work:
    """Of (seconds of memory and of calculating, how many steps), those that take the same together."""
    counts: Counter[tuple[float, float]] = Counter()
    for seconds, count in steps:
        counts[seconds] += count
    return Work(tuple((*seconds, count) for seconds, count in counts.items()))
