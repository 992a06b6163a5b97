"""Adapters that requests choose: steps behind products and look-ups, and what an adapter has for each of them.

    built = adaptable(built, checkpoint)                        # once, when the model is loaded; or each device's share
    parts = parts_of(built, checkpoint, fitted(...), scale)     # for Program.set_adapter
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numflow.errors import RequestError, option
from numflow.formats.adapter import Adapter, LowRank, check_finite
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.adapters.fit import Fitted, as_stored
from numflow.network.adapters.parts import AdaptedPart, AdaptedParts
from numflow.network.adapters.tables import tied_table
from numflow.network.weights.source import WeightSource
from numflow.ops import Network, Part, Step, View, param


@dataclass(frozen=True)
class _Place:
    """Tensors that a step of ops.ADAPTING is for: those of its experts, or its only one.

    head: whether it is the output matrix. scale: that look-ups are multiplied by. bias: weight that products add, ""
    for none, and the first of its numbers that are for these tensors.
    """

    step: Step
    parts: tuple[Part, ...]
    experts: int = 1
    head: bool = False
    scale: float = 1.0
    bias: tuple[str, int] = ("", 0)


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
        params = {"part": name, "rows": weight.shape[0], "first": param(step, "first")}
        yield _Place(replace(step, op="adapt_rows", inputs=(y,), weights={}, params=params,
                             label=f"{step.label}.adapter"), weight.parts, scale=param(step, "scale"))
    elif step.op == "expert_linear":
        (x, ids), y = step.inputs, step.outputs[0]
        yield _Place(_step(step, weight.name, (x, y, ids), y, param(step, "first")), weight.parts, weight.groups,
                     bias=(step.weights.get("bias", ""), 0))
    elif step.op == "linear":
        y, at = step.outputs[0], 0
        head = "logits" in network.outputs and network.buffers[y.buffer].rows == "logits"
        for number, part in enumerate(weight.parts):
            own = View(y.buffer, y.start + at, _rows(part, weight.shape[1], checkpoint))
            yield _Place(_step(step, f"{weight.name}[{number}]", (step.inputs[0], own), own), (part,), head=head,
                         bias=(step.weights.get("bias", ""), at))
            at += own.width


def _step(step: Step, part: str, inputs: tuple[View, ...], y: View, first: int = 0) -> Step:
    return Step("adapt", inputs, (y,), {}, {"part": part, "first": first}, f"{step.label}.adapter")


def _rows(part: Part, columns: int, checkpoint: Checkpoint) -> int:
    tensor = checkpoint.tensors[part.tensor]
    if part.columns is not None:  # of a share
        columns = tensor.rows if part.transpose else tensor.columns
    return tensor.rows * tensor.columns // columns if part.rows is None else len(part.rows)


def parts_of(network: Network, checkpoint: Checkpoint, fit: Fitted, scale: float,
             shares: Sequence[Network] = ()) -> AdaptedParts:
    """The matrices of an adapter by the `part` of the network's steps; of those of devices' shares of it, if there are.

    Raises:
        RequestError: some of the adapter cannot be one request's alone, by name.
    """
    own, found = fit.adapter, dict[str, list[AdaptedPart | None]]()
    made = {part.tensor for weight in network.weights.values() if weight.project for part in weight.parts}
    for name in (name for name in (*own.added, *own.replaced) if name in made):
        raise _merge_it(own, name, "keys and queries of distances are made with it too, once for all requests")
    done, tied = set[str](), tied_table(network)
    for share in shares or (network,):
        parts = _Parts(share, checkpoint, fit, scale, tied)
        for step in (step for steps in share.entries.values() for step in steps):
            for place in _places(step, share, checkpoint):
                some = parts.of(place)
                if any(part is not None for part in some):
                    found[place.step.params["part"]] = some
        done |= parts.done
    for name in own.added:
        if name not in done:
            raise _merge_it(own, name, "the network does not multiply with it as it is stored")
    for name in own.replaced:
        if name not in done:
            raise _merge_it(own, name, "it is in place of a tensor that no product or look-up has")
    return found


class _Parts:
    """Matrices of an adapter for places of a network. done: names of what has been used. tied: of `tied_table`."""

    def __init__(self, network: Network, checkpoint: Checkpoint, fit: Fitted, scale: float, tied: str | None):
        self.done = set[str]()
        self._network, self._checkpoint, self._fit, self._scale = network, checkpoint, fit, scale
        self._tied = tied
        biases = {name: tensor for name, tensor in fit.adapter.replaced.items() if name.endswith(".bias")}
        self._changed = replace(checkpoint, tensors={**checkpoint.tensors, **biases}) if biases else None

    def of(self, place: _Place) -> list[AdaptedPart | None]:
        """A part for each expert, or one; None for no change."""
        names = [_name(part, place, self._fit, self._tied) for part in place.parts]
        some = [self._part(name, part, place, number)
                for number, (name, part) in enumerate(zip(names, place.parts, strict=True))]
        if len(some) < place.experts:
            for name, part in zip(names, some, strict=True):
                if part is not None and part.scale is not None:
                    raise _merge_it(self._fit.adapter, name, "DoRA of experts in one tensor")
            some = self._by_expert(names, some, place)
        self.done.update(names)
        return some

    def _by_expert(self, names: Sequence[str], some: Sequence[AdaptedPart | None],
                   place: _Place) -> list[AdaptedPart | None]:
        """The matrices of stacks one by one, of one stack or of several whole ones."""
        if len(some) == 1:
            return _by_expert(some[0], place.experts, param(place.step, "first"))
        counts = [self._checkpoint.tensors[part.tensor].shape[0] for part in place.parts]
        if sum(counts) != place.experts:
            raise _merge_it(self._fit.adapter, names[0], "its experts are shared out among devices, in several tensors")
        return [one for part, count in zip(some, counts, strict=True) for one in _by_expert(part, count, 0)]

    def _part(self, name: str, part: Part, place: _Place, number: int) -> AdaptedPart | None:
        with np.errstate(all="ignore"):  # overflow is found in the results
            found = self._made(name, part, place, number)
        if found is not None:
            check_finite(self._fit.adapter.path, name, found.a, found.b, found.bias, found.scale)
        return found

    def _made(self, name: str, part: Part, place: _Place, number: int) -> AdaptedPart | None:
        own = self._fit.adapter
        if name in own.replaced:
            if name in own.added:
                raise _merge_it(own, name, "it has another tensor in its place, to which something is added")
            return self._in_place(name, part, place)
        change, bias = own.added.get(name), self._bias(name, part, place, number)
        if change is None:
            return None if bias is None else AdaptedPart(np.zeros((1, place.step.inputs[0].width), np.float32),
                                                         np.zeros((len(bias), 1), np.float32), bias)
        a, b = change.matrices()
        factor = np.float32(change.factor_at(self._scale))
        if place.step.op == "adapt_rows":
            if change.magnitude is not None:
                raise _merge_it(own, name, "DoRA of an embedding table")
            return AdaptedPart(_chosen(b, part), a.T * (factor * np.float32(place.scale)))
        a, b = self._ordered(a, part), _chosen(_flat(b, change), part) * factor
        if a.ndim == 2 and (used := b.any(axis=0)).any():  # some of a rank may be for other rows of a fused matrix
            a, b = a[used], b[:, used]
        if change.magnitude is None:
            return AdaptedPart(a, b, bias)
        if len(place.parts) < place.experts:
            return AdaptedPart(a, b, bias, b[:, 0])  # refused by `of`
        lengths = _chosen(self._lengths(name, change), part)
        old = self._base_bias(place, number, len(lengths), self._checkpoint)
        still = None if old is None else (1 - lengths) * old
        return AdaptedPart(a, b * lengths[:, None], bias if still is None else still if bias is None else still + bias,
                           lengths)

    def _lengths(self, name: str, change: LowRank) -> np.ndarray:
        """Of each row of the sum, as long as the magnitude says, by the length that it has: f32 [N]."""
        a, b = change.matrices()
        rows = self._weight(self._fit.checkpoint.tensors[name], name) + np.float32(
            change.factor_at(self._scale)) * (b @ a)
        return change.lengthened(np.linalg.norm(rows, axis=-1))

    def _in_place(self, name: str, part: Part, place: _Place) -> AdaptedPart:
        """A tensor in place of the base's: what it has more, times each input."""
        if place.experts > 1:
            raise _merge_it(self._fit.adapter, name, "it is in place of experts")
        base = self._fit.checkpoint.tensors[name]
        tensor = as_stored(self._fit.adapter.replaced[name], base)
        more = _chosen(self._weight(tensor, name) - self._weight(base, name), part)
        if place.step.op == "adapt_rows":
            return AdaptedPart(more, np.eye(more.shape[1], dtype=np.float32) * np.float32(place.scale))
        every = self._ordered(np.eye(more.shape[1], dtype=np.float32), part)
        return AdaptedPart(every, more, self._bias(name, part, place, 0))

    def _weight(self, tensor: Tensor, name: str) -> np.ndarray:
        """[N, K]"""
        values = np.asarray(tensor.f32(), np.float32)
        return np.swapaxes(values, -1, -2) if name in self._fit.transposed else values

    def _ordered(self, a: np.ndarray, part: Part) -> np.ndarray:
        """A for x in the order of the matrix's stored columns, of those that are here."""
        ordered = self._checkpoint.tensors[part.tensor].ordered if part.ordered else None
        a = a if ordered is None else a[..., ordered.order]
        return a if part.columns is None else a[..., slice(*part.columns)]

    def _bias(self, name: str, part: Part, place: _Place, number: int) -> np.ndarray | None:
        """Added to the product: an offset, and what a bias in place of the base's has more."""
        own, found = self._fit.adapter, None
        if part.columns is not None and part.columns[0] > 0:  # another device's share of the sum has it
            return None
        if name in own.offsets:
            vector, offset = own.offsets[name]
            found = _chosen(vector.f32() * np.float32(offset * self._scale), part)
        beside = self._fit.bias_of(name)
        if beside in own.replaced and place.step.op == "adapt":
            self.done.add(beside)
            if place.bias[0] and self._changed is not None:
                width = place.step.outputs[0].width
                changed, before = (self._base_bias(place, number, width, each)
                                   for each in (self._changed, self._checkpoint))
                assert changed is not None and before is not None  # the place has one
                more = changed - before
            else:
                more = _chosen(own.replaced[beside].f32().reshape(-1), part)
            found = more if found is None else found + more
        return found

    def _base_bias(self, place: _Place, number: int, width: int, checkpoint: Checkpoint) -> np.ndarray | None:
        name, first = place.bias
        if not name:
            return None
        return WeightSource(self._network, checkpoint).f32(name).reshape(-1)[first + number * width:][:width]


def _merge_it(own: Adapter, name: str, why: str) -> RequestError:
    return RequestError(f"{own.path}: {name!r} cannot be changed for single requests: {why}; merge the adapter instead "
                        f"({option('merge')})")


def _name(part: Part, place: _Place, fit: Fitted, tied: str | None) -> str:
    """The name that the adapter has for the tensor here: an output matrix that is the table too has one of its own."""
    if place.head and part.tensor == tied and (fit.head or not fit.adapter.head_too):
        return fit.head or ""
    return part.tensor


def _flat(b: np.ndarray, change: LowRank) -> np.ndarray:
    return b.reshape(-1, change.rank)


def _chosen(values: np.ndarray, part: Part) -> np.ndarray:
    return values if part.rows is None else values[np.asarray(part.rows)]


def _by_expert(part: AdaptedPart | None, experts: int, first: int) -> list[AdaptedPart | None]:
    """The matrices of a stack one by one, whose rows are those of experts from number `first` on."""
    if part is None:
        return [None] * experts
    own = part.a[first:first + experts]
    return [AdaptedPart(a, b) for a, b in zip(own, part.b.reshape(experts, -1, part.b.shape[1]), strict=True)]
