"""The hand that writes a network: makes buffers and weights, and appends steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numflow.errors import SpecError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.build.names import STACK_PREFIX, TensorNames
from numflow.ops import Buffer, Cache, Network, Part, State, Step, View, Weight
from numflow.spec.resolve import Resolved

KEPT = "kept"  # name of rows of a batch that follow from its tokens (network/batch.py)


class Builder:
    """Collects the parts of a network. Blocks call `linear`, `norm`, `emit`; `network` closes it."""

    def __init__(self, resolved: Resolved, names: TensorNames, checkpoint: Checkpoint):
        self.resolved, self.names, self.checkpoint = resolved, names, checkpoint
        self.buffers: dict[str, Buffer] = {}
        self.weights: dict[str, Weight] = {}
        self.caches: dict[str, Cache] = {}
        self.states: dict[str, State] = {}
        self.entries: dict[str, list[Step]] = {}
        self.outputs: dict[str, View] = {}
        self.inputs: dict[str, View] = {}
        self.taps: Sequence[int] | None = None  # see residuals.py
        self.entry = "main"
        self._whole: dict[tuple, str] = {}
        names.meant = self._meant
        naming = resolved.spec.section(checkpoint.naming)
        transposed = naming.get("transposed", resolved.spec.table.get("transposed", []))
        self.transposed = {transposed} if isinstance(transposed, str) else set(transposed)

    # Where we stand: entry, stack (of STACK_PREFIX) and layer are set by the stack being built.
    stack: str = ""
    layer: int | None = None

    @property
    def prefix(self) -> str:
        """ "blk.3." or "enc.blk.3.", how labels, weights and caches of this place begin."""
        return self.prefix_of(self.layer)

    def prefix_of(self, layer: int | None) -> str:
        """The same of another layer of this stack."""
        stack = STACK_PREFIX[self.stack]
        return stack if layer is None else f"{stack}blk.{layer}."

    def _meant(self, layer: int | None, stack: str) -> Mapping[str, int | str]:
        """Words in braces in names of tensors, and what stands for them, beside the numbers of layer and expert."""
        words: dict[str, int | str] = {}
        if language := self.resolved.option("stack", "language", None, stack):
            words["{language}"] = language
        if layer is not None and self.resolved.option("side", "enabled", layer, stack):
            words |= {f"{{{key}}}": self.resolved.option("side", key, layer, stack) for key in ("owner", "use")}
        return words

    @property
    def where(self) -> str:
        """Beginning of messages on the spec's values: the checkpoint's path and the spec's name."""
        return f"{self.checkpoint.path} and spec {self.resolved.spec.name!r}"

    def with_keys(self, error: SpecError) -> SpecError:
        """The same error, with the keys of the configuration that its options come from."""
        options = [option.split(".") for option in error.options]
        found = set().union(*(self.resolved.keys_of(section, key, self.layer, self.stack) for section, key in options))
        if not found:
            return error
        return SpecError(f"{error} (from {', '.join(sorted(found))} of {self.resolved.file})")

    def option(self, section: str, key: str) -> Any:
        return self.resolved.option(section, key, self.layer, self.stack)

    def has(self, name: str) -> bool:
        return self.names.has(name, self.layer, self.stack)

    def view(self, buffer: str, width: int, rows: str = "tokens", dtype: str = "f32") -> View:
        """The first `width` columns of a buffer, made or widened as needed; encoder entries have their own."""
        name = buffer if self.entry == "main" else f"{self.entry}.{buffer}"
        old = self.buffers.get(name)
        self.buffers[name] = Buffer(name, rows, max(width, old.width if old else 0), dtype)
        return View(name, 0, width)

    def given(self, name: str, width: int) -> View:
        """Rows that the batch brings."""
        view = self.inputs[name] = self.view(f"given.{name}", width)
        return view

    def state(self, label: str, *shape: int, axis: int = 0, dtype: str = "f32") -> str:
        """Memory of a recurrent step that stands here; its name."""
        state = State(f"{self.prefix}{label}", shape, axis, dtype)
        self.states[state.name] = state
        return state.name

    def emit(self, op: str, inputs: tuple[View, ...], outputs: tuple[View, ...], label: str,
             weights: Mapping[str, str] | None = None, **params: Any) -> None:
        step = Step(op, inputs, outputs, dict(weights or {}), params, self.prefix + label)
        self.entries.setdefault(self.entry, []).append(step)

    # Weights

    def constant(self, name: str, value: np.ndarray) -> str:
        self.weights[name] = Weight(name, value.shape, constant=value, types=("F32",))
        return name

    def vector(self, module: str, role: str, width: int | None = None, rows: Any = None, add: float = 0.0,
               flat: bool = False, suffix: str = "", written: tuple[int, ...] = ()) -> str:
        """A vector weight of `width` elements (any, if None); `rows` picks elements of the stored one.

        flat: the stored tensor may have any shape. written: its shape in GGUF files that are written, if not [width].
        """
        tensor = self.names.need(module, role, self.layer, self.stack)
        if not tensor.shape:
            raise self._wrong_shape(tensor, f"[{'any' if width is None else width}]")
        count = int(np.prod(tensor.shape)) if flat else tensor.shape[-1]
        found = count if rows is None else len(rows)
        if (len([n for n in tensor.shape if n != 1]) > 1 and not flat) or (width is not None and found != width):
            raise self._wrong_shape(tensor, f"[{width}]")
        return self._add(Weight(f"{self.prefix}{module}{suffix}.{role}", (found,), (Part(tensor.name, rows),), add=add,
                                types=(tensor.type.name,)))

    def matrix(self, module: str, rows: int | None, columns: int, select: Any = None, suffix: str = "",
               normalize_rows: bool = False) -> str:
        """A matrix [rows, columns]; `select` are the stored rows it consists of, else all."""
        tensor = self.names.need(module, "weight", self.layer, self.stack)
        transpose = module in self.transposed and not tensor.turned
        stored = (tensor.columns, tensor.rows) if transpose else (tensor.rows, tensor.columns)
        expected = stored[0] if rows is None else rows
        if stored[1] != columns or not _covers(stored[0], expected, select):
            wanted = expected if select is None else f">= {max(int(select[0]), int(select[-1])) + 1}"
            raise self._wrong_shape(tensor, f"[{columns}, {wanted}]" if transpose else f"[{wanted}, {columns}]")
        part = Part(tensor.name, select, transpose)
        return self._add(Weight(f"{self.prefix}{module}{suffix}.weight", (expected, columns), (part,),
                                normalize_rows=normalize_rows, types=(tensor.type.name,)))

    def matrix_across(self, modules: Sequence[str], module: str, start: int, rows: int, columns: int) -> str:
        """Matrix [rows, columns] of a module: rows from `start` on of the tensors of `modules`, one below the other."""
        parts, types, begin = [], [], 0
        for tensor in (self.names.need(name, "weight", self.layer, self.stack) for name in modules):
            if tensor.columns != columns:
                raise self._wrong_shape(tensor, f"[{tensor.rows}, {columns}]")
            own = range(max(start - begin, 0), min(start + rows - begin, tensor.rows))
            begin += tensor.rows
            if len(own):
                parts.append(Part(tensor.name, own))
                types.append(tensor.type.name)
        return self._add(Weight(f"{self.prefix}{module}.weight", (rows, columns), tuple(parts), types=tuple(types)))

    def stack_of_matrices(self, module: str, groups: int, rows: int, columns: int, select: Any = None,
                          transpose: bool = False, suffix: str = "") -> str:
        """`groups` matrices [rows, columns]: one stored stack [groups, N, columns], one tensor of them one below the
        other, or one tensor per group.

        select: rows taken of each stored matrix, None = all.
        """
        whole, tensors = self._grouped_tensors(module, "weight", groups)
        count = groups if whole else 1
        parts: list[Part] = []
        for tensor in tensors:
            below = whole and groups > 1 and len(tensor.shape) == 2 and tensor.rows % groups == 0
            shape = ((groups, tensor.rows // groups, tensor.columns) if below else
                     tensor.shape if len(tensor.shape) == 3 else (1, *tensor.shape))
            # A stack that only fits as it stands is taken so, whatever the spec says of others.
            other_way = transpose and not tensor.turned and not (len(shape) == 3 and shape[1] != columns == shape[2])
            stored = (shape[0], shape[2], shape[1]) if other_way else shape
            if len(shape) != 3 or stored[0] != count or stored[2] != columns or not _covers(stored[1], rows, select):
                raise self._wrong_shape(tensor, f"{[count] if whole else ''}[{rows}, {columns}]")
            chosen = select
            if below and other_way:
                if select is not None:
                    raise self._wrong_shape(tensor, f"[{count}][{stored[1]}, {columns}]")
                parts.extend(Part(tensor.name, range(columns * group, columns * (group + 1)), turned=True)
                             for group in range(groups))
                continue
            if select is not None and count > 1:
                chosen = (np.arange(count)[:, None] * stored[1] + np.asarray(select)[None]).reshape(-1)
            parts.append(Part(tensor.name, chosen, other_way))
        return self._add(Weight(f"{self.prefix}{module}{suffix}.weight", (groups * rows, columns), tuple(parts),
                                groups=groups, types=tuple(self.checkpoint.tensors[part.tensor].type.name
                                                           for part in parts)))

    def head_matrices(self, module: str, heads: int, size: int, rows: range, columns: int, suffix: str,
                      turned: bool = False) -> str:
        """A matrix for each head: `rows` of the `size` stored rows that a head has; turned: [columns, rows]."""
        self.expect_rows(module, heads * size)
        name = self.matrix(module, heads * size, columns, range(heads * size), suffix)
        whole = self.weights[name]
        parts = tuple(Part(whole.parts[0].tensor, range(size * head + rows.start, size * head + rows.stop),
                           turned=turned) for head in range(heads))
        shape = (heads * columns, len(rows)) if turned else (heads * len(rows), columns)
        self.weights[name] = Weight(name, shape, parts, groups=heads, types=whole.types * heads)
        return name

    def projected(self, name: str, roles: Mapping[str, tuple[str, str, tuple[int, ...]]], shape: tuple[int, int],
                  groups: int, eps: float) -> str:
        """A table through a matrix (Weight.project); roles: module and role of each part, and the shape it has."""
        parts, types = [], []
        for module, role, expected in roles.values():
            tensor = self.names.need(module, role, self.layer, self.stack)
            if tuple(tensor.shape) != expected:
                raise self._wrong_shape(tensor, f"{list(expected)}")
            parts.append(Part(tensor.name))
            types.append(tensor.type.name)
        return self._add(Weight(f"{self.prefix}{name}", shape, tuple(parts), groups=groups, types=tuple(types),
                                project=tuple(roles), eps=eps))

    def stack_of_vectors(self, module: str, role: str, groups: int, rows: int, select: Any = None, suffix: str = "",
                         add: float = 0.0) -> str:
        """`groups` vectors of `rows` elements, stored as one tensor [groups, rows] or one per group."""
        whole, tensors = self._grouped_tensors(module, role, groups)
        parts = []
        for tensor in tensors:
            stored, count = tensor.columns, groups if whole else 1
            if tensor.rows != count or not _covers(stored, rows, select):
                raise self._wrong_shape(tensor, f"[{count}, {rows}]")
            chosen = None if select is None else (
                np.arange(count)[:, None] * stored + np.asarray(select)[None]).reshape(-1)
            parts.append(Part(tensor.name, chosen))
        return self._add(Weight(f"{self.prefix}{module}{suffix}.{role}", (groups * rows,), tuple(parts), groups=groups,
                                add=add, types=tuple(t.type.name for t in tensors)))

    def _grouped_tensors(self, module: str, role: str, groups: int) -> tuple[bool, list[Tensor]]:
        """Whether all groups are in one tensor; that one, or one for each."""
        place = (module, role, self.layer, self.stack)
        whole = self.names.find(*place)
        return (True, [whole]) if whole else (False, [self.names.need(*place, group) for group in range(groups)])

    def expect_rows(self, module: str, count: int) -> None:
        """Before rows are chosen from a stored matrix one by one: it has so many, so that the choice is no larger."""
        tensor = self.names.need(module, "weight", self.layer, self.stack)
        stored = tensor.columns if module in self.transposed and not tensor.turned else tensor.rows
        if count > stored:
            raise self._wrong_shape(tensor, f">= {count} rows")

    def _add(self, weight: Weight) -> str:
        """Keep a weight; one made of the same whole tensors as an earlier one is that one (shared embeddings), and so
        is one made of the same rows for the same module (layers that run again)."""
        if all(part.rows is None or isinstance(part.rows, range) for part in weight.parts):
            some = any(part.rows is not None for part in weight.parts)  # of which others may be made by a later change
            same = (*((part.tensor, part.rows) for part in weight.parts), weight.shape, weight.add,
                    weight.normalize_rows, weight.name.removeprefix(self.prefix) if some else "")
            first = self._whole.setdefault(same, weight.name)
            if first != weight.name:
                return first
        self.weights[weight.name] = weight
        return weight.name

    def _wrong_shape(self, tensor: Tensor, expected: str) -> SpecError:
        return SpecError(f"{self.checkpoint.path}: tensor {tensor.name!r} is {list(tensor.shape)}, "
                         f"but spec {self.resolved.spec.name!r} expects {expected}")

    def number(self, module: str) -> float:
        """A number that the file has as a tensor, read now: it becomes a parameter of a step.

        Raises:
            SpecError: the tensor is missing, holds more than one number, or none that is finite.
        """
        return float(self.numbers(module, 1)[0])

    def numbers(self, module: str, count: int) -> np.ndarray:
        """So many numbers f32 [count] that the file has as a tensor, read now.

        Raises:
            SpecError: the tensor is missing, holds another count, or one that is not finite.
        """
        tensor = self.names.need(module, "weight", self.layer, self.stack)
        if int(np.prod(tensor.shape)) != count:
            raise self._wrong_shape(tensor, f"[{count}]")
        values = np.array(tensor.f32().reshape(-1), np.float32)
        if not np.isfinite(values).all():
            wrong = values[~np.isfinite(values)][0]
            raise SpecError(f"{self.checkpoint.path}: tensor {tensor.name!r}: expected a finite number, found {wrong}")
        return values

    # Steps that many blocks use

    def linear(self, module: str, x: View, y: View, select: Any = None, suffix: str = "", biased: str = "") -> View:
        """y = x W^T + b, with a bias where the file has one. biased: whose bias it is if the matrix has none."""
        weights = {"weight": self.matrix(module, y.width, x.width, select, suffix)}
        if self.has(f"{module}.bias"):
            weights["bias"] = self.vector(module, "bias", y.width, select, suffix=suffix)
        elif biased and self.has(f"{biased}.bias"):
            weights["bias"] = self.vector(biased, "bias", y.width)
        self.emit("linear", (x,), (y,), module + suffix, weights)
        if self.option("side", "rank") and self.has(f"{module}_low.weight"):
            self._add_low_rank(module, x, y, select, suffix)
        return y

    def _add_low_rank(self, module: str, x: View, y: View, select: Any, suffix: str) -> None:
        """y += up (down x), of matrices that the model has for this use of another that layers share."""
        low = self.linear(f"{module}_low", x, self.view("low", self.option("side", "rank")))
        up = self.linear(f"{module}_low_up", low, self.view("low_up", y.width), select, suffix)
        self.emit("add", (y, up), (y,), f"{module}{suffix}_low_add")

    def norm(self, module: str, x: View, y: View, groups: int = 1, eps: float | None = None, kind: str = "",
             offset: float | None = None) -> View:
        """RMS or layer norm as the spec says; weights are optional only if the file has none anywhere."""
        kind = kind or self.option("norm", "kind")
        eps, offset = (self.option("norm", key) if given is None else given
                       for key, given in (("eps", eps), ("offset", offset)))
        weights = {"weight": self._norm_vector(module, "weight", groups, x, offset)} if self._weighted(module) else {}
        if kind == "layer" and self.has(f"{module}.bias"):
            weights["bias"] = self._norm_vector(module, "bias", groups, x)
        self.emit(f"{kind}_norm", (x,), (y,), module, weights, eps=eps, groups=groups)
        return y

    def _norm_vector(self, module: str, role: str, groups: int, x: View, add: float = 0.0) -> str:
        """A norm's weight or bias: one for x, one per group in one tensor, or a tensor for each group."""
        if any(self.names.candidates(module, role, self.layer, self.stack)):
            shape, one = self.names.need(module, role, self.layer, self.stack).shape, x.width // groups
            width = one if groups > 1 and np.prod(shape) == one else x.width
            return self.vector(module, role, width, add=add, flat=groups > 1)
        return self.stack_of_vectors(module, role, groups, x.width // groups, add=add)

    def _weighted(self, module: str) -> bool:
        """Norms without weights exist (a spec says so by naming no tensor for them, or of all of a file's)."""
        place = (module, "weight", self.layer, self.stack)
        named = any(self.names.candidates(*place)) or any(self.names.candidates(*place, 0))
        return named and self.option("norm", "weighted")

    def network(self, name: str, facts: Mapping[str, Any]) -> Network:
        return Network(name, {key: tuple(steps) for key, steps in self.entries.items()}, self.buffers, self.weights,
                       self.caches, self.outputs, dict(facts), self.states, self.inputs)


def _covers(stored: int, rows: int, select: Any) -> bool:
    """Whether `stored` rows are the ones wanted, or have all that `select`, in order or backwards, takes of them."""
    if select is None:
        return stored == rows
    return len(select) == rows and (not rows or max(int(select[0]), int(select[-1])) < stored)
