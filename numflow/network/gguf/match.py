"""Comparison of two networks for files of different layouts, which should compute the same: pairs of weights.

Files may differ in the split of tensors, in the order of rotated columns (adjacent or half pairing), and in the order
of value heads that share key heads. Everything else must agree; differences are reported.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from numflow.errors import RequestError
from numflow.ops import Network, Step, View, param

_LAYER = re.compile(r"(enc\.|dec\.|draft\.)?blk\.\d+")
CLOSE = 2e-6  # relative tolerance: one value was rounded to float32


@dataclass(frozen=True)
class WeightPair:
    """A weight of the target and the equal weight of the source.

    order, columns: permutation of the source's rows and columns, None for identity.
    """

    target: str
    source: str
    order: np.ndarray | None
    columns: np.ndarray | None = None


class Order(NamedTuple):
    """A view of a layer with permuted columns in the target."""

    view: View
    columns: np.ndarray
    layer: str


class Mismatch(RequestError):
    """Error: the networks differ in `name` at step `label`."""

    def __init__(self, label: str, name: str, source: object, target: object):
        super().__init__(f"{label}: {name} is {source}, and would be read as {target}")
        self.label, self.name = label, name


def matched(source: Network, target: Network, divided: bool = False) -> list[WeightPair]:
    """Pair each weight of the target with the source weight in the same role.

    divided: rotary frequencies may differ.

    Raises:
        Mismatch: the networks do not compute the same.
    """
    if source.entries.keys() != target.entries.keys():
        raise Mismatch("model", "parts", sorted(source.entries), sorted(target.entries))
    pairs: dict[str, WeightPair] = {}
    context = source.facts["context"]
    for entry in source.entries:
        steps, theirs = ([_within(step, target.facts["context"]) for step in network.entries[entry]]
                         for network in (source, target))
        if len(steps) != len(theirs):
            ours, other = next((a, b) for a, b in zip_longest(steps, theirs) if a is None or b is None or a.op != b.op)
            raise Mismatch((ours or other).label, "step", *(step.op if step else "none" for step in (ours, other)))
        orders = _orders(steps, theirs)
        angles: dict[str, str] = {}
        for ours, other in zip(steps, theirs, strict=True):
            _same(ours, other, context, angles)
            for pair in _weights(source, target, ours, other, orders, divided):
                first = pairs.setdefault(pair.target, pair)
                if first.source != pair.source or not (_same_order(first.order, pair.order)
                                                       and _same_order(first.columns, pair.columns)):
                    raise Mismatch(ours.label, "weight", pair.source, first.source)
    return list(pairs.values())


def _within(step: Step, context: int) -> Step:
    """The step without frequencies that only longer contexts use."""
    if step.op != "rope_angles" or param(step, "border") < context:
        return step
    return replace(step, weights={"inv_freq": step.weights["inv_freq"]}, params={"scale": param(step, "scale")})


def _same(ours: Step, other: Step, context: int, angles: dict[str, str]) -> None:
    """Check that two steps are equal. angles: source buffer of rotary angles -> target buffer."""
    if ours.op != other.op:
        raise Mismatch(ours.label, "step", ours.op, other.op)
    views, found = ((*step.inputs, *step.outputs) for step in (ours, other))
    if len(views) != len(found) or not all(
            (a.start, a.width) == (b.start, b.width) and (a.buffer == b.buffer or (
                a.buffer.startswith("angles.") and angles.setdefault(a.buffer, b.buffer) == b.buffer))
            for a, b in zip(views, found)):
        raise Mismatch(ours.label, "columns", *(", ".join(map(str, (*s.inputs, *s.outputs))) for s in (ours, other)))
    for name in sorted({*ours.params, *other.params} - {"pairing", "tiled"}):
        a, b = param(ours, name), param(other, name)
        if name == "window" and max(a, b) >= context and min(a, b) in (0, max(a, b)):  # the window covers the context
            continue
        if a != b and not (isinstance(a, float) and isinstance(b, (int, float)) and np.isclose(a, b, CLOSE, 0)):
            raise Mismatch(ours.label, name, a, b)
    if ours.weights.keys() != other.weights.keys():
        raise Mismatch(ours.label, "tensors", *(", ".join(sorted(s.weights)) or "none" for s in (ours, other)))


def _weights(source: Network, target: Network, ours: Step, other: Step, orders: list, divided: bool
             ) -> Iterator[WeightPair]:
    for role, name in ours.weights.items():
        a, b = source.weights[name], target.weights[other.weights[role]]
        if a.shape != b.shape or (len(a.shape) > 1 and a.groups != b.groups and ours.op != "linear"):
            raise Mismatch(ours.label, f"shape of {role}", list(a.shape), list(b.shape))
        if a.constant is not None or b.constant is not None:
            skip = divided and role == "inv_freq"
            if not skip and (a.constant is None or b.constant is None
                             or not np.allclose(a.constant, b.constant, CLOSE, 0)):
                raise Mismatch(ours.label, _CONSTANTS.get(role, role), "what the source says", "other numbers")
            continue
        yield WeightPair(b.name, a.name, _order_of(ours, orders, a.shape[0]),
                         _order_of_inputs(ours, orders) if role == "weight" else None)


_CONSTANTS = {"inv_freq": "rotary frequencies", "slopes": "slopes", "table": "table of positions"}


def _orders(steps: Sequence[Step], theirs: Sequence[Step]) -> list[Order]:
    """Views with permuted columns in the target."""
    found: list[Order] = []
    for ours, other in zip(steps, theirs):
        if ours.op == other.op == "linear_attention" and param(ours, "tiled") != param(other, "tiled"):
            found += _heads_in_turn(steps, ours, param(other, "tiled"))
        if ours.op != "rope" or other.op != "rope" or param(ours, "pairing") == param(other, "pairing"):
            continue
        count, width, start = ours.params["heads"], ours.params["head_dim"], param(ours, "start")
        dims = ours.inputs[1].width
        head = np.arange(width)
        halves = start + np.arange(dims).reshape(2, -1).T.reshape(-1)  # adjacent pairs in the order of halves
        if param(other, "pairing") == "adjacent":
            head[start:start + dims] = halves
        else:
            head[halves] = start + np.arange(dims)
        order = (np.arange(count)[:, None] * width + head).reshape(-1)
        if not any(step.op == "linear" and _holds(step, ours.inputs[0], _layer(ours)) for step in steps):
            raise Mismatch(ours.label, "pairing", param(ours, "pairing"), param(other, "pairing"))
        found.append(Order(ours.inputs[0], order, _layer(ours)))
    return found


def _heads_in_turn(steps: Sequence[Step], ours: Step, tiled: bool) -> list[Order]:
    """Permuted views of value heads: head h reads key head h % G (`tiled`) in one file, h // (H / G) in the other."""
    heads, key_heads = param(ours, "heads"), param(ours, "key_heads")
    shape = (key_heads, heads // key_heads) if tiled else (heads // key_heads, key_heads)
    order = np.arange(heads).reshape(shape).T.reshape(-1)
    y, layer = ours.outputs[0], _layer(ours)
    views = [*ours.inputs[2:], y]
    for step in steps:
        if _layer(step) != layer:
            continue
        if step.op == "act_mul" and y in step.inputs:
            views += [view for view in step.inputs if view != y]
        if step.op == "causal_conv" and step.outputs[0].covers(ours.inputs[2]):
            first = step.inputs[0].start + ours.inputs[2].start - step.outputs[0].start
            views.append(View(step.inputs[0].buffer, first, ours.inputs[2].width))
    return [Order(view, (order[:, None] * (size := view.width // heads) + np.arange(size)).reshape(-1), layer)
            for view in views]


def _holds(step: Step, view: View, layer: str) -> bool:
    """Whether a step of the layer writes the columns of a view."""
    y = step.outputs[0]
    return _layer(step) == layer and y.buffer == view.buffer and y.start <= view.start < y.start + y.width


def _layer(step: Step) -> str:
    """"dec.blk.3" of "dec.blk.3.attn_qkv.q"; "" outside layers."""
    found = _LAYER.match(step.label)
    return found[0] if found else ""


def _order_of(step: Step, orders: list[Order], rows: int) -> np.ndarray | None:
    """Permutation of the rows of a weight whose step writes permuted columns; None for identity."""
    if step.op not in ("linear", "rms_norm", "layer_norm", "causal_conv", "softplus", "linear_attention"):
        return None
    order = None
    for view, columns, layer in orders:
        if not _holds(step, view, layer):
            continue
        if step.op == "linear_attention":  # values per head
            return columns[::view.width // rows] // (view.width // rows)
        first = view.start - step.outputs[0].start
        order = np.arange(rows) if order is None else order
        count = min(rows, view.width)  # a norm's weight may be one head's, for all heads
        order[first:first + count] = first + columns[:count]
    return order


def _order_of_inputs(step: Step, orders: list[Order]) -> np.ndarray | None:
    """Permutation of the columns of a matrix that reads permuted columns; None for identity."""
    if step.op != "linear":
        return None
    return next((columns for view, columns, layer in orders if layer == _layer(step) and view == step.inputs[0]), None)


def _same_order(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
