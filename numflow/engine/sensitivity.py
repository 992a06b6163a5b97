"""A recipe that meets a size: schemes by how much each part of a model suffers (`numflow quantize --target-bpw`).

Matrices are grouped by what they are and by where in the depth of the model they stand. Each group in turn is quantised
to PROBE, and the divergence of the model's predictions from what they were is measured on a sample of the calibration
text. Divergence grows with the square of the weights' error, which is known for each scheme; so what every scheme would
do to a group follows from the one measurement. From the smallest scheme everywhere, the group and scheme that save most
divergence per byte are taken until nothing more fits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from numflow import formats, network
from numflow.engine.divergence import mean_divergence
from numflow.engine.model import Model
from numflow.errors import RequestError
from numflow.network.calibration import Calibration
from numflow.network.quantise import plan_of, quantised
from numflow.quant import find
from numflow.quant.recipe import Recipe

PROBE = "q3"
DEPTHS = 4
# Relative rms error of each scheme on normal weights, smallest scheme first.
ERRORS = {"q2": 0.2643, "q3": 0.1292, "q3h": 0.1096, "q4": 0.0693, "q5": 0.0339, "q6": 0.0171, "q8": 0.0044}


@dataclass(frozen=True)
class Group:
    """Matrices that get one scheme. modules: their names in the network. sizes: bytes by scheme."""

    tensors: tuple[str, ...]
    modules: tuple[str, ...]
    weights: int
    sizes: Mapping[str, int]


def automatic_recipe(path: Path, bits: float, calibration: Calibration, spec: str | Path | None = None,
                     progress: Callable[[int, int], None] = lambda done, total: None) -> Recipe:
    """The recipe whose matrices take at most `bits` bits per weight, with the least divergence foreseen.

    Raises:
        RequestError: a size that no scheme reaches, or a calibration without a sample of its text.
    """
    samples = [np.asarray(ids, np.int32) for ids in calibration.facts.get("sample", ())]
    if not samples:
        raise RequestError("the calibration holds no sample of its text: make it anew with `numflow imatrix`")
    checkpoint = formats.open_checkpoint(path)
    chosen = network.choose_spec(checkpoint, spec)
    found = groups(network.build(chosen, checkpoint, fuse=False), checkpoint)
    costs = sensitivities(chosen, checkpoint, found, calibration, samples, progress)
    schemes = allocate(found, costs, bits)
    rules = tuple((module, scheme) for group, scheme in zip(found, schemes) for module in group.modules)
    return Recipe(f"auto-{bits:g}", PROBE, rules)


def groups(built, checkpoint) -> list[Group]:
    """The matrices of a network (built with fuse=False) that can be quantised, by kind and depth."""
    plan = plan_of(built, checkpoint, Recipe("probe", PROBE))
    table: dict[tuple[str, int], list[str]] = {}
    layers = [layer for name in plan.schemes if (layer := _place(plan.modules[name][0])[1]) >= 0]
    for name in plan.schemes:
        kind, layer = _place(plan.modules[name][0])
        depth = -1 if layer < 0 else layer * DEPTHS // (max(layers) + 1)
        table.setdefault((kind, depth), []).append(name)
    found = []
    for names in table.values():
        tensors = [checkpoint.tensors[name] for name in names]
        sizes = {scheme: sum(t.rows * find(scheme).row_bytes(t.columns) for t in tensors) for scheme in ERRORS}
        modules = tuple(module for name in names for module in plan.modules[name])
        found.append(Group(tuple(names), modules, sum(t.rows * t.columns for t in tensors), sizes))
    return found


def _place(module: str) -> tuple[str, int]:
    """ "dec.blk.7.attn_q" -> ("dec.attn_q", 7); a layer of -1 where there is none."""
    words = module.split(".")
    if "blk" not in words[:-1]:
        return module, -1
    at = words.index("blk")
    return ".".join(words[:at] + words[at + 2:]), int(words[at + 1])


def sensitivities(spec, checkpoint, found: list[Group], calibration: Calibration, samples: list[np.ndarray],
                  progress: Callable[[int, int], None] = lambda done, total: None) -> list[float]:
    """Mean divergence of the model's predictions on `samples` when only that group is quantised to PROBE, for each."""
    from numflow.reference.program import Program

    live = replace(checkpoint, tensors=dict(checkpoint.tensors))
    built = network.build(spec, checkpoint)
    program = Program(built, network.WeightSource(built, live))
    plan = plan_of(network.build(spec, checkpoint, fuse=False), checkpoint, Recipe("probe", PROBE))
    probes = quantised(checkpoint, plan, replace(calibration, moments={}, shared={}))
    with Model(built, program) as model:
        base = [list(model.iter_logits(ids)) for ids in samples]
        costs = []
        for done, group in enumerate(found, 1):
            _put(program, built, live, probes, group)
            pairs = ((p, q) for rows, ids in zip(base, samples) for (_, p), (_, q) in zip(rows, model.iter_logits(ids)))
            costs.append(mean_divergence(pairs))
            _put(program, built, live, checkpoint, group)
            progress(done, len(found))
    return costs


def _put(program, built, live, source, group: Group) -> None:
    """Let the program read a group's tensors from another checkpoint."""
    for name in group.tensors:
        live.tensors[name] = source.tensors[name]
    program.forget(name for name, weight in built.weights.items()
                   if any(part.tensor in group.tensors for part in weight.parts))


def allocate(found: list[Group], costs: list[float], bits: float) -> list[str]:
    """The scheme of each group.

    Raises:
        RequestError: fewer bits than the smallest scheme takes.
    """
    names = list(ERRORS)
    budget = bits * sum(group.weights for group in found) / 8
    taken = [0] * len(found)
    used = sum(group.sizes[names[0]] for group in found)
    if used > budget:
        least = 8 * used / sum(group.weights for group in found)
        raise RequestError(f"{bits:g} bits per weight are too few: {names[0]} alone takes {least:.4f}")

    def foreseen(index: int, scheme: int) -> float:
        return costs[index] * (ERRORS[names[scheme]] / ERRORS[PROBE]) ** 2

    while True:
        steps = [((foreseen(i, taken[i]) - foreseen(i, s)) / more, i, s, more) for i, group in enumerate(found)
                 for s in range(taken[i] + 1, len(names))
                 if used + (more := group.sizes[names[s]] - group.sizes[names[taken[i]]]) <= budget]
        if not steps:
            return [names[scheme] for scheme in taken]
        _, index, scheme, more = max(steps)
        taken[index], used = scheme, used + more
