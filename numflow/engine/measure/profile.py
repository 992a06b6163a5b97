"""Profile: time of a run by op, and the minimum time by the roofline of the machine."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from numflow.errors import RequestError
from numflow.executor.contract import PROFILE
from numflow.network.cost import PRODUCTS, Workload, step_cost
from numflow.network.passes.grouping import done_by
from numflow.ops import Network, Step


@dataclass(frozen=True)
class LeastWork:
    """Minimum work of a step: bytes to read and write; operations in float32, int8 and bfloat16 pairs."""

    nbytes: float
    f32: float = 0.0
    int8: float = 0.0
    bf16: float = 0.0

    def __add__(self, other: "LeastWork") -> "LeastWork":
        return LeastWork(self.nbytes + other.nbytes, self.f32 + other.f32, self.int8 + other.int8,
                         self.bf16 + other.bf16)

    @property
    def operations(self) -> float:
        """Number of operations in all arithmetics."""
        return self.f32 + self.int8 + self.bf16

    def seconds(self, limits) -> float:
        """Minimum time by the roofline: the longer of memory time and compute time."""
        computing = self.f32 / limits.f32_gop_s + self.int8 / limits.int8_gop_s + self.bf16 / limits.bf16_gop_s
        return max(self.nbytes / limits.read_gb_s, computing) / 1e9


def machine_limits(program):
    """Roofline (cpu/measure/roofline.py) of the machine with as many threads as the program has.

    Raises:
        RequestError: the backend has no profile.
    """
    if PROFILE not in program.can:
        raise RequestError("this backend has no profile: use the cpu")
    from numflow.cpu.measure.roofline import measure_limits

    return measure_limits(program.threads)


def profile(model, limits, tokens: int, context: int, repeat: int = 5) -> list[dict]:
    """Rows by op, longest time first, of a run of `tokens` tokens after `context` tokens; medians of `repeat` runs.

    Each row: op, steps, microseconds (with a barrier after each step), share of the run, megabytes that must move,
    gb_s,
    gop_s, and at_limit: minimum time by the measured roofline / measured time. at_limit is None for ops without matrix
    products, whose data stay in a cache. Linear steps are separated by module; a step that is fused into another step
    counts as part of that step.

    Raises:
        RequestError: the model's context is too short.
    """
    program, network, fused = model.program, model.network, done_by(model.program.groups())
    steps = network.entries["main"]
    names = [_name(steps[fused.get(i, i)]) for i in range(len(steps))]
    ids = model.facts.check(np.arange(context + tokens) % model.vocabulary)
    samples: dict[str, list[float]] = defaultdict(list)
    with model.runner.open(len(ids)) as sequence:
        if context:
            sequence.last(ids[:context])
        for _ in range(repeat + 1):
            run: dict[str, float] = defaultdict(float)
            for row in model.runner.trace(sequence, ids[context:]):
                run[names[row.index]] += row.microseconds
            for name, microseconds in run.items():
                samples[name].append(microseconds)
    costs: dict[str, LeastWork] = {}
    counts: dict[str, int] = defaultdict(int)
    for i, step in enumerate(steps):
        if i not in fused:
            name = names[i]
            costs[name] = costs.get(name, LeastWork(0)) + cost(step, network, program, Workload(1, tokens, context))
            counts[name] += 1
    medians = {name: float(np.median(values[1:])) for name, values in samples.items()}  # the first run is a warm-up
    return _table(medians, costs, counts, limits)


def _name(step: Step) -> str:
    return f"{step.op} {step.label.rsplit('.', 1)[-1]}" if step.op in PRODUCTS else step.op


def _table(medians: Mapping[str, float], costs: Mapping[str, LeastWork], counts: Mapping[str, int],
           limits) -> list[dict]:
    total = sum(medians.values())
    return [{
        "op": name, "steps": counts[name], "microseconds": us, "share": us / total if total else 0.0,
        "megabytes": costs[name].nbytes / 1e6, "gb_s": _rate(costs[name].nbytes, us),
        "gop_s": _rate(costs[name].operations, us),
        "at_limit": _rate(costs[name].seconds(limits), us) * 1e9 if costs[name].operations else None,
    } for name, us in sorted(medians.items(), key=lambda item: -item[1])]


def _rate(amount: float, microseconds: float) -> float:
    """Rate in 10^9 per second."""
    return amount / microseconds / 1e3 if microseconds else 0.0


def cost(step: Step, network: Network, program, load: Workload) -> LeastWork:
    """Minimum work of a step."""
    values = sum(c.kv_heads * (c.k_dim + c.v_dim) for c in network.caches.values())  # of a token
    element = (program.block_bytes + program.cross_block_bytes) / program.block_size / max(1, values)
    minimum = step_cost(network, step, load, element, lambda weight: program.weight_bytes(weight.name))
    return LeastWork(minimum.bytes, **{program.arithmetic(step): minimum.matrix})
