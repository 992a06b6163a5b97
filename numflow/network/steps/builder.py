"""Builder of a network: declares buffers, weights, caches and states, and appends steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numflow.errors import SpecError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.steps.names import STACK_PREFIX, TensorNames
from numflow.ops import Buffer, Cache, Network, Part, State, Step, View, Weight
from numflow.spec.resolve import Resolved

KEPT = "kept"  # network input that executors compute from the token ids (network/batch.py, kept_rows)


class Builder:
    """Collects the parts of a network. Blocks call `linear`, `norm` and `emit`; `network` returns the result."""

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
        names.replacements = self._replacements
        naming = resolved.spec.section(checkpoint.naming)
        transposed = naming.get("transposed", resolved.spec.table.get("transposed", []))
        self.transposed = {transposed} if isinstance(transposed, str) else set(transposed)

    # Current position: entry, stack (a key of STACK_PREFIX) and layer are set by the function that builds the stack.
    stack: str = ""
    layer: int | None = None

    @property
    def prefix(self) -> str:
        """ "blk.3." or "enc.blk.3.": prefix of labels, weights and caches at the current position."""
        return self.prefix_of(self.layer)

    def prefix_of(self, layer: int | None) -> str:
        """The prefix for another layer of this stack."""
        stack = STACK_PREFIX[self.stack]
        return stack if layer is None else f"{stack}blk.{layer}."

    def _replacements(self, layer: int | None, stack: str) -> Mapping[str, int | str]:
        """Replacements of words in braces in tensor names, except {layer} and {expert}."""
        words: dict[str, int | str] = {}
        if language := self.resolved.option("stack", "language", None, stack):
            words["{language}"] = language
        if layer is not None and self.resolved.option("side", "enabled", layer, stack):
            words |= {f"{{{key}}}": self.resolved.option("side", key, layer, stack) for key in ("owner", "use")}
        return words

    @property
    def where(self) -> str:
        """Prefix of error messages: the checkpoint's path and the spec's name."""
        return f"{self.checkpoint.path} and spec {self.resolved.spec.name!r}"

    def with_keys(self, error: SpecError) -> SpecError:
        """The error with the configuration keys that its options come from."""
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
        """The first `width` columns of a buffer, which is declared or widened. Other entries than "main" have other
        buffers."""
        name = buffer if self.entry == "main" else f"{self.entry}.{buffer}"
        old = self.buffers.get(name)
        self.buffers[name] = Buffer(name, rows, max(width, old.width if old else 0), dtype)
        return View(name, 0, width)

    def given(self, name: str, width: int) -> View:
        """Declare a network input (Batch.given) [T, width]."""
        view = self.inputs[name] = self.view(f"given.{name}", width)
        return view

    def state(self, label: str, *shape: int, axis: int = 0, dtype: str = "f32") -> str:
        """Declare the state of a recurrent step at the current position; its name."""
        state = State(f"{self.prefix}{label}", shape, axis, dtype)
        self.states[state.name] = state
        return state.name

    def emit(self, op: str, inputs: tuple[View, ...], outputs: tuple[View, ...], label: str,
             weights: Mapping[str, str] | None = None, **params: Any) -> None:
        step = Step(op, inputs, outputs, dict(weights or {}), params, self.prefix + label)
        self.entries.setdefault(self.entry, []).append(step)

    # Weights

    def constant(self, name: str, value: np.ndarray) -> str:
        """Declare a weight with this value; its name."""
        self.weights[name] = Weight(name, value.shape, constant=value, types=("F32",))
        return name

    def vector(self, module: str, role: str, width: int | None = None, rows: Any = None, add: float = 0.0,
               flat: bool = False, suffix: str = "", written: tuple[int, ...] = ()) -> str:
        """Declare a vector of `width` elements (None: any number); `rows` are indices into the stored tensor.

        flat: the stored tensor may have any shape. written: its shape in written GGUF files, if not [width].
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
        """Declare a matrix [rows, columns]. select: indices of the stored rows, None for all."""
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
        """Declare a matrix [rows, columns]: rows from `start` on of the stacked tensors of `modules`."""
        parts, types, begin = [], [], 0
        for tensor in (self.names.need(name, "weight", self.layer, self.stack) for name in modules):
            if tensor.columns != columns:
                raise self._wrong_shape(tensor, f"[{tensor.rows}, {columns}]")
            select = range(max(start - begin, 0), min(start + rows - begin, tensor.rows))
            begin += tensor.rows
            if len(select):
                parts.append(Part(tensor.name, select))
                types.append(tensor.type.name)
        return self._add(Weight(f"{self.prefix}{module}.weight", (rows, columns), tuple(parts), types=tuple(types)))

    def stacked_rows(self, module: str, rows: int, columns: int) -> str:
        """Declare a matrix of all rows, `rows` or more, of one tensor, or of several that are numbered from 0 on."""
        key = (module, "weight", self.layer, self.stack)
        whole = self.names.find(*key)
        tensors = [whole or self.names.need(*key, 0)]
        while whole is None and (tensor := self.names.find(*key, len(tensors))):
            tensors.append(tensor)
        for tensor in tensors:
            if tensor.columns != columns or sum(each.rows for each in tensors) < rows:
                raise self._wrong_shape(tensor, f"[>= {rows} in all, {columns}]")
        return self._add(Weight(f"{self.prefix}{module}.weight", (sum(each.rows for each in tensors), columns),
                                tuple(Part(each.name) for each in tensors), types=tuple(t.type.name for t in tensors)))

    def stack_of_matrices(self, module: str, groups: int, rows: int, columns: int, select: Any = None,
                          transpose: bool = False, suffix: str = "") -> str:
        """Declare `groups` matrices [rows, columns], stored as one tensor [groups, N, columns], one tensor
        [groups * N, columns], or one tensor per group.

        select: indices of the rows taken from each stored matrix, None for all.
        """
        whole, tensors = self._grouped_tensors(module, "weight", groups)
        count = groups if whole else 1
        parts: list[Part] = []
        for tensor in tensors:
            flat = whole and groups > 1 and len(tensor.shape) == 2 and tensor.rows % groups == 0
            shape = ((groups, tensor.rows // groups, tensor.columns) if flat else
                     tensor.shape if len(tensor.shape) == 3 else (1, *tensor.shape))
            # A stack whose shape only fits without transposing is not transposed, whatever the spec says.
            other_way = transpose and not tensor.turned and not (len(shape) == 3 and shape[1] != columns == shape[2])
            stored = (shape[0], shape[2], shape[1]) if other_way else shape
            if len(shape) != 3 or stored[0] != count or stored[2] != columns or not _covers(stored[1], rows, select):
                raise self._wrong_shape(tensor, f"{[count] if whole else ''}[{rows}, {columns}]")
            chosen = select
            if flat and other_way:
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
        """Declare a matrix per head: `rows` of the `size` stored rows of each head. turned: transposed, [columns,
        rows]."""
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
        """Declare a table projected by a matrix (Weight.project). roles: module, role and shape of each part."""
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
        """Declare `groups` vectors of `rows` elements, stored as one tensor [groups, rows] or one per group."""
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
        """Whether one tensor has all groups; and that tensor, or a tensor per group."""
        key = (module, role, self.layer, self.stack)
        whole = self.names.find(*key)
        return (True, [whole]) if whole else (False, [self.names.need(*key, group) for group in range(groups)])

    def expect_rows(self, module: str, count: int, exactly: bool = False) -> None:
        """Check that a stored matrix has at least `count` rows, before an index array of that size is allocated.

        exactly: no more rows either, as where every row is read.
        """
        tensor = self.names.need(module, "weight", self.layer, self.stack)
        stored = tensor.columns if module in self.transposed and not tensor.turned else tensor.rows
        if count > stored or (exactly and count != stored):
            raise self._wrong_shape(tensor, f"{'' if exactly else '>= '}{count} rows")

    def _add(self, weight: Weight) -> str:
        """Add a weight; its name. An equal earlier weight is reused: of the same whole tensors (tied embeddings), or of
        the same rows for the same module (layers that run again)."""
        if all(part.rows is None or isinstance(part.rows, range) for part in weight.parts):
            partial = any(part.rows is not None for part in weight.parts)  # a later pass may cut these rows
            key = (*((part.tensor, part.rows) for part in weight.parts), weight.shape, weight.add,
                    weight.normalize_rows, weight.name.removeprefix(self.prefix) if partial else "")
            first = self._whole.setdefault(key, weight.name)
            if first != weight.name:
                return first
        self.weights[weight.name] = weight
        return weight.name

    def _wrong_shape(self, tensor: Tensor, expected: str) -> SpecError:
        return SpecError(f"{self.checkpoint.path}: tensor {tensor.name!r} is {list(tensor.shape)}, "
                         f"but spec {self.resolved.spec.name!r} expects {expected}")

    def number(self, module: str) -> float:
        """A scalar tensor, read now, because it becomes a parameter of a step.

        Raises:
            SpecError: the tensor is missing, has more than one element, or is not finite.
        """
        return float(self.numbers(module, 1)[0])

    def numbers(self, module: str, count: int) -> np.ndarray:
        """A tensor of `count` elements, read now: f32 [count].

        Raises:
            SpecError: the tensor is missing, has another number of elements, or one that is not finite.
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
        """y = x W^T + b, with a bias where the file has one. biased: module whose bias is used if `module` has none."""
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
        """y += up (down x), the low-rank matrices of this layer beside a shared matrix."""
        low = self.linear(f"{module}_low", x, self.view("low", self.option("side", "rank")))
        up = self.linear(f"{module}_low_up", low, self.view("low_up", y.width), select, suffix)
        self.emit("add", (y, up), (y,), f"{module}{suffix}_low_add")

    def norm(self, module: str, x: View, y: View, groups: int = 1, eps: float | None = None, kind: str = "",
             offset: float | None = None, weights_first: bool = False) -> View:
        """y = RMS, layer or L2 norm of x, by section norm unless the arguments say otherwise. weights_first: weights
        multiply x, not y."""
        kind = kind or self.option("norm", "kind")
        eps, offset = (self.option("norm", key) if given is None else given
                       for key, given in (("eps", eps), ("offset", offset)))
        if kind == "l2":  # |x| = sqrt(columns) * rms(x)
            size = x.width // groups
            unit = self.constant(f"unit.{size}", np.full(size, size ** -0.5, np.float32))
            self.emit("rms_norm", (x,), (y,), module, {"weight": unit}, eps=eps / size, groups=groups)
            return y
        weights = {"weight": self._norm_vector(module, "weight", groups, x, offset)} if self._weighted(module) else {}
        if weights_first and weights:
            self.emit("scale", (x,), (y,), f"{module}_weights", {"weight": weights.pop("weight")}, scale=1.0)
            x = y
        if kind == "layer" and self.has(f"{module}.bias"):
            weights["bias"] = self._norm_vector(module, "bias", groups, x)
        self.emit(f"{kind}_norm", (x,), (y,), module, weights, eps=eps, groups=groups)
        return y

    def _norm_vector(self, module: str, role: str, groups: int, x: View, add: float = 0.0) -> str:
        """A norm's weight or bias: a vector for all of x, a tensor of one group's or all groups' values, or a tensor
        per group."""
        if any(self.names.candidates(module, role, self.layer, self.stack)):
            shape, one = self.names.need(module, role, self.layer, self.stack).shape, x.width // groups
            width = one if groups > 1 and np.prod(shape) == one else x.width
            return self.vector(module, role, width, add=add, flat=groups > 1)
        return self.stack_of_vectors(module, role, groups, x.width // groups, add=add)

    def _weighted(self, module: str) -> bool:
        """Whether a norm has weights: norm.weighted holds, and the spec names a tensor for the module."""
        key = (module, "weight", self.layer, self.stack)
        named = any(self.names.candidates(*key)) or any(self.names.candidates(*key, 0))
        return named and self.option("norm", "weighted")

    def network(self, name: str, facts: Mapping[str, Any]) -> Network:
        """The finished network."""
        return Network(name, {key: tuple(steps) for key, steps in self.entries.items()}, self.buffers, self.weights,
                       self.caches, self.outputs, dict(facts), self.states, self.inputs)


def _covers(stored: int, rows: int, select: Any) -> bool:
    """Whether `stored` rows are as many as `rows`, or contain all indices of `select` (ascending or descending)."""
    if select is None:
        return stored == rows
    return len(select) == rows and (not rows or max(int(select[0]), int(select[-1])) < stored)
