"""Cuts of recurrent steps by heads or channels, if possible such that the output projection can be cut alike.

Heads of a state stay with the key heads that they read, as in attention. A device has whole groups of heads with the
same key head, or a part of one group. With `tiled` key heads, it has whole cycles of heads, or a part of one cycle.
Channels may be cut anywhere, preferably between the blocks of block-diagonal gate matrices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from numflow.ops import Network, Step, View, param
from numflow.partition.cut.slices import column_unit
from numflow.partition.cut.spans import Spans, even_spans, head_spans, holders, is_aligned, kv_spans, scaled

RECURRENT = ("linear_attention", "gated_recurrence", "wkv")


@dataclass(frozen=True)
class StateCut:
    """The cut of one recurrent step.

    columns: output columns of each device. keys: key heads of each device; () if every device reads all, or there are
             none.
    fits:    whether the output projection's columns can be cut alike.
    """

    columns: Spans
    keys: Spans
    fits: bool


def cut_states(network: Network, shares: tuple[float, ...]) -> dict[str, StateCut]:
    """Cuts by the state of each recurrent step."""
    return {param(step, "state"): _cut(network, steps, at, shares) for steps in network.entries.values()
            for at, step in enumerate(steps) if step.op in RECURRENT}


def read_in_pieces(step: Step, cut: StateCut) -> dict[View, Spans]:
    """Inputs of a recurrent step that each device reads only in part, with the spans."""
    if step.op != "linear_attention":
        return dict.fromkeys(step.inputs, cut.columns)
    q, k, *others = step.inputs
    y, size = step.outputs[0].width, q.width // param(step, "key_heads")
    keys = dict.fromkeys((q, k), scaled(cut.keys, size)) if cut.keys else {}
    return keys | {view: tuple((begin * view.width // y, end * view.width // y) for begin, end in cut.columns)
                   for view in others}


def own_params(step: Step, cut: StateCut, device: int) -> dict:
    """Parameters of the step for a device."""
    if step.op != "linear_attention":
        return dict(step.params)
    (begin, end), heads = cut.columns[device], param(step, "heads")
    first, last = cut.keys[device] if cut.keys else (0, param(step, "key_heads"))
    return {**step.params, "heads": (end - begin) * heads // step.outputs[0].width, "key_heads": last - first}


def gates_of(steps: tuple[Step, ...], at: int) -> tuple[list[View], Step | None]:
    """Gates that multiply the output of recurrent step `at`, and its output projection, if there is one."""
    found = steps[at].outputs[0]
    gates: list[View] = []
    for step in steps[at + 1:]:
        if found not in step.inputs:
            if any(view.overlaps(found) for view in step.outputs):
                break
            continue
        if step.op == "linear":
            return gates, step
        if step.op == "act_mul":
            gates += [view for view in step.inputs if view != found]
        found = step.outputs[0]
    return gates, None


def _cut(network: Network, steps: tuple[Step, ...], at: int, shares: tuple[float, ...]) -> StateCut:
    step, y = steps[at], steps[at].outputs[0]
    _, reader = gates_of(steps, at)
    unit = column_unit(network.weights[reader.weights["weight"]]) if reader is not None else 0
    if step.op != "linear_attention":
        block = _block(steps, at)
        columns, fits = _best(lambda least: even_spans(y.width, shares, least), math.lcm(block, max(unit, 1)), unit)
        return StateCut(columns, (), fits)
    heads, key_heads, tiled = (param(step, key) for key in ("heads", "key_heads", "tiled"))
    size, group = y.width // heads, key_heads if tiled else heads // key_heads
    aligned = unit // math.gcd(unit, size) if unit else 1  # heads between two possible cuts of columns

    def spans(least: int) -> Spans:
        if group in (1, heads):  # no heads need to stay together
            return even_spans(heads, shares, least)
        return head_spans(heads, heads // group, shares, least)

    found, _ = _best(spans, aligned, 1)
    columns = scaled(found, size)
    keys = _turns(found, key_heads) if tiled else kv_spans(found, heads, key_heads)
    everywhere = {span for span in keys if span[1] > span[0]} <= {(0, key_heads)}
    return StateCut(columns, () if everywhere else keys, is_aligned(columns, unit))


def _best(spans: Callable[[int], Spans], wanted: int, needed: int) -> tuple[Spans, bool]:
    """Spans at multiples of `wanted`, else of `needed`, else any, such that as many devices take part as without
    limits; and whether the spans are multiples of `needed` (0: no cut is possible)."""
    free = spans(1)
    for least in (wanted, needed):
        found = spans(least) if least else free
        if least and len(holders(found)) == len(holders(free)):
            return found, is_aligned(found, needed)
    return free, is_aligned(free, needed)


def _turns(spans: Spans, key_heads: int) -> Spans:
    """Key heads read by heads in these spans, if head h reads key head h % key_heads."""
    return tuple((begin % key_heads, begin % key_heads + end - begin) if end - begin < key_heads else (0, key_heads)
                 for begin, end in spans)


def _block(steps: tuple[Step, ...], at: int) -> int:
    """Output columns of a block of block-diagonal gate matrices, 1 for full matrices."""
    made = [step for step in steps[:at] if step.op == "head_linear" and step.outputs[0] in steps[at].inputs]
    return steps[at].outputs[0].width // param(made[-1], "heads") if made else 1
