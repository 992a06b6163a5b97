"""This machine as a cluster of virtual devices: measured once, then kept."""

import json
import os
import time
from collections.abc import Sequence

import numpy as np

from numflow.engine.measure.bench import host
from numflow.partition.hardware import Cluster, Device, Link
from numflow.registry.paths import home

_FORMAT = 2
_TOY = {"width": 64, "heads": 4, "kv_heads": 4, "ffn": 64, "vocabulary": 64, "context": 256}
_FEW, _MANY = 2, 24  # layers of the toy: what a layer takes is the difference
_TOKENS = 48


def this_machine(names: Sequence[str], again: bool = False) -> Cluster:
    """The CPU as virtual devices of these names: threads shared out evenly.

    again: measure even if figures are kept.
    """
    devices = len(names)
    facts = host()
    key = f"{facts['cpu']}, {facts['cores']} cores, {devices} devices, format {_FORMAT}"
    path = home() / "machine.json"
    kept = _read(path)
    if again or key not in kept:
        kept[key] = measure(devices)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        os.replace(partial, path)
    return as_cluster(kept[key], devices, names)


def measure(devices: int) -> dict[str, float]:
    """Figures of one virtual device, of all together, and of what devices do together.

    Returns:
        memory (bytes); bandwidth, host_bandwidth (bytes/s); operations (int8 per second), float_operations (float32);
        cores (virtual devices that run at full speed at once); step (seconds); latency (of an exchange between two),
        crowded (of one among all); start (seconds of a batch beside its steps), start_each (more for each further
        device).
    """
    from numflow.cpu.cores import default_threads
    from numflow.cpu.limits import measure_limits

    cores = default_threads()
    threads = max(1, cores // devices)
    one, together = measure_limits(threads), measure_limits(cores)
    full = together.int8_gop_s / one.int8_gop_s
    return {"memory": _memory() / devices, "bandwidth": one.read_gb_s * 1e9,
            "host_bandwidth": together.read_gb_s * 1e9, "operations": one.int8_gop_s * 1e9,
            "float_operations": one.f32_gop_s * 1e9, "cores": min(full, cores / threads),
            **_together(devices, threads, cores / threads)}


def as_cluster(figures: dict[str, float], devices: int, names: Sequence[str] | None = None) -> Cluster:
    """Measured figures as a cluster; devices are "0", "1", ... if they have no other names."""
    device = Device("virtual", figures["memory"], figures["bandwidth"], figures["operations"], figures["step"])
    names = list(map(str, range(devices))) if names is None else names
    return Cluster(f"this machine as {devices} virtual device{'s' * (devices > 1)}", dict.fromkeys(names, device),
                   Link(figures["host_bandwidth"] / 2, figures["latency"]), {}, figures["cores"],
                   figures["host_bandwidth"], figures["crowded"], figures["start"], figures["start_each"])


def _together(devices: int, threads: int, cores: float) -> dict[str, float]:
    """What a step, an exchange and a batch take of themselves, from a model with hardly any work in it.

    A layer of n devices takes its steps, of which each does a part, as many at a time as there are cores, and two
    exchanges. What is left of a run without its layers is two more exchanges and what the batch takes.
    """
    counts = sorted({1, 2, max(2, devices)})
    few, many = ({n: _run(n, layers, threads) for n in counts} for layers in (_FEW, _MANY))
    layer = {n: (many[n][0] - few[n][0]) / (_MANY - _FEW) for n in counts}
    step = layer[1] * (_MANY - _FEW) / (many[1][1] - few[1][1])
    exchange = {n: max(1e-7, (layer[n] - layer[1] / min(n, cores)) / 2) for n in counts[1:]}
    start = max(0.0, few[1][0] - few[1][1] * step)
    left = {n: few[n][0] - _FEW * layer[n] - 2 * exchange[n] for n in counts[1:]}
    each = [(left[n] - (few[1][0] - _FEW * layer[1])) / (n - 1) for n in counts[1:]]
    return {"step": step, "latency": exchange[2], "crowded": exchange[counts[-1]], "start": start,
            "start_each": max(0.0, float(np.mean(each)))}


def _run(devices: int, layers: int, threads: int) -> tuple[float, int]:
    """(seconds of one token, steps) of the toy, each layer on that many virtual devices."""
    from numflow.cpu import program as executor
    from numflow.engine.model import Model
    from numflow.lab.shapes import find_shape, random_network
    from numflow.network import WeightSource
    from numflow.partition.cut import partition
    from numflow.partition.program import PlanProgram

    network, checkpoint = random_network(find_shape("1b", layers=layers, **_TOY), "F32", fuse=False)
    plan = partition(network, "&".join(map(str, range(devices))))
    program = PlanProgram(plan, executor, lambda part: WeightSource(part, checkpoint), threads=threads)
    with Model(network, program) as model, model.runner.open(_TOKENS + 1) as sequence:
        times = []
        for token in range(_TOKENS):
            begin = time.perf_counter()
            sequence.last([token])
            times.append(time.perf_counter() - begin)
    return float(np.median(times)), len(plan.part(0).entries["main"])


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30


def _read(path) -> dict:
    """The kept figures; a file that is broken is measured anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
