"""Adapters per request: steps after products and embedding look-ups, and an adapter's matrices for these steps.

    built = adaptable(built, checkpoint)                    # once, when the model is loaded; or for each device's share
    parts = parts_of(built, checkpoint, fitted(...), scale)     # for Program.set_adapter
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numflow.errors import RequestError, option
from numflow.formats.adapter import Adapter, LowRank, check_finite
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.adapters.fit import Fitted, as_stored
from numflow.network.adapters.in_turns import name_in_layer, name_of_use
from numflow.network.adapters.parts import AdaptedPart, AdaptedParts
from numflow.network.adapters.tables import tied_table
from numflow.network.weights.source import WeightSource
from numflow.ops import Network, Part, Step, View, param


@dataclass(frozen=True)
class _Target:
    """A step of ops.ADAPTING and the tensors that it adapts: a single one, or one for each expert.

    head: whether the tensor is the output matrix. scale: factor of the embedding look-up.
    bias: name of the product's bias weight, "" for none, and the offset of the first element for these tensors.
    """

    step: Step
    parts: tuple[Part, ...]
    experts: int = 1
    head: bool = False
    scale: float = 1.0
    bias: tuple[str, int] = ("", 0)


def adaptable(network: Network, checkpoint: Checkpoint) -> Network:
    """The network with a step after each product and embedding look-up that adds the change of each row's adapter."""
    entries = {name: tuple(one for step in steps for one in (step, *(target.step for target in _targets(
        step, network, checkpoint)))) for name, steps in network.entries.items()}
    return replace(network, entries=entries)


def _targets(step: Step, network: Network, checkpoint: Checkpoint) -> Iterator[_Target]:
    """The steps to insert after a step, one for the output columns of each tensor."""
    weight = network.weights.get(step.weights.get("table" if step.op == "embed" else "weight", ""))
    if weight is None or weight.constant is not None or weight.normalize_rows or any(p.turned for p in weight.parts):
        return
    if step.op == "embed":
        y, scale = step.outputs[0], param(step, "scale")
        name = f"rows of {weight.name}" if scale == 1 else f"rows of {weight.name} * {scale}"
        params = {"part": name, "rows": weight.shape[0], "first": param(step, "first")}
        yield _Target(replace(step, op="adapt_rows", inputs=(y,), weights={}, params=params,
                              label=f"{step.label}.adapter"), weight.parts, scale=scale)
    elif step.op == "expert_linear":
        (x, ids), y = step.inputs, step.outputs[0]
        yield _Target(_step(step, weight.name, (x, y, ids), y, param(step, "first")), weight.parts, weight.groups,
                      bias=(step.weights.get("bias", ""), 0))
    elif step.op == "linear":
        y, offset = step.outputs[0], 0
        head = "logits" in network.outputs and network.buffers[y.buffer].rows == "logits"
        for index, part in enumerate(weight.parts):
            output = View(y.buffer, y.start + offset, _rows(part, weight.shape[1], checkpoint))
            name = f"{name_of_use(weight, step, network)}[{index}]"
            yield _Target(_step(step, name, (step.inputs[0], output), output), (part,), head=head,
                          bias=(step.weights.get("bias", ""), offset))
            offset += output.width


def _step(step: Step, part: str, inputs: tuple[View, ...], y: View, first: int = 0) -> Step:
    return Step("adapt", inputs, (y,), {}, {"part": part, "first": first}, f"{step.label}.adapter")


def _rows(part: Part, columns: int, checkpoint: Checkpoint) -> int:
    tensor = checkpoint.tensors[part.tensor]
    if part.columns is not None:  # a device's share
        columns = tensor.rows if part.transpose else tensor.columns
    return tensor.rows * tensor.columns // columns if part.rows is None else len(part.rows)


def parts_of(network: Network, checkpoint: Checkpoint, fit: Fitted, scale: float,
             shares: Sequence[Network] = ()) -> AdaptedParts:
    """An adapter's matrices by the parameter `part` of the network's steps. shares: the devices' shares, if it is cut.

    Raises:
        RequestError: a change cannot be applied per request; the message names it.
    """
    own, found = fit.adapter, dict[str, list[AdaptedPart | None]]()
    projected = {part.tensor for weight in network.weights.values() if weight.project for part in weight.parts}
    for name in (name for name in (*own.added, *own.replaced) if name in projected):
        raise _merge_it(own, name, "the projections of relative positions use it too, once for all requests")
    done, tied = set[str](), tied_table(network)
    for share in shares or (network,):
        parts = _Parts(share, checkpoint, fit, scale, tied)
        for step in (step for steps in share.entries.values() for step in steps):
            for target in _targets(step, share, checkpoint):
                matrices = parts.of(target)
                if any(part is not None for part in matrices):
                    found[target.step.params["part"]] = matrices
        done |= parts.done
    for name in own.added:
        if name not in done:
            raise _merge_it(own, name, "no matrix product of the network uses the stored tensor directly")
    for name in own.replaced:
        if name not in done:
            raise _merge_it(own, name, "it replaces a tensor that no product or look-up uses")
    return found


