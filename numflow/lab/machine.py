"""This machine as a cluster of virtual devices: measured once, then kept."""

import json
import os
import time

import numpy as np

from numflow.engine.bench import host
from numflow.partition.hardware import Cluster, Device, Link
from numflow.registry.paths import home

_FORMAT = 1
_TOY = {"layers": 24, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 64, "vocabulary": 64, "context": 256}
_TOKENS = 48


def this_machine(devices: int, again: bool = False) -> Cluster:
    """The CPU as `devices` virtual devices "0", "1", ... and "cpu": threads shared out evenly.

    again: measure even if figures are kept.
    """
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
    return as_cluster(kept[key], devices)


def measure(devices: int) -> dict[str, float]:
    """Figures of one virtual device, of all together, and of exchanges between two.

    Returns:
        memory (bytes), bandwidth and host_bandwidth (bytes/s), operations (int8 or float32 per second, the latter
        where activations are float32), step (seconds), latency (seconds of an exchange), cores (virtual devices that
        run at full speed at once).
    """
    from numflow.cpu.cores import default_threads
    from numflow.cpu.limits import measure_limits

    cores = default_threads()
    threads = max(1, cores // devices)
    one, all_threads = measure_limits(threads), measure_limits(cores)
    step, latency = _toy_seconds(threads)
    return {"memory": _memory() / devices, "bandwidth": one.read_gb_s * 1e9,
            "host_bandwidth": all_threads.read_gb_s * 1e9, "operations": one.int8_gop_s * 1e9,
            "float_operations": one.f32_gop_s * 1e9, "step": step, "latency": latency, "cores": cores / threads}


def as_cluster(figures: dict[str, float], devices: int) -> Cluster:
    """Measured figures as a cluster."""
    device = Device("virtual", figures["memory"], figures["bandwidth"], figures["operations"], figures["step"])
    names = [*map(str, range(devices)), "cpu"]
    return Cluster(f"this machine as {devices} virtual device{'s' * (devices > 1)}", dict.fromkeys(names, device),
                   Link(figures["host_bandwidth"] / 2, figures["latency"]), {}, figures["cores"],
                   figures["host_bandwidth"])


def _toy_seconds(threads: int) -> tuple[float, float]:
    """Seconds of a step and of an exchange, from a model with hardly any work in them."""
    alone, steps = _run("0", threads)
    split, _ = _run("0&1", threads)
    exchanges = 2 * _TOY["layers"] + 2
    return alone / steps, max(1e-7, (split - alone) / exchanges)


def _run(devices: str, threads: int) -> tuple[float, int]:
    """(seconds of one token, steps) of the toy on virtual devices."""
    from numflow.cpu import program as executor
    from numflow.engine.model import Model
    from numflow.lab.shapes import find_shape, random_network
    from numflow.network import WeightSource
    from numflow.partition.cut import partition
    from numflow.partition.program import PlanProgram

    network, checkpoint = random_network(find_shape("1b", **_TOY), "F32", fuse=False)
    plan = partition(network, devices)
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
