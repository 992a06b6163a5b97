"""Planner: cuts candidate device strings, prices them on a cluster, and ranks them with reasons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from numflow.errors import DeviceError, NumflowError, RequestError
from numflow.network.cost import Workload, weight_bytes
from numflow.ops import Network
from numflow.partition.cut.cut import partition
from numflow.partition.cut.devices import CPU, executors_of, parse_devices
from numflow.partition.cut.plan import Plan, single_device
from numflow.partition.price.events import Simulator
from numflow.partition.price.hardware import Cluster
from numflow.partition.price.price import NUMFLOW, Holding, MemoryEstimate, Prices, Style
from numflow.sizes import in_words

OBJECTIVES = ("latency", "throughput")
CHUNK = 512    # rows of a prompt that run at once
_ROUNDS = 4    # simulated batches per lane with several lanes; the first is not measured


@dataclass(frozen=True)
class Goal:
    """Goal of a plan: `batch` queries at once, up to `context` tokens each, for latency or throughput."""

    batch: int = 1
    context: int = 2048
    objective: str = "latency"

    def __post_init__(self):
        if self.objective not in OBJECTIVES:
            raise RequestError(f"objective should be one of {', '.join(OBJECTIVES)}, is {self.objective!r}")
        for name in ("batch", "context"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} should be at least 1, is {getattr(self, name)}")


@dataclass(frozen=True)
class Candidate:
    """A device string with its price.

    error:      reason why the network cannot be cut so; other fields are then empty.
    plan:       kept for the best candidate only. layers: of each device, by stack, if groups are single devices.
    memory:     by device. first: seconds to the first token of a prompt that fills the context.
    speed:      tokens/s of a single query. throughput: tokens/s of `batch` queries in total.
    exchanging, waiting: fractions of the devices' time while decoding for the objective.
    reason:     explanation of the rank.
    """

    devices: str
    strategy: str = ""
    plan: Plan | None = None
    layers: tuple[tuple[str, Mapping[str, range]], ...] = ()
    memory: dict[str, MemoryEstimate] | None = None
    first: float = 0.0
    speed: float = 0.0
    throughput: float = 0.0
    exchanging: float = 0.0
    waiting: float = 0.0
    error: str = ""
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the candidate can run."""
        return not self.error and all(memory.fits for memory in (self.memory or {}).values())

    def score(self, goal: Goal) -> float:
        """Tokens/s for the goal's objective; 0 if the candidate does not fit."""
        return 0.0 if not self.fits else self.speed if goal.objective == "latency" else self.throughput


def strategies(cluster: Cluster, names: Sequence[str], needed: float = 0.0) -> list[str]:
    """Candidate device strings over some or all of these devices: by layer, by tensor and hybrid. Faster devices
    come first, devices with fast links are adjacent, and shares follow bandwidth or memory. "cpu", if given, is a
    separate group with the first layers: as few as leave enough memory on the other devices for `needed` bytes, and
    more."""
    numbers = sorted((n for n in names if n != CPU), key=lambda n: -cluster.devices[n].bandwidth)
    found: list[str] = []
    for count in range(1, len(numbers) + 1):
        chosen = _side_by_side(cluster, numbers[:count])
        for what in ("bandwidth", "memory"):
            sizes = {n: getattr(cluster.devices[n], what) for n in chosen}
            found += _ways([_shared(n, sizes) for n in chosen])
    if CPU in names:
        shares = _cpu_shares(cluster, numbers, needed)
        ways = _ways(_side_by_side(cluster, numbers))
        found += [f"{CPU}*{share:g};{way}" for way in ways for share in shares] or [CPU]
    return list(dict.fromkeys(found))


def _ways(names: Sequence[str]) -> list[str]:
    """Device strings with groups of equal size, the last one possibly smaller: by layer, hybrid, by tensor."""
    sizes = [size for size in range(1, len(names) + 1) if size in (1, len(names)) or 2 * size <= len(names) + 1]
    return [";".join("&".join(names[start:start + size]) for start in range(0, len(names), size)) for size in sizes]


