"""Adapters whose modules are fused otherwise than the checkpoint's: query, key and value apart where the file has one
matrix, or the other way round.

    rearranged(adapter, stored, short, names, built, checkpoint, head)      # the adapter for the stored matrices

Rows of a matrix are its outputs. Changes of a fused matrix's modules are joined: A stacks the ranks of all modules, and
B is zero outside of each module's rows and ranks. A change of a fused matrix is split by the rows of B. Both are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from numflow.errors import FormatError
from numflow.formats.adapter import Adapter, LowRank, check_finite, computed
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.adapters.factors import multiplied
from numflow.network.adapters.modules import Location, Modules, Rows
from numflow.network.steps.names import TensorNames
from numflow.ops import Network


def rearranged(own: Adapter, stored: Callable[[str], str | None], short: Callable[[str], str], names: TensorNames,
               built: Network, checkpoint: Checkpoint, head: Mapping[str, str]) -> Adapter:
    """The adapter with changes of the checkpoint's matrices, split or joined where modules are fused otherwise, and
    with factors applied.

    stored, short, head: see Modules.

    Raises:
        FormatError: a module's change does not fit its rows, or rows are changed twice.
    """
    modules = Modules(stored, short, names, built, checkpoint, head)
    own = multiplied(own, modules, checkpoint)
    changes = _Rearranged(own, modules, checkpoint)
    added = changes.of_kind(own.added, rows_of_change, changes.joined_changes)
    offsets = changes.of_kind(own.offsets, lambda each, rows: (_rows_of(each[0], rows), each[1]),
                              changes.joined_offsets)
    replaced = changes.of_kind(own.replaced, _rows_of, changes.joined_tensors)
    return replace(own, added=added, offsets=offsets, replaced=replaced)


class _Rearranged:
    def __init__(self, own: Adapter, modules: Modules, checkpoint: Checkpoint):
        self._own, self._modules, self._checkpoint = own, modules, checkpoint

    def of_kind(self, given: Mapping[str, Any], split: Callable, join: Callable) -> dict[str, Any]:
        """Changes of one kind; changes of modules are rewritten as changes of stored tensors.

        split, join: functions of this kind.
        """
        found: dict[str, Any] = {}
        joined: dict[str, list[tuple[str, Location, Any]]] = {}
        for name, value in given.items():
            if self._modules.stored(name) is None and (pieces := self._modules.pieces(name)):
                self._expect(name, _rows(value), sum(len(rows) for _, rows in pieces))
                found |= {tensor: split(value, rows) for tensor, rows in pieces}
            elif self._modules.stored(name) is None and (location := self._modules.location(name)) is not None:
                self._expect(name, _rows(value), len(location.rows))
                joined.setdefault(location.tensor, []).append((name, location, value))
            else:
                found[name] = value
        for tensor, parts in joined.items():
            rows = np.concatenate([location.rows for _, location, _ in parts])
            if tensor in {self._modules.stored(name) for name in found} or len(np.unique(rows)) < len(rows):
                raise self._fail(f"{tensor!r} is changed twice")
            found[tensor] = join(tensor, parts)
        return found

    def joined_changes(self, tensor: str, parts: Sequence[tuple[str, Location, LowRank]]) -> LowRank:
        """One low-rank change of a matrix from changes of its modules."""
        *stack, n, k = self._modules.logical(tensor, parts[0][1].transposed)
        for name, _, change in parts:
            if change.a.shape[-1] != k or len(change.a.shape) > 2:
                raise self._fail(f"made for another model: {name!r} has {change.a.shape[-1]} columns, {tensor!r} in "
                                 f"{self._checkpoint.path} has {k}")
        experts = stack[0] if stack else 1
        ranks, spans = [0] * experts, []  # a module's matrix in the stack, and its range of ranks
        for _, location, change in parts:
            expert = int(location.rows[0]) // n
            spans.append((expert, slice(ranks[expert], ranks[expert] + change.rank)))
            ranks[expert] += change.rank
        rank = max(ranks)

        def a() -> np.ndarray:
            values = np.zeros((experts, rank, k), np.float32)
            for (expert, span), (_, _, change) in zip(spans, parts, strict=True):
                values[expert, span] = change.a.f32()
            return values.reshape(*stack, rank, k)

        def b() -> np.ndarray:
            values = np.zeros((experts, n, rank), np.float32)
            for (expert, span), (_, location, change) in zip(spans, parts, strict=True):
                values[expert, location.rows % n, span] = change.b.f32() * np.float32(change.factor)
            return values.reshape(*stack, n, rank)

        return LowRank(computed(tensor, (*stack, rank, k), a), computed(tensor, (*stack, n, rank), b), 1.0,
                       self._magnitude(tensor, parts, (*stack, n)), loose=True)

    def _magnitude(self, tensor: str, parts: Sequence[tuple[str, Location, LowRank]],
                   shape: tuple[int, ...]) -> Tensor | None:
        """The magnitude of all rows, NaN for rows without one; None if no module has one."""
        if all(change.magnitude is None for _, _, change in parts):
            return None

        def values() -> np.ndarray:
            magnitude = np.full(shape, np.nan, np.float32)
            for name, location, change in parts:
                if change.magnitude is not None:
                    part = change.magnitude.f32().reshape(-1)
                    check_finite(self._own.path, name, part)
                    magnitude.reshape(-1)[location.rows] = part
            return magnitude

        return computed(tensor, shape, values)

    def joined_offsets(self, tensor: str, parts: Sequence[tuple[str, Location, tuple[Tensor, float]]]
                       ) -> tuple[Tensor, float]:
        """One offset of a matrix's bias from offsets of its modules."""
        n = self._modules.logical(tensor, parts[0][1].transposed)[-2]

        def values() -> np.ndarray:
            found = np.zeros(n, np.float32)
            for _, location, (vector, factor) in parts:
                found[location.rows] = vector.f32() * np.float32(factor)
            return found

        return computed(tensor, (n,), values), 1.0

    def joined_tensors(self, name: str, parts: Sequence[tuple[str, Location, Tensor]]) -> Tensor:
        """The stored tensor `name` with the rows of some modules replaced."""
        first = parts[0][1]
        matrix = first.tensor.removesuffix(".bias") + ".weight"
        base = self._checkpoint.tensors[name] if first.present else None
        shape = (self._modules.logical(matrix)[-2],) if base is None else base.shape
        if first.transposed:
            raise self._fail(f"{parts[0][0]!r} replaces some columns of {name!r}, which is not supported")
        for part, _, tensor in parts:
            if len(shape) > 1 and tensor.columns != shape[-1]:
                raise self._fail(f"made for another model: {part!r} is {list(tensor.shape)}, {name!r} is "
                                 f"{list(shape)} in {self._checkpoint.path}")
        changed = {self._modules.stored(each) or getattr(self._modules.location(each), "tensor", None)
                   for each in self._own.added}
        if name in changed:
            raise self._fail(f"{parts[0][0]!r} replaces some rows of {name!r}, and another change concerns its "
                             f"other rows: this combination is not supported")

        def values() -> np.ndarray:
            width = shape[-1] if len(shape) > 1 else 1
            whole = np.zeros(shape, np.float32) if base is None else np.array(base.f32(), np.float32)
            found = whole.reshape(-1, width)
            for _, location, tensor in parts:
                found[location.rows] = tensor.f32().reshape(-1, width)
            return found.reshape(shape)

        return computed(name, shape, values)

    def _expect(self, name: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise self._fail(f"made for another model: {name!r} is for {found} rows, {self._checkpoint.path} has "
                             f"{wanted} of them")

    def _fail(self, message: str) -> FormatError:
        return FormatError(f"{self._own.path}: {message}")


def _rows(value: LowRank | Tensor | tuple[Tensor, float]) -> int:
    """The number of outputs of a change."""
    if isinstance(value, LowRank):
        return value.shape[-2]
    tensor = value if isinstance(value, Tensor) else value[0]
    return tensor.shape[-2] if len(tensor.shape) > 1 else tensor.shape[-1]


def _rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    """Rows of a matrix, or elements of a vector."""
    count, selected = len(rows), slice(rows.start, rows.stop, rows.step)
    if len(tensor.shape) == 1:
        return computed(tensor.name, (count,), lambda: tensor.f32()[selected])
    return computed(tensor.name, (*tensor.shape[:-2], count, tensor.shape[-1]), lambda: tensor.f32()[..., selected, :])


def rows_of_change(change: LowRank, rows: Rows) -> LowRank:
    """The part of a change that is for some rows of its matrix."""
    magnitude = change.magnitude
    if magnitude is not None:
        flat = replace(magnitude, shape=(magnitude.rows * magnitude.columns,))
        magnitude = _rows_of(flat, rows)
    return replace(change, b=_rows_of(change.b, rows), magnitude=magnitude)
