"""By layer, by tensor, hybrid: decoding speed of one query, and throughput under load, on four devices.

Table 5 of Inferflow's technical report (arXiv 2401.08294) compares the three ways to split a model over four Tesla
V100. The table was not available here; the report's text says that hybrid partition decodes faster than a split by
layer and has a higher throughput than a split by tensor. This experiment simulates the same setting, with plans
executed as in Inferflow and as in numflow, for a plain decoder of the size `shape` in half precision. Then it runs
plans on virtual devices of this machine and compares the measured times with the simulator's predictions.
"""

# `virtual` names the plans on virtual devices that are measured: "all", "none", or some ("0&1,0&1;2&3"). Rows of the
# others stay as the folder's results.json has them.

from numflow.lab.shapes import find_shape, random_network
from numflow.partition.cut.cut import partition
from numflow.partition.price.hardware import read_cluster
from numflow.partition.price.planner import decode_rate
from numflow.partition.price.price import INFERFLOW, NUMFLOW, Prices
from numflow.partition.price.serving import Queries, SimulatedEngine, simulate

from . import show
from .sweeps import sweeps
from .virtual import virtual

OPTIONS = {"shape": "13b", "cluster": "v100x4-pcie", "prompt": 128, "new": 64, "at_once": 32, "queries": 64,
           "model": "smollm2-135m-instruct", "rounds": 9, "virtual": "all"}
STRATEGIES = {"by layer": "0;1;2;3", "by tensor": "0&1&2&3", "hybrid": "0&1;2&3"}
LAYER_S = 1e-3  # of the timeline, enlarged


def run(lab):
    options = lab.options
    layers = {"layers": 8} if lab.quick else {}
    if lab.quick:
        options |= {"new": 8, "at_once": 8, "queries": 8, "rounds": 2}
    network, _ = random_network(find_shape(options["shape"], **layers), "F16", fuse=False)
    cluster = read_cluster(options["cluster"])
    lab.text(__doc__.split("\n\n", 1)[1].replace("\n", " "))
    rows = _simulated(lab, network, cluster)
    lab.results |= {"cluster": cluster.title, "simulated": rows}
    _report(lab, rows, cluster)
    _timeline(lab, network, cluster)
    sweeps(lab, network, cluster, STRATEGIES)
    virtual(lab, STRATEGIES)


def redraw(lab):
    """Figures from results alone."""
    show.strategies(lab, lab.results["simulated"], list(STRATEGIES))
    show.timeline(lab, lab.results["timeline"], STRATEGIES)
    show.sweeps(lab, lab.results["sweeps"])
    show.virtual(lab, lab.results["virtual"])


def plans(network):
    """Plans of each strategy as either engine cuts: the original has the head whole, on the last device."""
    return {(style.name, name): partition(network, devices, head="split" if style is NUMFLOW else "placed",
                                          embedding="split" if style is NUMFLOW else "placed")
            for style in (INFERFLOW, NUMFLOW) for name, devices in STRATEGIES.items()}


def _simulated(lab, network, cluster) -> list[dict]:
    options, rows = lab.options, []
    styles = {style.name: style for style in (INFERFLOW, NUMFLOW)}
    for (style_name, name), plan in plans(network).items():
        lab.say(f"simulating {style_name}, {name}")
        style = styles[style_name]
        prices = Prices(plan, cluster, style)
        lanes = len(plan.groups) if style.overlaps else 1
        one = simulate(cluster, prices.scripts, Queries(2, options["prompt"], options["new"], 1))
        many = simulate(cluster, prices.scripts,
                        Queries(options["queries"], options["prompt"], options["new"], options["at_once"]),
                        SimulatedEngine(options["at_once"], lanes))
        memory = prices.memory(options["at_once"] * (options["prompt"] + options["new"]), options["prompt"])
        _, exchanging, waiting = decode_rate(prices, 1, options["prompt"], 1)
        rows.append({"engine": style_name, "strategy": name, "devices": STRATEGIES[name], "speed": one.speed,
                     "throughput": many.throughput, "first_token_s": one.first,
                     "latency_p50_s": many.latencies[len(many.latencies) // 2], "latency_max_s": many.latencies[-1],
                     "busy": sum(many.busy.values()) / len(many.busy), "exchanging": exchanging, "waiting": waiting,
                     "gigabytes": max(m.used for m in memory.values()) / 1e9})
    return rows


def _report(lab, rows, cluster) -> None:
    options = lab.options
    lab.heading(f"Simulated: {cluster.title}")
    lab.text(f"{options['shape']} in half precision; prompts of {options['prompt']} tokens, {options['new']} new ones. "
             f"Speed is for a single query; throughput is with {options['at_once']} queries at any time. Busy is the "
             "share of time in which the devices compute under that load; links and waiting are shares of one query's "
             "time.")
    lab.table(["engine", "strategy", "devices", "tok/s, one query", "tok/s, load", "first token s", "busy", "links",
               "waiting", "GB per device"],
              [[row["engine"], row["strategy"], f"`{row['devices']}`", row["speed"], row["throughput"],
                row["first_token_s"], f"{row['busy']:.0%}", f"{row['exchanging']:.0%}", f"{row['waiting']:.0%}",
                row["gigabytes"]] for row in rows])
    by = {(row["engine"], row["strategy"]): row for row in rows}
    for style in (INFERFLOW, NUMFLOW):
        speed = by[style.name, "hybrid"]["speed"] / by[style.name, "by layer"]["speed"]
        throughput = by[style.name, "hybrid"]["throughput"] / by[style.name, "by tensor"]["throughput"]
        lab.text(f"{style.name}: hybrid decodes one query {speed:.2f} times as fast as the split by layer (more than "
                 f"1, as the report says: {'yes' if speed > 1 else 'no'}), with {throughput:.2f} times the throughput "
                 f"of the split by tensor (more than 1: {'yes' if throughput > 1 else 'no'}).")
    show.strategies(lab, rows, list(STRATEGIES))


def _timeline(lab, network, cluster) -> None:
    """Some decoding steps of eight queries on every strategy: shares of each device's time, and spans of one layer."""
    found = {}
    for name, devices in STRATEGIES.items():
        plan = partition(network, devices)
        spans = simulate(cluster, Prices(plan, cluster).scripts, Queries(8, 1, 3, 8),
                         SimulatedEngine(8, len(plan.groups)), record=True).spans
        whole = max(span.end for span in spans)
        shares = {device: {what: sum(span.end - span.begin for span in spans
                                     if (span.device, span.what) == (device, what)) / whole
                           for what in ("work", "exchange")} for device in cluster.devices}
        for share in shares.values():
            share["wait"] = 1 - sum(share.values())
        begin = min(span.begin for span in spans if span.device == next(iter(shares)) and span.begin > whole / 2
                    and span.what == "work")
        window = [begin, begin + LAYER_S]
        found[name] = {"milliseconds": 1e3 * whole, "shares": shares, "window": [1e3 * at for at in window],
                       "spans": [[span.device, span.what, 1e3 * max(span.begin, begin), 1e3 * min(span.end, window[1])]
                                 for span in spans if span.begin < window[1] and span.end > begin]}
    lab.results["timeline"] = found
    show.timeline(lab, found, STRATEGIES)
