"""Plans on virtual devices of this machine: what the clock says beside what the simulator predicts.

All plans are open at the same time and take turns, with the measurements that predictions rest on between them: what
else the machine does meanwhile hits all of them alike.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from numflow import formats, network
from numflow.cpu import program as executor
from numflow.cpu.cores import default_threads
from numflow.cpu.estimate import weight_bytes
from numflow.engine.model import Model
from numflow.engine.sequence import Part
from numflow.engine.sequence import Sequence as Text
from numflow.errors import NumflowError
from numflow.lab.machine import as_cluster
from numflow.lab.machine import measure as measure_machine
from numflow.lab.shapes import find_shape, random_network
from numflow.network.cost import Load
from numflow.partition.cut import partition
from numflow.partition.events import Simulator
from numflow.partition.hardware import Cluster
from numflow.partition.plan import Plan
from numflow.partition.price import Prices, kind_of
from numflow.partition.program import PlanProgram
from numflow.registry import resolve

CONTEXT, TOKENS = 64, 16
QUERIES = (1, 8)  # that decode together
SINGLE = "0"
KV_BYTES = 2.0    # of keys and values beside int8 activations
HIDDEN = 0.05     # of its price: what takes less is done by the kernel of another step


def measure(lab, strategies: dict[str, str]) -> None:
    """Decoding of one query, and of eight together, on one, two and four virtual devices."""
    lab.heading("Real: virtual devices of this machine")
    name, built, checkpoint = _model(lab)
    devices = 2 if lab.quick else 4
    texts = {"single": SINGLE, "two by layer": "0;1", "two by tensor": "0&1"} | ({} if lab.quick else strategies)
    plans = {text: partition(built, text) for text in texts.values()}
    seconds, steps, cluster = _alternating(lab, plans, checkpoint, devices)
    factors = {queries: _factors(plans[SINGLE], cluster, queries, steps[queries]) for queries in QUERIES}
    # What a batch takes beside its steps, and hands out: on one device, where there is nothing else to predict.
    start = {queries: max(0.0, statistics.median(seconds[SINGLE, queries]) - sum(steps[queries].values()))
             for queries in QUERIES}
    rows = []
    for strategy, text in texts.items():
        for queries in QUERIES:
            times, prices = seconds[text, queries], Prices(plans[text], cluster, factors=factors[queries],
                                                           kv_bytes=KV_BYTES, weigh=weight_bytes)
            predicted = start[queries] + cluster.start_each * (len(prices.plan.devices) - 1) + \
                _simulated(prices, queries)
            median = statistics.median(times)
            rows.append({"strategy": strategy, "devices": text, "queries": queries, "measured": queries / median,
                         "least": queries / max(times), "most": queries / min(times), "predicted": queries / predicted,
                         "off": median / predicted - 1})
    lab.results |= {"model": name, "virtual": rows, "factors": factors, "start_s": start,
                    "figures": {key: value for key, value in vars(cluster).items() if isinstance(value, float)}}
    _report(lab, name, rows, cluster)


def _model(lab):
    """SmolLM2 if it is on this disk, else random weights of its shape."""
    if not lab.quick:
        try:
            path = resolve(lab.options["model"], progress=False)
            checkpoint = formats.open_checkpoint(path)
            return lab.options["model"], network.build(network.choose_spec(checkpoint), checkpoint,
                                                       fuse=False), checkpoint
        except NumflowError as error:
            lab.text(f"{error}; random weights of the same shape are run instead.")
    sizes = {"layers": 4, "vocabulary": 512} if lab.quick else {}
    return "random weights, 135m shape", *random_network(find_shape("135m", **sizes), "Q8_0", fuse=False)


def _alternating(lab, plans: Mapping[str, Plan], checkpoint, devices: int):
    """Rounds of everything that is measured.

    Returns:
        seconds of a decoding step by (devices, queries), one for each round; median seconds of each kind of step on one
        device, by number of queries; the machine's figures, each the median of the rounds.
    """
    seconds, steps = defaultdict(list), {queries: defaultdict(list) for queries in QUERIES}
    figures: list[dict[str, float]] = []
    threads = max(1, default_threads() // devices)
    with ExitStack() as stack:
        models = {text: stack.enter_context(_opened(plan, checkpoint, threads)) for text, plan in plans.items()}
        for number in range(lab.options["rounds"]):
            lab.say(f"virtual devices: round {number + 1} of {lab.options['rounds']}")
            if not (lab.quick and figures):
                figures.append(measure_machine(devices))
            for queries in QUERIES:
                for text, model in models.items():
                    with _decoding(model, queries) as texts:
                        seconds[text, queries].append(_step_seconds(model, texts))
                        if text == SINGLE:
                            for kind, took in _traced(model, texts).items():
                                steps[queries][kind].append(took)
    medians = {key: statistics.median(found[key] for found in figures) for key in figures[0]}
    return seconds, {queries: {kind: statistics.median(took) for kind, took in kinds.items()}
                     for queries, kinds in steps.items()}, as_cluster(medians, devices)


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


def _parts(texts: Sequence[Text], token: int) -> list[Part]:
    return [Part(text, np.array([token], np.int32), np.zeros(1, np.int32)) for text in texts]


def _step_seconds(model: Model, texts: Sequence[Text]) -> float:
    """Median seconds of a decoding step of all texts."""
    times = []
    for token in range(TOKENS):
        parts = _parts(texts, token)
        begin = time.perf_counter()
        model.runner.run(parts, "logits")
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _traced(model: Model, texts: Sequence[Text]) -> dict[str, float]:
    """Seconds of each kind of step (`kind_of`) in a decoding step of all texts: medians of some."""
    kinds = [kind_of(step) for step in model.program.plan.part(0).entries["main"]]
    found: dict[str, list[float]] = {}
    for token in range(TOKENS // 2):
        parts = _parts(texts, token)
        model.runner.run(parts, "logits")  # it also makes room for what the trace writes
        sums: dict[str, float] = defaultdict(float)
        for kind, row in zip(kinds, model.program.trace(model.runner._batch(parts)), strict=True):
            sums[kind] += row.microseconds * 1e-6
        for kind, took in sums.items():
            found.setdefault(kind, []).append(took)
    return {kind: statistics.median(took) for kind, took in found.items()}


def _factors(plan: Plan, cluster: Cluster, queries: int, steps: Mapping[str, float]) -> dict[str, float]:
    """By kind of step: measured time / price. Steps that other steps' kernels do have none."""
    prices = Prices(plan, cluster, kv_bytes=KV_BYTES, weigh=weight_bytes)
    load, priced = _load(queries), defaultdict(float)
    for step in plan.part(0).entries["main"]:
        priced[kind_of(step)] += max(prices.work(plan.devices[0], step, [load]))
    return {kind: took / priced[kind] for kind, took in steps.items() if took > HIDDEN * priced[kind]}


