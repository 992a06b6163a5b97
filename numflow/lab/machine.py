"""This machine's CPU as a Cluster of virtual devices: measured once, then stored."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import fmean, median
from typing import Any

from numflow import places
from numflow.engine.measure.host import host
from numflow.engine.model import Model
from numflow.partition.price.hardware import Cluster, DeviceSpec, Link

_FORMAT = 3
_TOY = {"width": 64, "heads": 4, "kv_heads": 4, "ffn": 64, "vocabulary": 64, "context": 256}
_FEW, _MANY = 2, 24  # layers of the toy models: the difference gives the time of a layer
_TOKENS, _ROUNDS = 48, 5
_LEAST = {"step": 1e-9, "latency": 1e-7, "crowded": 1e-7, "start": 0.0, "start_each": 0.0}  # lower bounds


def this_machine(names: Sequence[str], again: bool = False) -> Cluster:
    """The CPU as virtual devices of these names, with an equal share of the threads each.

    again: measure even if measurements are stored.
    """
    devices = len(names)
    facts = host()
    key = f"{facts['cpu']}, {facts['cores']} cores, {devices} devices, format {_FORMAT}"
    return as_cluster(kept(key, lambda: measure(devices), again), devices, names)


def kept(key: str, make: Callable[[], dict[str, Any]], again: bool = False) -> dict[str, Any]:
    """The stored measurements of this key. If there are none, or if `again`, call `make` and store its result."""
    path = places.home() / "machine.json"
    found = _read(path)
    if again or key not in found:
        found[key] = make()
        places.make(path.parent)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found, indent=1), encoding="utf-8")
        os.replace(partial, path)
    return found[key]


def measure(devices: int) -> dict[str, float]:
    """Measure one virtual device, all of them together, and their exchanges.

    Returns:
        memory (bytes); bandwidth of one device and host_bandwidth of all (bytes/s); operations (int8 per second),
        float_operations (float32 per second); cores (number of virtual devices that run at full speed at the same
        time); step (overhead in seconds); latency (of an exchange between two devices), crowded (of an exchange among
        all); start (overhead of a batch in seconds), start_each (more of it per further device).
    """
    from numflow.cpu.measure.roofline import measure_limits
    from numflow.cpu.runtime.cores import default_threads

    cores = default_threads()
    threads = max(1, cores // devices)
    one, together = measure_limits(threads), measure_limits(cores)
    full = together.int8_gop_s / one.int8_gop_s
    return {"memory": _memory() / devices, "bandwidth": one.read_gb_s * 1e9,
            "host_bandwidth": together.read_gb_s * 1e9, "operations": one.int8_gop_s * 1e9,
            "float_operations": one.f32_gop_s * 1e9, "cores": min(full, cores / threads),
            **_together(devices, threads, cores / threads)}


def as_cluster(figures: dict[str, float], devices: int, names: Sequence[str] | None = None) -> Cluster:
    """The measurements as a Cluster. names: names of the devices; None: "0", "1", ..."""
    device = DeviceSpec("virtual", figures["memory"], figures["bandwidth"], figures["operations"], figures["step"])
    names = list(map(str, range(devices))) if names is None else names
    return Cluster(f"this machine as {devices} virtual device{'s' * (devices > 1)}", dict.fromkeys(names, device),
                   Link(figures["host_bandwidth"] / 2, figures["latency"]), {}, figures["cores"],
                   figures["host_bandwidth"], figures["crowded"], figures["start"], figures["start_each"])


def _together(devices: int, threads: int, cores: float) -> dict[str, float]:
    """Measure the overhead of a step, an exchange and a batch, with models with hardly any work.

    The models run in turn, so that other load of the machine affects all of them. Every value is the median over turns.
    """
    counts = sorted({1, 2, max(2, devices)})
    with ExitStack() as stack:
        toys = {(n, layers): stack.enter_context(_toy(n, layers, threads)) for n in counts for layers in (_FEW, _MANY)}
        steps = {layers: len(toys[1, layers].program.plan.part(0).entries["main"]) for layers in (_FEW, _MANY)}
        turns = [_turn({key: _token_seconds(toy) for key, toy in toys.items()}, counts, steps, cores)
                 for _ in range(_ROUNDS)]
    return {key: max(least, median(turn[key] for turn in turns)) for key, least in _LEAST.items()}


def _turn(seconds: dict[tuple[int, int], float], counts: list[int], steps: dict[int, int],
          cores: float) -> dict[str, float]:
    """The values of one turn. They are differences of measured times, so any of them may be negative.

    A layer on n devices takes the time of its steps, divided by the devices (at most by the cores), and of two
    exchanges. The time of a run without its layers is two more exchanges and the overhead of the batch.

    seconds: time per token of the toy with (devices, layers). steps: number of steps by number of layers.
    """
    layer = {n: (seconds[n, _MANY] - seconds[n, _FEW]) / (_MANY - _FEW) for n in counts}
    step = layer[1] * (_MANY - _FEW) / (steps[_MANY] - steps[_FEW])
    exchange = {n: max(_LEAST["latency"], (layer[n] - layer[1] / min(n, cores)) / 2) for n in counts[1:]}
    outside = {n: seconds[n, _FEW] - _FEW * layer[n] - 2 * exchange.get(n, 0.0) for n in counts}
    return {"step": step, "latency": exchange[2], "crowded": exchange[counts[-1]],
            "start": seconds[1, _FEW] - steps[_FEW] * step,
            "start_each": fmean((outside[n] - outside[1]) / (n - 1) for n in counts[1:])}


def _toy(devices: int, layers: int, threads: int) -> Model:
    """A model with hardly any work, split by tensor over a number of virtual devices."""
    from numflow.cpu import program as executor
    from numflow.lab.shapes import find_shape, random_network
    from numflow.network import WeightSource
    from numflow.partition.cut.cut import partition
    from numflow.partition.run.program import PlanProgram

    network, checkpoint = random_network(find_shape("1b", layers=layers, **_TOY), "F32", fuse=False)
    plan = partition(network, "&".join(map(str, range(devices))))
    program = PlanProgram(plan, executor, lambda part: WeightSource(part, checkpoint), threads=threads)
    return Model(network, program)


def _token_seconds(model: Model) -> float:
    """Median seconds per token."""
    times = []
    with model.runner.open(_TOKENS + 1) as sequence:
        for token in range(_TOKENS):
            begin = time.perf_counter()
            sequence.last([token])
            times.append(time.perf_counter() - begin)
    return median(times)


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30


def _read(path) -> dict:
    """The stored measurements; {} for a missing or invalid file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
