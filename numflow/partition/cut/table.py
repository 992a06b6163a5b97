"""The cut of a plan as a table: the kind of cut of each step, and the rows or columns of each device."""

import itertools
import re
from dataclasses import dataclass

from numflow.ops import EXCHANGES, Step, param
from numflow.partition.cut.plan import DevicePart, Plan, layer_of
from numflow.partition.cut.recurrent import RECURRENT

_SPAN = re.compile(r"^(.*?)\[(:, )?(\d+):(\d+)\]$")


@dataclass(frozen=True)
class CutRow:
    """A step of all layers with the same cut.

    how:    column-parallel (each device computes some outputs of a product), row-parallel (each reads some inputs and
            computes a partial sum), tokens (each has rows of an embedding table), heads, channels, replicated, whole.
    spans:  each device's part. then: the exchange after the step, "" for none.
    """

    group: int
    layers: str
    step: str
    how: str
    spans: tuple[str, ...]
    then: str


def cut_table(plan: Plan) -> list[CutRow]:
    """Rows in step order, for steps with weights and attention."""
    found: dict[tuple, list[int | None]] = {}
    for number, group in enumerate(plan.groups):
        parts = [plan.devices[index] for index in group]
        for entry in parts[0].network.entries:
            for key, layer in _rows(number, parts, entry):
                found.setdefault(key, []).append(layer)
    return [CutRow(group, _layers(layers), step, how, spans, then)
            for (group, step, how, spans, then), layers in found.items()]


def _rows(number: int, parts: list[DevicePart], entry: str):
    own = [[step for step in part.network.entries[entry] if step.op not in EXCHANGES] for part in parts]
    first = {step.label: step for step in own[0]}
    behind = _exchanges(parts[0].network.entries[entry])
    for label, step in first.items():
        same = [next((other for other in steps if other.label == label), None) for steps in own]
        if step.op != "attention" and not step.weights:
            continue
        how, spans = _sharing(same, parts)
        place = layer_of(label)
        stem = label if place is None else label.split(f"blk.{place[1]}.", 1)[1]
        yield (number, stem, how, spans, behind.get(label, "")), None if place is None else place[1]


def _exchanges(steps: tuple[Step, ...]) -> dict[str, str]:
    """Label of a step -> the exchange after it."""
    return {before.label: step.op for before, step in itertools.pairwise(steps)
            if step.op in ("all_reduce", "all_gather") and before.op not in EXCHANGES}


def _sharing(same: list[Step | None], parts: list[DevicePart]) -> tuple[str, tuple[str, ...]]:
    if len(parts) == 1:
        return "whole", ("all",)
    there = [other for other in same if other is not None]
    if len(there) < len(same):
        return "some devices", tuple("-" if other is None else "all" for other in same)
    step = there[0]
    if step.op == "attention":
        return "heads", tuple(f"{param(other, 'heads')} heads" for other in there)
    weights = [[_span(name) for weight in other.weights.values() for name in weight.split(" + ")] for other in there]
    kinds = {kind for _, kind, _ in weights[0]}
    if kinds == {""}:
        return "replicated", tuple("all" for _ in same)
    if step.op == "linear_attention":
        return "heads", tuple(f"{param(other, 'heads')} heads" for other in there)
    if step.op in RECURRENT:
        return "channels", tuple(f"{other.outputs[0].width} channels" for other in there)
    how = "row-parallel" if "columns" in kinds else "tokens" if step.op in ("embed", "embed_ids") else "column-parallel"
    return how, tuple(", ".join(f"{name} {'columns ' * (kind == 'columns')}{span}" for name, kind, span in spans)
                      for spans in weights)


def _span(name: str) -> tuple[str, str, str]:
    """Module, kind ("rows", "columns", "" for all) and span of a name such as "blk.0.ffn_down.weight[:, 0:768]"."""
    match = _SPAN.match(name)
    whole = name if match is None else match[1]
    module = whole.removesuffix(".weight").rsplit("blk.", 1)[-1].split(".", 1)[-1] if "blk." in whole else (
        whole.removesuffix(".weight"))
    if match is None:
        return module, "", "all"
    return module, "columns" if match[2] else "rows", f"{match[3]}:{match[4]}"


def _layers(layers: list[int | None]) -> str:
    numbers = sorted({layer for layer in layers if layer is not None})
    if not numbers:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
