"""Comparison of the strategies when one quantity changes: queries, context, links, number of devices."""

import itertools
from dataclasses import replace

from numflow.partition.cut.cut import partition
from numflow.partition.price.hardware import Cluster, Link
from numflow.partition.price.planner import decode_rate
from numflow.partition.price.price import Prices

from . import show


def sweeps(lab, network, cluster: Cluster, strategies: dict[str, str]) -> None:
    """Four figures' worth of decoding rates; each point is a simulation."""
    lab.heading("The effect of load and hardware")
    lab.text("Decoding rates of simulated plans, executed as in numflow. One quantity changes; the others stay at 8 "
             "queries of 512 tokens on the cluster above. Prompts are not counted here, but they are counted under "
             "load in the table above.")
    cut = {name: partition(network, devices) for name, devices in strategies.items()}
    batches, contexts = ([1, 8], [128, 2048]) if lab.quick else ([1, 2, 4, 8, 16, 32, 64, 128], [128, 512, 2048, 8192])
    speeds = [1, 10, 100] if lab.quick else [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 400]
    points = {
        "queries at the same time": {name: [(n, _rate(plan, cluster, n, 512)) for n in batches]
                                     for name, plan in cut.items()},
        "tokens of context": {name: [(n, _rate(plan, cluster, 8, n)) for n in contexts] for name, plan in cut.items()},
        "link bandwidth, GB/s": {name: [(s, _rate(plan, _linked(cluster, s), 8, 512)) for s in speeds]
                                 for name, plan in cut.items()},
        "devices": _devices(network, cluster, 8, 512, [1, 2, 4] if lab.quick else [1, 2, 4, 8]),
    }
    lab.results["sweeps"] = points
    leaders(lab, points)
    show.sweeps(lab, points)


def leaders(lab, points: dict[str, dict[str, list]]) -> None:
    """The range in which each strategy, and hybrid in particular, is the fastest."""
    for what, lines in points.items():
        at = sorted({x for line in lines.values() for x, _ in line})
        best = {x: best_of(lines, x) for x in at}
        runs = [(name, list(group)) for name, group in itertools.groupby(at, key=best.get)]
        told = [f"{name} at {own[0]:g}" + (f" to {own[-1]:g}" if len(own) > 1 else "") for name, own in runs]
        lab.text(f"Fastest by {what}: {', '.join(told)}.")
    queries = points["queries at the same time"]
    wins = [x for (x, rate) in queries["hybrid"] if all(rate > dict(queries[other])[x] for other in queries
                                                       if other != "hybrid")]
    lab.claim(f"For decoding alone, hybrid is the fastest from {wins[0] if wins else 0} queries on, and the split by "
              "tensor below: exchanges of few rows cost little, exchanges of many rows are limited by the links.",
              bool(wins) and wins == [x for x, _ in queries["hybrid"] if x >= wins[0]]
              and all(best_of(queries, x) == "by tensor" for x, _ in queries["hybrid"] if x < wins[0]),
              f"For decoding alone, hybrid is the fastest of the three at {', '.join(map(str, wins)) or 'no'} "
              "queries.")


def best_of(lines: dict[str, list], x: float) -> str:
    """The strategy with the highest rate at a point."""
    return max(lines, key=lambda name: dict(lines[name]).get(x, 0.0))


def _rate(plan, cluster: Cluster, batch: int, context: int) -> float:
    """The better of one batch and of as many under way as there are groups."""
    prices = Prices(plan, cluster)
    return max(decode_rate(prices, batch, context, lanes)[0] for lanes in {1, min(batch, len(plan.groups))})


def _linked(cluster: Cluster, speed: float) -> Cluster:
    """All links of another bandwidth in GB/s."""
    return replace(cluster, link=Link(speed * 1e9, cluster.link.latency), links={})


def _devices(network, cluster: Cluster, batch: int, context: int, counts: list[int]) -> dict[str, list]:
    device = next(iter(cluster.devices.values()))
    found: dict[str, list] = {"by layer": [], "by tensor": [], "hybrid": []}
    for count in counts:
        wide = replace(cluster, devices={str(i): device for i in range(count)}, links={})
        names = [str(i) for i in range(count)]
        texts = {"by layer": ";".join(names), "by tensor": "&".join(names),
                 "hybrid": ";".join("&".join(names[i:i + 2]) for i in range(0, count, 2))}
        for name, text in texts.items():
            if name != "hybrid" or count > 2:
                found[name].append((count, _rate(partition(network, text), wide, batch, context)))
    return found
