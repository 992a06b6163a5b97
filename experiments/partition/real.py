"""Plans on virtual devices of this machine: what the clock says beside what the simulator predicts."""

import statistics
import time

import numpy as np

from numflow import formats, network
from numflow.cpu import program as executor
from numflow.cpu.cores import default_threads
from numflow.engine.model import Model
from numflow.engine.sequence import Part
from numflow.errors import NumflowError
from numflow.lab.machine import this_machine
from numflow.lab.shapes import find_shape, random_network
from numflow.network.cost import Load
from numflow.partition.cut import partition
from numflow.partition.events import Simulator
from numflow.partition.price import Prices
from numflow.partition.program import PlanProgram
from numflow.registry import resolve

CONTEXT, TOKENS = 64, 24
QUERIES = (1, 8)  # that decode together


def measure(lab, strategies: dict[str, str]) -> None:
    """Decoding of one query, and of eight together, on one, two and four virtual devices."""
    lab.heading("Real: virtual devices of this machine")
    name, built, checkpoint = _model(lab)
    devices = 2 if lab.quick else 4
    texts = {"single": "0", "two by layer": "0;1", "two by tensor": "0&1"} | ({} if lab.quick else strategies)
    cluster = this_machine(devices, again=not lab.quick)
    factors = {queries: _factors(lab, built, checkpoint, cluster, queries) for queries in QUERIES}
    rows = []
    for strategy, text in texts.items():
        plan = partition(built, text)
        lab.say(f"{name} on {text}")
        measured = _measured(plan, checkpoint, lab.options["rounds"], max(1, default_threads() // devices))
        for queries, (median, least, most) in measured.items():
            predicted = _predicted(Prices(plan, cluster, factors=factors[queries], kv_bytes=4), queries)
            rows.append({"strategy": strategy, "devices": text, "queries": queries, "measured": queries / median,
                         "least": queries / most, "most": queries / least, "predicted": queries / predicted,
                         "off": median / predicted - 1})
    lab.results |= {"model": name, "virtual": rows, "factors": factors}
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


def _factors(lab, built, checkpoint, cluster, rows: int) -> dict[str, float]:
    """By op: measured time / price, on one virtual device that runs so many rows."""
    plan = partition(built, "0")
    prices = Prices(plan, cluster, kv_bytes=4)
    times: dict[str, list[float]] = {}
    with _opened(plan, checkpoint, threads=1) as model, model.runner.open(CONTEXT + 64 * rows) as sequence:
        sequence.last(np.arange(CONTEXT) % model.vocabulary)
        for _ in range(1 + lab.options["rounds"]):
            run: dict[str, float] = {}
            for row in model.runner.trace(sequence, np.ones(rows, np.int32)):
                run[row.op] = run.get(row.op, 0.0) + row.microseconds * 1e-6
            for op, seconds in run.items():
                times.setdefault(op, []).append(seconds)
    part, load = plan.devices[0], Load(1, rows, CONTEXT)
    priced: dict[str, float] = {}
    for step in part.network.entries["main"]:
        priced[step.op] = priced.get(step.op, 0.0) + sum(prices.work(part, step, [load]))
    return {op: statistics.median(values[1:]) / priced[op] for op, values in times.items()}


def _measured(plan, checkpoint, rounds: int, threads: int) -> dict[int, tuple[float, float, float]]:
    """By number of queries: seconds of a decoding step, (median, least, most) over the rounds' medians."""
    found = {}
    with _opened(plan, checkpoint, threads) as model:
        for queries in QUERIES:
            medians = []
            for _ in range(rounds):
                sequences = [model.runner.open(CONTEXT + TOKENS) for _ in range(queries)]
                for number, sequence in enumerate(sequences):
                    sequence.last((np.arange(CONTEXT) + number) % model.vocabulary)
                times = []
                for token in range(TOKENS):
                    parts = [Part(s, np.array([token], np.int32), np.zeros(1, np.int32)) for s in sequences]
                    begin = time.perf_counter()
                    model.runner.run(parts, "logits")
                    times.append(time.perf_counter() - begin)
                for sequence in sequences:
                    sequence.close()
                medians.append(statistics.median(times))
            found[queries] = statistics.median(medians), min(medians), max(medians)
    return found


def _opened(plan, checkpoint, threads: int) -> Model:
    program = PlanProgram(plan, executor, lambda own: network.WeightSource(own, checkpoint), threads=threads)
    return Model(plan.network, program)


def _predicted(prices: Prices, queries: int) -> float:
    """Seconds of a decoding step."""
    simulator = Simulator(prices.cluster, lambda job, now: None, record=False)
    simulator.issue(prices.scripts([Load(queries, 1, CONTEXT + TOKENS // 2)]))
    return simulator.run()


def _report(lab, name: str, rows: list[dict], cluster) -> None:
    device = cluster.devices["0"]
    per_device = f"{device.bandwidth / 1e9:.1f} GB/s and {device.operations / 1e9:.0f} int8 GOP/s per device"
    lab.text(f"{name}, after {CONTEXT} tokens; each virtual device is threads of its own with memory of its own. "
             f"Measured on this machine: {per_device}, {cluster.host_bandwidth / 1e9:.1f} GB/s together, "
             f"{device.step * 1e6:.1f} µs per step, {cluster.link.latency * 1e6:.1f} µs per exchange, "
             f"{cluster.cores:g} devices at full speed together. "
             "The simulator's price of each op is scaled by what that op takes on one device; the rest is its own. On "
             "more devices than cores nothing can be gained: what is tested is the execution and the prediction.")
    lab.table(["strategy", "devices", "queries", "tok/s", "least", "most", "predicted", "off"],
              [[row["strategy"], f"`{row['devices']}`", row["queries"], row["measured"], row["least"], row["most"],
                row["predicted"], f"{row['off']:+.0%}"] for row in rows])
    worst = max(rows, key=lambda row: abs(row["off"]))
    lab.text(f"The worst prediction is {worst['off']:+.0%} off ({worst['strategy']}, {worst['queries']} queries).")
    plt = lab.pyplot()
    figure, axis = plt.subplots(figsize=(5, 4.6))
    for queries, marker in ((1, "o"), (8, "s")):
        chosen = [row for row in rows if row["queries"] == queries]
        measured = [row["measured"] for row in chosen]
        spread = [[row["measured"] - row["least"] for row in chosen], [row["most"] - row["measured"] for row in chosen]]
        axis.errorbar([row["predicted"] for row in chosen], measured, spread, fmt=marker, capsize=2,
                      label=f"{queries} quer{'y' if queries == 1 else 'ies'}")
        for row in chosen:
            axis.annotate(row["devices"], (row["predicted"], row["measured"]), fontsize=7, xytext=(4, -8),
                          textcoords="offset points")
    ends = [min(row["predicted"] for row in rows) * 0.8, max(row["predicted"] for row in rows) * 1.2]
    axis.plot(ends, ends, color="0.6", linewidth=1)
    axis.fill_between(ends, [end / 1.15 for end in ends], [end * 1.15 for end in ends], color="0.9", label="±15 %")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("predicted tokens/s")
    axis.set_ylabel("measured tokens/s")
    axis.legend()
    lab.figure(figure, "virtual", "Virtual devices of this machine: predicted and measured")
    plt.close(figure)
