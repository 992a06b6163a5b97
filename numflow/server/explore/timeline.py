"""Predicted activity of a cluster's devices while a batch runs, by the planner's cost model."""

from functools import lru_cache
from typing import Any

from numflow import formats, network, registry
from numflow.cpu import estimate as cpu
from numflow.cuda import estimate as cuda
from numflow.errors import DeviceError, NetworkError, RequestError
from numflow.network.cost import Workload, f32_bytes
from numflow.ops import Network
from numflow.partition.cut.cut import partition
from numflow.partition.cut.devices import executors_of, parse_devices
from numflow.partition.price.events import Simulator
from numflow.partition.price.hardware import Cluster, known_clusters, read_cluster
from numflow.partition.price.planner import strategies
from numflow.partition.price.price import Holding, Prices

DEVICES, BATCH, TOKENS, CONTEXT, INTERVALS = 8, 256, 4096, 131072, 4000  # largest values
BACKENDS = {"cpu": Holding(cpu.weight_bytes, lambda c: cpu.cache_bytes(c, "f16", "f16"), f32_bytes),
            "cuda": Holding(cuda.weight_bytes, lambda c: cuda.cache_bytes(c, "f16", "f16"))}


def choices() -> list[dict[str, Any]]:
    """Clusters that come with numflow, with suggested device strings."""
    found = []
    for name, title in known_clusters().items():
        cluster = read_cluster(name)
        found.append({"name": name, "title": title, "devices": list(cluster.devices),
                      "ways": strategies(cluster, list(cluster.devices)[:DEVICES])})
    return found


def timeline(path: str, spec: str | None, cluster: str, devices: str, batch: int, tokens: int,
             context: int) -> dict[str, Any]:
    """Simulate two batches in sequence: busy intervals of each device in seconds, shares, and tokens per second.

    batch: number of sequences. tokens: new tokens of each, 1 or a chunk of a prompt. context: tokens before them.

    Raises:
        RequestError: a number out of range, an unknown cluster or device, or devices that cannot share the model.
    """
    for name, value, most in (("batch", batch, BATCH), ("tokens", tokens, TOKENS), ("context", context, CONTEXT)):
        if not (name != "context") <= value <= most:
            raise RequestError(f"{name} should be {int(name != 'context')} .. {most}, is {value}")
    found, built = _cluster(cluster), _network(path, spec)
    try:
        placement = parse_devices(devices[:1000])
        names = [device.name for device in placement]
        unknown = [name for name in names if name not in found.devices]
        if unknown or len(names) > DEVICES:
            raise RequestError(f"devices should be at most {DEVICES} of {', '.join(found.devices)}, has "
                               f"{unknown[0] if unknown else len(names)}")
        backend = "cpu" if names == ["cpu"] else "cuda"
        plan = partition(built, placement, executors_of(placement, backend))
    except (DeviceError, NetworkError) as error:
        raise RequestError(f"devices: {error}") from None
    chosen = BACKENDS[backend]
    prices = Prices(plan, found, kv_bytes=2.0, weigh=chosen.weigh, hold=chosen.hold, holdings=BACKENDS)
    simulator = Simulator(found, lambda job, now: None)
    scripts = prices.scripts([Workload(batch, tokens, context)])
    for _ in range(2):
        simulator.issue(scripts)
    end = simulator.run()
    spans = simulator.spans or []
    busy = {what: sum(one.end - one.begin for one in spans if one.what == what) for what in ("work", "exchange")}
    memory = prices.memory(batch * (context + tokens), batch * tokens, batch)
    return {"model": built.name, "cluster": found.title, "devices": names, "seconds": end,
            "tokens_per_second": 2 * batch * tokens / end if end else 0.0,
            "shares": {what: seconds / (end * len(names)) if end else 0.0 for what, seconds in busy.items()},
            "memory": {name: {"used": one.used, "limit": one.limit} for name, one in memory.items()},
            "intervals": [list(one) for one in spans[:INTERVALS]], "intervals_in_all": len(spans)}


def _cluster(name: str) -> Cluster:
    if name not in known_clusters():  # never a path on this machine
        raise RequestError(f"cluster should be one of {', '.join(known_clusters())}, is {name!r:.100}")
    return read_cluster(name)


@lru_cache(maxsize=4)
def _network(path: str, spec: str | None) -> Network:
    """The model's network, without fused matrix products."""
    checkpoint = formats.open_checkpoint(registry.resolve(path, offline=True, progress=False))
    return network.build(network.choose_spec(checkpoint, spec), checkpoint, fuse=False)