def _side_by_side(cluster: Cluster, names: Sequence[str]) -> list[str]:
    """The names in an order in which each is followed by the remaining device with the fastest link to it."""
    order, left = list(names[:1]), list(names[1:])
    while left:
        order.append(max(left, key=lambda n: cluster.between(order[-1], n).bandwidth))
        left.remove(order[-1])
    return order


def _cpu_shares(cluster: Cluster, numbers: Sequence[str], needed: float) -> list[float]:
    """Candidate shares of the CPU, relative to share 1 of each other device."""
    if not numbers:
        return []
    room = 0.9 * sum(cluster.devices[n].memory for n in numbers)
    least = 0.1 if needed <= room else len(numbers) * (needed / room - 1)
    return sorted({round(least * factor + 0.005, 2) for factor in (1.0, 1.1, 1.25, 2.0)})


def _shared(name: str, sizes: Mapping[str, float]) -> str:
    """A device with its share, relative to the smallest."""
    share = round(sizes[name] / min(sizes.values()), 1)
    return name if share == 1 else f"{name}*{share:g}"


def rank(network: Network, cluster: Cluster, names: Sequence[str], goal: Goal, asked: str | None = None, *,
         style: Style = NUMFLOW, kv_bytes: float = 2.0, weigh: Callable = weight_bytes, hold: Callable | None = None,
         holdings: Mapping[str, Holding] | None = None, backend: str = CPU,
         progress: Callable[[str], None] | None = None) -> list[Candidate]:
    """Candidates, the best for the goal first; candidates that do not fit are last.

    network: built with fuse=False. names: allowed devices. asked: a further device string to price.
    style, kv_bytes, weigh, hold, holdings: see Prices. backend: executor of the devices; with "cuda", numbers are GPUs.

    Raises:
        DeviceError: the cluster lacks a device.
    """
    for name in names:
        if name not in cluster.devices:
            raise DeviceError(f"{cluster.title} has no device {name!r}; it has {', '.join(cluster.devices)}")
    whole = Prices(single_device(network, ""), cluster, style, kv_bytes, weigh, hold, holdings or {})
    cached = whole.cached_bytes(network, goal.batch * goal.context, goal.batch)
    needed = sum(map(weigh, network.weights.values())) + cached
    texts = list(dict.fromkeys([*([str(parse_devices(asked))] if asked else []),
                                *strategies(cluster, names, needed)]))
    found: list[Candidate] = []
    for text in texts:
        if progress is not None:
            progress(text)
        candidate = _price(network, cluster, text, goal, whole, backend)
        # Shares are rounded to layers, so different strings may give the same layers.
        if not candidate.layers or all(candidate.layers != other.layers for other in found):
            found.append(candidate)
        found.sort(key=lambda c: (-c.score(goal), len(parse_devices(c.devices)), c.devices))
        found[1:] = [replace(c, plan=None) for c in found[1:]]  # plans are large
    return [_with_reason(c, found[0], goal) for c in found]


def _price(network, cluster, text, goal: Goal, prices: Prices, backend: str) -> Candidate:
    placement = parse_devices(text)
    try:
        plan = partition(network, placement, executors_of(placement, backend))
    except NumflowError as error:
        return Candidate(text, placement.strategy, error=str(error))
    prices = replace(prices, plan=plan)
    memory = prices.memory(goal.batch * goal.context, min(max(goal.batch, CHUNK), goal.batch * goal.context),
                           goal.batch)
    lanes = len(plan.groups) if prices.style.overlaps else 1
    speed, exchanging, waiting = decode_rate(prices, 1, goal.context, 1)
    throughput, *shares = max((decode_rate(prices, goal.batch, goal.context, n)
                               for n in {1, min(lanes, goal.batch)}), key=lambda rate: rate[0])
    if goal.objective == "throughput":
        exchanging, waiting = shares
    first = prefill_seconds(prices, goal.context)
    layers = tuple((part.name, part.layers) for part in plan.devices) if len(plan.groups) == len(plan.devices) else ()
    return Candidate(text, placement.strategy, plan, layers, memory, first, speed, throughput, exchanging, waiting)


