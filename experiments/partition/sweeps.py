"""How the strategies compare when one thing changes: queries, context, links, number of devices."""

from dataclasses import replace

from numflow.partition.cut import partition
from numflow.partition.hardware import Cluster, Link
from numflow.partition.planner import decode_rate
from numflow.partition.price import Prices


def sweeps(lab, network, cluster: Cluster, strategies: dict[str, str], colors: dict[str, str]) -> None:
    """Four figures' worth of decoding rates; each point is a simulation."""
    lab.heading("What decides")
    lab.text("Decoding rates of simulated plans, as numflow executes them, when one thing changes and the rest stays: "
             "8 queries of 512 tokens on the cluster above.")
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
    plt = lab.pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 7))
    for axis, (what, lines) in zip(axes.flat, points.items(), strict=True):
        for name, line in lines.items():
            axis.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name, color=colors[name])
        axis.set_xscale("log", base=2)
        ticks = sorted({point[0] for line in lines.values() for point in line})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel(what)
        axis.set_ylabel("tokens/s")
        axis.grid(alpha=0.3)
    axes.flat[0].set_yscale("log")
    axes.flat[0].legend()
    figure.tight_layout()
    lab.figure(figure, "sweeps", "Decoding rate of all queries together")
    plt.close(figure)


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
