"""Plans on virtual devices of this machine: measured times beside the simulator's predictions.

All plans are open at the same time and take turns, together with the measurements that predictions use, so other load
on the machine affects all of them alike. Each turn is predicted from the measurements of that turn, because the memory
bandwidth of a virtual machine may change by half within a minute.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from numflow import formats, network
from numflow.cpu import program as executor
from numflow.cpu.estimate import weight_bytes
from numflow.cpu.runtime.cores import default_threads
from numflow.engine.model import Model
from numflow.engine.runner.batches import BatchPart
from numflow.engine.runner.runner import OpenSequence as Text
from numflow.errors import NumflowError
from numflow.lab.machine import as_cluster
from numflow.lab.machine import measure as measure_machine
from numflow.lab.shapes import find_shape, random_network
from numflow.network.cost import Workload
from numflow.partition.cut.cut import partition
from numflow.partition.cut.plan import Plan
from numflow.partition.price.events import Simulator
from numflow.partition.price.hardware import Cluster
from numflow.partition.price.price import Prices, kind_of
from numflow.partition.run.program import PlanProgram
from numflow.registry import resolve

CONTEXT, TOKENS = 64, 16
QUERIES = (1, 8)  # that decode together
SINGLE = "0"
KV_BYTES = 2.0    # of keys and values beside int8 activations
HIDDEN = 0.05     # of its price: what takes less is done by the kernel of another step


@dataclass(frozen=True)
class Round:
    """What was measured in one turn.

    figures: of the machine (lab.machine.measure). seconds: of a decoding step, by (devices, queries).
    steps:   seconds of each kind of step on one device, by number of queries.
    """

    figures: Mapping[str, float]
    seconds: Mapping[tuple[str, int], float]
    steps: Mapping[int, Mapping[str, float]]


def measure(lab, strategies: Mapping[str, str]) -> dict:
    """Decoding of one query, and of eight together, on virtual devices.

    strategies: name -> devices of the plans that are wanted.

    Returns:
        "model", "rows" (a dict for each plan and number of queries, rates in tokens/s), "figures" of the machine.
    """
    name, built, checkpoint = _model(lab)
    plans = {text: partition(built, text) for text in {SINGLE: "", **dict.fromkeys(strategies.values())}}
    devices = max(len(plan.devices) for plan in plans.values())
    rounds = _alternating(lab, plans, checkpoint, max(2, devices))
    predicted = [predictions(plans, one) for one in rounds]
    rows = []
    for strategy, text in strategies.items():
        for queries in QUERIES:
            clock = [queries / one.seconds[text, queries] for one in rounds]
            model = [queries / one[text, queries] for one in predicted]
            off = [b / a - 1 for a, b in zip(clock, model, strict=True)]
            rows.append({"strategy": strategy, "devices": text, "queries": queries, "measured": median(clock),
                         "least": min(clock), "most": max(clock), "predicted": median(model),
                         "predicted_least": min(model), "predicted_most": max(model), "off": median(off),
                         "off_least": min(off), "off_most": max(off)})
    return {"model": name, "rows": rows, "rounds": len(rounds), "figures": {
        key: median(one.figures[key] for one in rounds) for key in rounds[0].figures}}


def predictions(plans: Mapping[str, Plan], measured: Round) -> dict[tuple[str, int], float]:
    """Seconds of a decoding step by (devices, queries).

    What each kind of step takes, and a batch beside its steps, comes from one device: all else is predicted.
    """
    devices, found = max(2, *(len(plan.devices) for plan in plans.values())), {}
    cluster = as_cluster(measured.figures, devices)
    for queries in QUERIES:
        steps = measured.steps[queries]
        beside = max(0.0, measured.seconds[SINGLE, queries] - sum(steps.values()))
        factors = _factors(plans[SINGLE], cluster, queries, steps)
        for text, plan in plans.items():
            prices = Prices(plan, cluster, factors=factors, kv_bytes=KV_BYTES, weigh=weight_bytes)
            found[text, queries] = beside + cluster.start_each * (len(plan.devices) - 1) + _simulated(prices, queries)
    return found


def _model(lab):
    """The option `model` if it is on this disk, else random weights of its shape."""
    if not lab.quick:
        try:
            path = resolve(lab.options["model"], progress=False)
            checkpoint = formats.open_checkpoint(path)
            built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
            return Path(lab.options["model"]).name, built, checkpoint
        except NumflowError as error:
            lab.text(f"{error}; the experiment runs random weights of the same shape instead.")
    sizes = {"layers": 4, "vocabulary": 512} if lab.quick else {}
    return "random weights, 135m shape", *random_network(find_shape("135m", **sizes), "Q8_0", fuse=False)


def _alternating(lab, plans: Mapping[str, Plan], checkpoint, devices: int) -> list[Round]:
    """Rounds of all measurements."""
    rounds: list[Round] = []
    threads = max(1, default_threads() // devices)
    with ExitStack() as stack:
        models = {text: stack.enter_context(_opened(plan, checkpoint, threads)) for text, plan in plans.items()}
        for number in range(lab.options["rounds"]):
            lab.say(f"virtual devices: round {number + 1} of {lab.options['rounds']}")
            figures = rounds[0].figures if lab.quick and rounds else measure_machine(devices)
            seconds, steps = {}, {}
            for queries in QUERIES:
                for text, model in models.items():
                    with _decoding(model, queries) as texts:
                        seconds[text, queries] = _step_seconds(model, texts)
                        if text == SINGLE:
                            steps[queries] = _traced(model, texts)
            rounds.append(Round(figures, seconds, steps))
    return rounds


@contextmanager
def _decoding(model: Model, queries: int) -> Iterator[list[Text]]:
    """Texts of CONTEXT tokens each."""
    texts = [model.runner.open(CONTEXT + 2 * TOKENS) for _ in range(queries)]
    try:
        for number, text in enumerate(texts):
            text.last((np.arange(CONTEXT) + number) % model.vocabulary)
        yield texts
    finally:
        for text in texts:
            text.close()


def _parts(texts: Sequence[Text], token: int) -> list[BatchPart]:
    return [BatchPart(text, np.array([token], np.int32), np.zeros(1, np.int32)) for text in texts]


def _step_seconds(model: Model, texts: Sequence[Text]) -> float:
    """Median seconds of a decoding step of all texts."""
    times = []
    for token in range(TOKENS):
        parts = _parts(texts, token)
        begin = time.perf_counter()
        model.runner.run(parts, "logits")
        times.append(time.perf_counter() - begin)
    return median(times)


def _traced(model: Model, texts: Sequence[Text]) -> dict[str, float]:
    """Seconds of each kind of step (`kind_of`) in a decoding step of all texts: medians of some."""
    kinds = [kind_of(step) for step in model.program.plan.part(0).entries["main"]]
    found: dict[str, list[float]] = {}
    for token in range(TOKENS // 2):
        parts = _parts(texts, token)
        model.runner.run(parts, "logits")  # it also makes room for what the trace writes
        sums: dict[str, float] = defaultdict(float)
        for kind, row in zip(kinds, model.program.trace(model.runner.batches.of(parts)), strict=True):
            sums[kind] += row.microseconds * 1e-6
        for kind, took in sums.items():
            found.setdefault(kind, []).append(took)
    return {kind: median(took) for kind, took in found.items()}


def _factors(plan: Plan, cluster: Cluster, queries: int, steps: Mapping[str, float]) -> dict[str, float]:
    """Measured time / estimated time, by kind of step. Steps that other steps' kernels do have none."""
    prices = Prices(plan, cluster, kv_bytes=KV_BYTES, weigh=weight_bytes)
    load, priced = _load(queries), defaultdict(float)
    for step in plan.part(0).entries["main"]:
        priced[kind_of(step)] += max(prices.work(plan.devices[0], step, [load]))
    return {kind: took / priced[kind] for kind, took in steps.items() if took > HIDDEN * priced[kind]}


def _load(queries: int) -> Workload:
    return Workload(queries, 1, CONTEXT + TOKENS // 2)


def _opened(plan: Plan, checkpoint, threads: int) -> Model:
    program = PlanProgram(plan, executor, lambda own: network.WeightSource(own, checkpoint), threads=threads)
    return Model(plan.network, program)


def _simulated(prices: Prices, queries: int) -> float:
    """Seconds of a decoding step on the devices."""
    simulator = Simulator(prices.cluster, lambda job, now: None, record=False)
    simulator.issue(prices.scripts([_load(queries)]))
    return simulator.run()