def decode_rate(prices: Prices, batch: int, context: int, lanes: int) -> tuple[float, float, float]:
    """(tokens/s, fraction of exchanges, fraction of waiting) of decoding `batch` queries in `lanes` concurrent
    batches."""
    sizes = [batch // lanes + (i < batch % lanes) for i in range(lanes)]
    scripts = [prices.scripts([Workload(size, 1, context - 1)]) for size in sizes]
    owner: dict[int, int] = {}
    rounds, ends = [0] * lanes, []

    def again(lane: int) -> None:
        owner[simulator.issue(scripts[lane])] = lane

    def done(job: int, now: float) -> None:
        lane = owner[job]
        rounds[lane] += 1
        if lane == 0:
            ends.append(now)
        if rounds[lane] < (_ROUNDS if lanes > 1 else 2):
            simulator.at(now + gap, lambda: again(lane))

    simulator, gap = Simulator(prices.cluster, done), prices.cluster.gap(len(prices.plan.devices))
    for lane in range(lanes):
        again(lane)
    simulator.run()
    begin, end = ends[0], ends[-1]
    shares = {"work": 0.0, "exchange": 0.0, "wait": 0.0}
    for span in simulator.spans or []:
        shares[span.what] += max(0.0, min(span.end, end) - max(span.begin, begin))
    whole = (end - begin) * len(prices.plan.devices)
    exchanging = shares["exchange"] / whole
    waiting = max(0.0, 1 - shares["work"] / whole - exchanging)
    return batch * (len(ends) - 1) / (end - begin), exchanging, waiting


def prefill_seconds(prices: Prices, tokens: int) -> float:
    """Time of a prompt, in chunks that are pipelined through the stages."""
    simulator = Simulator(prices.cluster, lambda job, now: None, record=False)
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        simulator.issue(prices.scripts([Workload(1, count, start, int(start + count == tokens))]))
    return simulator.run()


def _with_reason(c: Candidate, best: Candidate, goal: Goal) -> Candidate:
    if c.error:
        return replace(c, reason=c.error)
    if not c.fits:
        return replace(c, reason=_too_large(c, goal))
    parts = []
    if c is not best:
        parts.append(f"{best.score(goal) / c.score(goal):.2f}x slower than {best.devices}")
    if c.exchanging > 0.1:
        parts.append(f"links take {c.exchanging:.0%} of the time")
    if c.waiting > 0.1:
        parts.append(f"devices wait for each other {c.waiting:.0%} of the time")
    if c is not best and len(parts) == 1:
        parts.append("fewer devices read the weights" if len(c.memory or {}) < len(best.memory or {}) else
                     "every batch under way reads the weights again")
    return replace(c, reason=("best: " if c is best else "") + (", ".join(parts) or "nothing waits"))


def _too_large(c: Candidate, goal: Goal) -> str:
    """Message about the device that lacks memory, and what would fit."""
    name, worst = max((c.memory or {}).items(), key=lambda item: item[1].used / item[1].limit)
    text = (f"does not fit: device {name} needs {in_words(worst.used)} of {in_words(worst.limit)} (weights "
            f"{in_words(worst.weights)}, keys and values {in_words(worst.cache)}, scratch {in_words(worst.scratch)})")
    left = worst.limit - worst.weights - worst.scratch
    if left > 0 and worst.cache > 0:
        tokens = int(goal.batch * goal.context * left / worst.cache)
        return text + f"; {tokens} tokens of all queries together would"
    memory = (c.memory or {}).values()
    used, smallest = sum(m.used for m in memory), min(m.limit for m in memory)
    return text + f"; about {ceil(used / smallest)} devices like that would hold it, or weights of fewer bits"