def _load(queries: int) -> Load:
    return Load(queries, 1, CONTEXT + TOKENS // 2)


def _opened(plan: Plan, checkpoint, threads: int) -> Model:
    program = PlanProgram(plan, executor, lambda own: network.WeightSource(own, checkpoint), threads=threads)
    return Model(plan.network, program)


def _simulated(prices: Prices, queries: int) -> float:
    """Seconds of a decoding step on the devices."""
    simulator = Simulator(prices.cluster, lambda job, now: None, record=False)
    simulator.issue(prices.scripts([_load(queries)]))
    return simulator.run()


def _report(lab, name: str, rows: list[dict], cluster) -> None:
    device = cluster.devices["0"]
    per_device = f"{device.bandwidth / 1e9:.1f} GB/s and {device.operations / 1e9:.0f} int8 GOP/s per device"
    lab.text(f"{name}, after {CONTEXT} tokens; each virtual device is threads of its own with memory of its own. "
             f"Measured on this machine: {per_device}, {cluster.host_bandwidth / 1e9:.1f} GB/s together, "
             f"{cluster.cores:.2g} devices at full speed together; {device.step * 1e6:.1f} µs per step, "
             f"{cluster.link.latency * 1e6:.1f} µs per exchange of two devices and {cluster.crowded * 1e6:.1f} µs of "
             f"all; {cluster.start_each * 1e6:.0f} µs of a batch for each further device. What each kind of step takes,"
             " and a batch beside its steps, is measured on one device, for each number of queries; so the rows of one "
             "device show no more than that the parts add up. All else is predicted: plans, exchanges, waiting, and "
             "devices that share cores and memory. On more devices than cores nothing can be gained: what is tested "
             "is the execution and the prediction. All plans and measurements took turns, in "
             f"{lab.options['rounds']} rounds; the table has medians, least and most of the rounds.")
    lab.table(["strategy", "devices", "queries", "tok/s", "least", "most", "predicted", "off"],
              [[row["strategy"], f"`{row['devices']}`", row["queries"], row["measured"], row["least"], row["most"],
                row["predicted"], f"{row['off']:+.0%}"] for row in rows])
    worst = max(rows, key=lambda row: abs(row["off"]))
    lab.text(f"The worst prediction is {worst['off']:+.0%} off ({worst['strategy']}, {worst['queries']} queries).")
    plt = lab.pyplot()
    figure, axes = plt.subplots(1, len(QUERIES), figsize=(10, 3.8))
    for axis, queries in zip(axes, QUERIES, strict=True):
        chosen = [row for row in rows if row["queries"] == queries]
        at = np.arange(len(chosen))
        measured = np.array([row["measured"] for row in chosen])
        spread = [measured - [row["least"] for row in chosen], [row["most"] for row in chosen] - measured]
        axis.bar(at - 0.2, measured, 0.4, yerr=spread, capsize=2, color="tab:blue", label="measured")
        axis.bar(at + 0.2, [row["predicted"] for row in chosen], 0.4, color="tab:orange", label="predicted")
        for x, row in zip(at, chosen, strict=True):
            axis.annotate(f"{row['off']:+.0%}", (x + 0.2, row["predicted"]), fontsize=7, ha="center", xytext=(0, 2),
                          textcoords="offset points")
        axis.set_xticks(at, [f"{row['strategy']}\n{row['devices']}" for row in chosen], fontsize=7)
        axis.set_title("one query" if queries == 1 else f"{queries} queries")
        axis.set_ylabel("tokens/s")
        axis.margins(y=0.25)
    axes[0].legend(loc="upper right", ncol=2, fontsize=8)
    figure.tight_layout()
    lab.figure(figure, "virtual", "Virtual devices of this machine: predicted and measured")
    plt.close(figure)
