"""Adapters that requests choose: steps behind products and look-ups, and what an adapter has for each of them.

    built = adaptable(built, checkpoint)                        # once, when the model is loaded
    parts = parts_of(built, checkpoint, fitted(...), scale)     # for Program.set_adapter
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from numflow.errors import RequestError, option
from numflow.formats.adapter import Adapter, LowRank
from numflow.formats.checkpoint import Checkpoint
from numflow.network.adapters.fit import Fitted, tied_table
from numflow.network.adapters.parts import AdaptedPart, AdaptedParts
from numflow.ops import Network, Part, Step, View, param


@dataclass(frozen=True)
class _Place:
    """Tensors that a step of ops.ADAPTING is for: those of its experts, or its only one.

    head: whether it is the output matrix. scale: that look-ups are multiplied by.
    """

    step: Step
    parts: tuple[Part, ...]
    experts: int = 1
    head: bool = False
    scale: float = 1.0


def adaptable(network: Network, checkpoint: Checkpoint) -> Network:
    """The network in which rows may add what an adapter of their own has, behind each product and look-up."""
    entries = {name: tuple(one for step in steps for one in (step, *(place.step for place in _places(
        step, network, checkpoint)))) for name, steps in network.entries.items()}
    return replace(network, entries=entries)


def _places(step: Step, network: Network, checkpoint: Checkpoint) -> Iterator[_Place]:
    """The steps to come behind one, each for the columns that one tensor makes."""
    weight = network.weights.get(step.weights.get("table" if step.op == "embed" else "weight", ""))
    if weight is None or weight.constant is not None or weight.normalize_rows or any(p.turned for p in weight.parts):
        return
    if step.op == "embed":
        y, name = step.outputs[0], f"rows of {weight.name}"
        yield _Place(replace(step, op="adapt_rows", inputs=(y,), weights={}, params={"part": name},
                             label=f"{step.label}.adapter"), weight.parts, scale=param(step, "scale"))
    elif step.op == "expert_linear":
        (x, ids), y = step.inputs, step.outputs[0]
        yield _Place(_step(step, weight.name, (x, y, ids), y), weight.parts, weight.groups)
    elif step.op == "linear":
        head, at, y = step.outputs[0] == network.outputs.get("logits"), 0, step.outputs[0]
        for number, part in enumerate(weight.parts):
            own = View(y.buffer, y.start + at, _rows(part, weight.shape[1], checkpoint))
            yield _Place(_step(step, f"{weight.name}[{number}]", (step.inputs[0], own), own), (part,), head=head)
            at += own.width


def _step(step: Step, part: str, inputs: tuple[View, ...], y: View) -> Step:
    return Step("adapt", inputs, (y,), {}, {"part": part}, f"{step.label}.adapter")


def _rows(part: Part, columns: int, checkpoint: Checkpoint) -> int:
    tensor = checkpoint.tensors[part.tensor]
    return tensor.rows * tensor.columns // columns if part.rows is None else len(part.rows)


def parts_of(network: Network, checkpoint: Checkpoint, fit: Fitted, scale: float) -> AdaptedParts:
    """The matrices of an adapter by the `part` of the network's steps.

    Raises:
        RequestError: some of the adapter cannot be one request's alone, by name.
    """
    own, found, done = fit.adapter, dict[str, list[AdaptedPart | None]](), set[str]()
    for name in own.replaced:
        raise _merge_it(own, name, "it is a tensor in place of the base's (modules_to_save)")
    for name, change in own.added.items():
        if change.magnitude is not None:
            raise _merge_it(own, name, "DoRA changes the length of the base's rows")
    tied = tied_table(network)
    places = [place for steps in network.entries.values() for step in steps
              for place in _places(step, network, checkpoint)]
    for place in places:
        names = [_name(part, place, fit, tied) for part in place.parts]
        some = [_adapted(own, name, part, place, scale, checkpoint)
                for name, part in zip(names, place.parts, strict=True)]
        some = _by_expert(some[0], place.experts) if len(some) < place.experts else some
        if any(part is not None for part in some):
            found[place.step.params["part"]] = some
        done.update(names)
    for name in own.added:
        if name not in done:
            raise _merge_it(own, name, "the network does not multiply with it as it is stored")
    return found


def _merge_it(own: Adapter, name: str, why: str) -> RequestError:
    return RequestError(f"{own.path}: {name!r} cannot be changed for single requests: {why}; merge the adapter instead "
                        f"({option('merge')})")


def _name(part: Part, place: _Place, fit: Fitted, tied: str | None) -> str:
    """The name that the adapter has for the tensor here: an output matrix that is the table too has one of its own."""
    if place.head and part.tensor == tied and not fit.adapter.head_too:
        return fit.head or ""
    return part.tensor


def _adapted(own: Adapter, name: str, part: Part, place: _Place, scale: float,
             checkpoint: Checkpoint) -> AdaptedPart | None:
    change = own.added.get(name)
    if change is None:
        return None
    a, b = change.matrices()
    ordered = checkpoint.tensors[part.tensor].ordered if part.ordered else None
    if ordered is not None:  # x is in the order of the matrix's stored columns
        a = a[..., ordered.order]
    factor = np.float32(change.factor * scale)
    if place.step.op == "adapt_rows":
        return AdaptedPart(_chosen(b, part), a.T * (factor * np.float32(place.scale)))
    bias = None
    if name in own.offsets:
        vector, offset = own.offsets[name]
        bias = _chosen(vector.f32() * np.float32(offset * scale), part)
    return AdaptedPart(a, _chosen(_flat(b, change), part) * factor, bias)


def _flat(b: np.ndarray, change: LowRank) -> np.ndarray:
    return b.reshape(-1, change.rank)


def _chosen(values: np.ndarray, part: Part) -> np.ndarray:
    return values if part.rows is None else values[np.asarray(part.rows)]


def _by_expert(part: AdaptedPart | None, experts: int) -> list[AdaptedPart | None]:
    """The matrices of a stack, one by one."""
    if part is None:
        return [None] * experts
    return [AdaptedPart(a, b) for a, b in zip(part.a, part.b.reshape(experts, -1, part.b.shape[1]), strict=True)]
