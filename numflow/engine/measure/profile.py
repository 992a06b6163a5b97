"""Profile: time of a run op by op, beside the least time that this machine would need."""

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
    """Least work of a step: bytes to read and write, operations in float32, in int8 and in pairs of bfloat16."""

    nbytes: float
    f32: float = 0.0
    int8: float = 0.0
    bf16: float = 0.0

    def __add__(self, other: "LeastWork") -> "LeastWork":
        return LeastWork(self.nbytes + other.nbytes, self.f32 + other.f32, self.int8 + other.int8,
                         self.bf16 + other.bf16)

    @property
    def operations(self) -> float:
        """Of every arithmetic."""
        return self.f32 + self.int8 + self.bf16

    def seconds(self, limits) -> float:
        """The least time: at the machine's rate of reads or of operations, whichever takes longer."""
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
    """Rows by op, most time first, of running `tokens` tokens after `context` others; medians of `repeat` runs.

    Each: op, steps, microseconds (with a barrier after each step), share of the run, megabytes that must move, gb_s,
    gop_s, and at_limit: the time they would take at the machine's measured limits as a part of their time. None of
    ops without products, whose numbers stay in a cache. Linears come apart by what they compute; a step that the
    kernels of another one do counts as a part of that one.

    Raises:
        RequestError: the model's context is too short.
    """
    program, network, within = model.program, model.network, done_by(model.program.groups())
    steps = network.entries["main"]
    names = [_name(steps[within.get(i, i)]) for i in range(len(steps))]
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
        if i not in within:
            name = names[i]
            costs[name] = costs.get(name, LeastWork(0)) + cost(step, network, program, Workload(1, tokens, context))
            counts[name] += 1
    medians = {name: float(np.median(values[1:])) for name, values in samples.items()}  # the first one warms up
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
    """10^9 a second."""
    return amount / microseconds / 1e3 if microseconds else 0.0


def cost(step: Step, network: Network, program, load: Workload) -> LeastWork:
    """The least that a step has to do."""
    numbers = sum(c.kv_heads * (c.k_dim + c.v_dim) for c in network.caches.values())
    element = (program.block_bytes + program.cross_block_bytes) / program.block_size / max(1, numbers)
    least = step_cost(network, step, load, element, lambda weight: program.weight_bytes(weight.name))
    return LeastWork(least.bytes, **{program.arithmetic(step): least.matrix})