class _Parts:
    """An adapter's matrices for targets in a network. done: names that have been used. tied: see `tied_table`."""

    def __init__(self, network: Network, checkpoint: Checkpoint, fit: Fitted, scale: float, tied: str | None):
        self.done = set[str]()
        self._network, self._checkpoint, self._fit, self._scale = network, checkpoint, fit, scale
        self._tied = tied
        biases = {name: tensor for name, tensor in fit.adapter.replaced.items() if name.endswith(".bias")}
        self._with_biases = replace(checkpoint, tensors={**checkpoint.tensors, **biases}) if biases else None

    def of(self, target: _Target) -> list[AdaptedPart | None]:
        """One part per expert, or a single one; None for no change."""
        names = [name_in_layer(_name(part, target, self._fit, self._tied), target.step, self._network)
                 for part in target.parts]
        found = [self._checked(name, part, target, index)
                 for index, (name, part) in enumerate(zip(names, target.parts, strict=True))]
        if len(found) < target.experts:
            for name, part in zip(names, found, strict=True):
                if part is not None and part.scale is not None:
                    raise _merge_it(self._fit.adapter, name, "DoRA of experts in one tensor")
            found = self._by_expert(names, found, target)
        self.done.update(names)
        return found

    def _by_expert(self, names: Sequence[str], stacks: Sequence[AdaptedPart | None],
                   target: _Target) -> list[AdaptedPart | None]:
        """The matrices of each expert, from one stack, or from several stacks in order."""
        if len(stacks) == 1:
            return _by_expert(stacks[0], target.experts, param(target.step, "first"))
        counts = [self._checkpoint.tensors[part.tensor].shape[0] for part in target.parts]
        if sum(counts) != target.experts:
            raise _merge_it(self._fit.adapter, names[0], "its experts are in several tensors, split over devices")
        return [one for part, count in zip(stacks, counts, strict=True) for one in _by_expert(part, count, 0)]

    def _checked(self, name: str, part: Part, target: _Target, index: int) -> AdaptedPart | None:
        with np.errstate(all="ignore"):  # overflow is found in the results
            found = self._part(name, part, target, index)
        if found is not None:
            check_finite(self._fit.adapter.path, name, found.a, found.b, found.bias, found.scale)
        return found

    def _part(self, name: str, part: Part, target: _Target, index: int) -> AdaptedPart | None:
        """The matrices for one tensor. index: its index in target.parts."""
        own = self._fit.adapter
        if name in own.replaced:
            if name in own.added:
                raise _merge_it(own, name, "it is replaced and also has a low-rank change")
            return self._replacement(name, part, target)
        change, bias = own.added.get(name), self._bias(name, part, target, index)
        if change is None:
            return None if bias is None else AdaptedPart(np.zeros((1, target.step.inputs[0].width), np.float32),
                                                         np.zeros((len(bias), 1), np.float32), bias)
        a, b = change.matrices()
        factor = np.float32(change.factor_at(self._scale))
        if target.step.op == "adapt_rows":
            if change.magnitude is not None:
                raise _merge_it(own, name, "DoRA of an embedding table")
            return AdaptedPart(_rows_in(b, part), a.T * (factor * np.float32(target.scale)))
        a, b = self._ordered(a, part), _rows_in(_flat(b, change), part) * factor
        if a.ndim == 2 and (used := b.any(axis=0)).any():  # some ranks are for other rows of a fused matrix
            a, b = a[used], b[:, used]
        if change.magnitude is None:
            return AdaptedPart(a, b, bias)
        if len(target.parts) < target.experts:
            return AdaptedPart(a, b, bias, b[:, 0])  # refused by `of`
        scales = _rows_in(self._row_scales(name, change), part)
        base_bias = self._base_bias(target, index, len(scales), self._checkpoint)
        kept = None if base_bias is None else (1 - scales) * base_bias  # the scale must not change the base's bias
        return AdaptedPart(a, b * scales[:, None], bias if kept is None else kept if bias is None else kept + bias,
                           scales)

    def _row_scales(self, name: str, change: LowRank) -> np.ndarray:
        """DoRA: the magnitude divided by the L2 norm of each row of the sum, f32 [N]."""
        a, b = change.matrices()
        rows = self._weight(self._fit.checkpoint.tensors[name], name) + np.float32(
            change.factor_at(self._scale)) * (b @ a)
        return change.lengthened(np.linalg.norm(rows, axis=-1))

    def _replacement(self, name: str, part: Part, target: _Target) -> AdaptedPart:
        """A replacement of the base's tensor: the difference as B, and an identity as A."""
        if target.experts > 1:
            raise _merge_it(self._fit.adapter, name, "it replaces experts")
        base = self._fit.checkpoint.tensors[name]
        tensor = as_stored(self._fit.adapter.replaced[name], base)
        difference = _rows_in(self._weight(tensor, name) - self._weight(base, name), part)
        if target.step.op == "adapt_rows":
            return AdaptedPart(difference, np.eye(difference.shape[1], dtype=np.float32) * np.float32(target.scale))
        identity = self._ordered(np.eye(difference.shape[1], dtype=np.float32), part)
        return AdaptedPart(identity, difference, self._bias(name, part, target, 0))

    def _weight(self, tensor: Tensor, name: str) -> np.ndarray:
        """The matrix as [..., N, K]."""
        values = np.asarray(tensor.f32(), np.float32)
        return np.swapaxes(values, -1, -2) if name in self._fit.transposed else values

    def _ordered(self, a: np.ndarray, part: Part) -> np.ndarray:
        """The columns of A for this device's share, in the stored order of the matrix."""
        ordered = self._checkpoint.tensors[part.tensor].ordered if part.ordered else None
        a = a if ordered is None else a[..., ordered.order]
        return a if part.columns is None else a[..., slice(*part.columns)]

    def _bias(self, name: str, part: Part, target: _Target, index: int) -> np.ndarray | None:
        """The vector to add to the product: an offset, plus the difference of a replaced bias."""
        own, found = self._fit.adapter, None
        if part.columns is not None and part.columns[0] > 0:  # the first device's share adds it
            return None
        if name in own.offsets:
            vector, offset = own.offsets[name]
            found = _rows_in(vector.f32() * np.float32(offset * self._scale), part)
        bias = self._fit.bias_of(name)
        if bias in own.replaced and target.step.op == "adapt":
            if name_in_layer(part.tensor, target.step, self._network) != part.tensor:
                raise _merge_it(own, bias, "several layers share the base's bias")
            self.done.add(bias)
            if target.bias[0] and self._with_biases is not None:
                width = target.step.outputs[0].width
                after, before = (self._base_bias(target, index, width, each)
                                 for each in (self._with_biases, self._checkpoint))
                assert after is not None and before is not None  # the target has a bias
                difference = after - before
            else:
                difference = _rows_in(own.replaced[bias].f32().reshape(-1), part)
            found = difference if found is None else found + difference
        return found

    def _base_bias(self, target: _Target, index: int, width: int, checkpoint: Checkpoint) -> np.ndarray | None:
        name, first = target.bias
        if not name:
            return None
        return WeightSource(self._network, checkpoint).f32(name).reshape(-1)[first + index * width:][:width]


def _merge_it(own: Adapter, name: str, why: str) -> RequestError:
    return RequestError(f"{own.path}: {name!r} cannot be changed for single requests: {why}; merge the adapter instead "
                        f"({option('merge')})")


def _name(part: Part, target: _Target, fit: Fitted, tied: str | None) -> str:
    """The adapter's name for a target's tensor: a tied output matrix has a separate name."""
    if target.head and part.tensor == tied and (fit.head or not fit.adapter.head_too):
        return fit.head or ""
    return part.tensor


def _flat(b: np.ndarray, change: LowRank) -> np.ndarray:
    return b.reshape(-1, change.rank)


def _rows_in(values: np.ndarray, part: Part) -> np.ndarray:
    return values if part.rows is None else values[np.asarray(part.rows)]


def _by_expert(part: AdaptedPart | None, experts: int, first: int) -> list[AdaptedPart | None]:
    """The matrices of each expert of a stack. first: index in A of the expert with B's first rows."""
    if part is None:
        return [None] * experts
    stack = part.a[first:first + experts]
    return [AdaptedPart(a, b) for a, b in zip(stack, part.b.reshape(experts, -1, part.b.shape[1]), strict=True)]
