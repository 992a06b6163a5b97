"""Changes of modules that an adapter has cut otherwise than a checkpoint: query, key and value apart where the file has
one matrix of them, or the other way round.

    rearranged(adapter, names, built, checkpoint)      # the same adapter, for the matrices as they are stored

Rows of a matrix are outputs, so a change of some of its modules is B with rows of zeros for the others, and A with the
rows of all; a change of several modules at once is cut by the rows of B. Both are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from numflow.errors import FormatError
from numflow.formats.adapter import Adapter, LowRank, check_finite, computed
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.adapters.factors import multiplied
from numflow.network.adapters.modules import Home, Modules, Rows
from numflow.network.build.names import TensorNames
from numflow.ops import Network


def rearranged(own: Adapter, stored: Callable[[str], str | None], short: Callable[[str], str], names: TensorNames,
               built: Network, checkpoint: Checkpoint, head: Mapping[str, str]) -> Adapter:
    """The adapter with changes of the matrices that the checkpoint has, where its modules are cut otherwise, and with
    what factors make of them in their places.

    stored: the tensor that a name is for, None if there is none. short: a name without prefix. head: names of an output
    matrix that is a table, which it has.

    Raises:
        FormatError: a module's change does not fit its rows, or rows are changed twice.
    """
    modules = Modules(stored, short, names, built, checkpoint, head)
    own = multiplied(own, modules, checkpoint)
    cutter = _Cutter(own, modules, checkpoint)
    added = cutter.all(own.added, rows_of_change, cutter.joined_changes)
    offsets = cutter.all(own.offsets, lambda each, rows: (_rows_of(each[0], rows), each[1]), cutter.joined_offsets)
    replaced = cutter.all(own.replaced, _rows_of, cutter.joined_tensors)
    return replace(own, added=added, offsets=offsets, replaced=replaced)


class _Cutter:
    def __init__(self, own: Adapter, modules: Modules, checkpoint: Checkpoint):
        self._own, self._modules, self._checkpoint = own, modules, checkpoint

    def all(self, given: Mapping[str, Any], cut: Callable, join: Callable) -> dict[str, Any]:
        """Changes of one kind by the names of stored tensors, where they had others."""
        found: dict[str, Any] = {}
        joined: dict[str, list[tuple[str, Home, Any]]] = {}
        for name, value in given.items():
            if self._modules.stored(name) is None and (pieces := self._modules.pieces(name)):
                self._expect(name, _rows(value), sum(len(rows) for _, rows in pieces))
                found |= {place: cut(value, rows) for place, rows in pieces}
            elif self._modules.stored(name) is None and (home := self._modules.home(name)) is not None:
                self._expect(name, _rows(value), len(home.rows))
                joined.setdefault(home.tensor, []).append((name, home, value))
            else:
                found[name] = value
        for place, parts in joined.items():
            every = np.concatenate([home.rows for _, home, _ in parts])
            if place in {self._modules.stored(name) for name in found} or len(np.unique(every)) < len(every):
                raise self._fail(f"{place!r} is changed twice")
            found[place] = join(place, parts)
        return found

    def joined_changes(self, place: str, parts: Sequence[tuple[str, Home, LowRank]]) -> LowRank:
        """One change of low rank, of a matrix of which each part has some rows."""
        *stack, n, k = self._modules.logical(place, parts[0][1].transposed)
        for name, _, change in parts:
            if change.a.shape[-1] != k or len(change.a.shape) > 2:
                raise self._fail(f"made for another model: {name!r} has {change.a.shape[-1]} columns, {place!r} in "
                                 f"{self._checkpoint.path} has {k}")
        count = stack[0] if stack else 1
        ranks, spans = [0] * count, []
        for _, home, change in parts:
            at = int(home.rows[0]) // n
            spans.append((at, slice(ranks[at], ranks[at] + change.rank)))
            ranks[at] += change.rank
        most = max(ranks)

        def a() -> np.ndarray:
            values = np.zeros((count, most, k), np.float32)
            for (at, own), (_, _, change) in zip(spans, parts, strict=True):
                values[at, own] = change.a.f32()
            return values.reshape(*stack, most, k)

        def b() -> np.ndarray:
            values = np.zeros((count, n, most), np.float32)
            for (at, own), (_, home, change) in zip(spans, parts, strict=True):
                values[at, home.rows % n, own] = change.b.f32() * np.float32(change.factor)
            return values.reshape(*stack, n, most)

        return LowRank(computed(place, (*stack, most, k), a), computed(place, (*stack, n, most), b), 1.0,
                       self._lengths(place, parts, (*stack, n)), loose=True)

    def _lengths(self, place: str, parts: Sequence[tuple[str, Home, LowRank]], shape: tuple[int, ...]) -> Tensor | None:
        """Lengths of all rows: those that no part with lengths has are as long as they come."""
        if all(change.magnitude is None for _, _, change in parts):
            return None

        def values() -> np.ndarray:
            lengths = np.full(shape, np.nan, np.float32)
            for name, home, change in parts:
                if change.magnitude is not None:
                    own = change.magnitude.f32().reshape(-1)
                    check_finite(self._own.path, name, own)
                    lengths.reshape(-1)[home.rows] = own
            return lengths

        return computed(place, shape, values)

    def joined_offsets(self, place: str, parts: Sequence[tuple[str, Home, tuple[Tensor, float]]]
                       ) -> tuple[Tensor, float]:
        """One vector for the bias of a matrix of which each part has some rows."""
        n = self._modules.logical(place, parts[0][1].transposed)[-2]

        def values() -> np.ndarray:
            found = np.zeros(n, np.float32)
            for _, home, (vector, factor) in parts:
                found[home.rows] = vector.f32() * np.float32(factor)
            return found

        return computed(place, (n,), values), 1.0

    def joined_tensors(self, place: str, parts: Sequence[tuple[str, Home, Tensor]]) -> Tensor:
        """The stored tensor with other rows where parts have them."""
        first = parts[0][1]
        matrix = first.tensor.removesuffix(".bias") + ".weight"
        base = self._checkpoint.tensors[place] if first.there else None
        shape = (self._modules.logical(matrix)[-2],) if base is None else base.shape
        if first.transposed:
            raise self._fail(f"{parts[0][0]!r} is in place of some columns of {place!r}: this is not read")
        for name, _, tensor in parts:
            if len(shape) > 1 and tensor.columns != shape[-1]:
                raise self._fail(f"made for another model: {name!r} is {list(tensor.shape)}, {place!r} is "
                                 f"{list(shape)} in {self._checkpoint.path}")
        places = {self._modules.stored(name) or getattr(self._modules.home(name), "tensor", None)
                  for name in self._own.added}
        if place in places:
            raise self._fail(f"{parts[0][0]!r} is in place of some rows of {place!r}, others of which are changed: "
                             f"this is not read")

        def values() -> np.ndarray:
            width = shape[-1] if len(shape) > 1 else 1
            whole = np.zeros(shape, np.float32) if base is None else np.array(base.f32(), np.float32)
            found = whole.reshape(-1, width)
            for _, home, tensor in parts:
                found[home.rows] = tensor.f32().reshape(-1, width)
            return found.reshape(shape)

        return computed(place, shape, values)

    def _expect(self, name: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise self._fail(f"made for another model: {name!r} is for {found} rows, {self._checkpoint.path} has "
                             f"{wanted} of them")

    def _fail(self, message: str) -> FormatError:
        return FormatError(f"{self._own.path}: {message}")


def _rows(value: LowRank | Tensor | tuple[Tensor, float]) -> int:
    """Outputs of a change."""
    if isinstance(value, LowRank):
        return value.shape[-2]
    tensor = value if isinstance(value, Tensor) else value[0]
    return tensor.shape[-2] if len(tensor.shape) > 1 else tensor.shape[-1]


def _rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    """Some outputs of a matrix or a vector."""
    count, some = len(rows), slice(rows.start, rows.stop, rows.step)
    if len(tensor.shape) == 1:
        return computed(tensor.name, (count,), lambda: tensor.f32()[some])
    return computed(tensor.name, (*tensor.shape[:-2], count, tensor.shape[-1]), lambda: tensor.f32()[..., some, :])


def rows_of_change(change: LowRank, rows: Rows) -> LowRank:
    """A change of some outputs of a matrix."""
    lengths = change.magnitude
    if lengths is not None:
        flat = replace(lengths, shape=(lengths.rows * lengths.columns,))
        lengths = _rows_of(flat, rows)
    return replace(change, b=_rows_of(change.b, rows), magnitude=lengths)
