"""An adapter held against a checkpoint: which stored tensor each of its changes is for, and whether shapes agree.

Names go through the spec: its prefixes may be there or not on either side, and its name of the output matrix is known
where a model has none of its own.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from numflow import network
from numflow.errors import FormatError
from numflow.formats.adapter import Adapter, LowRank, computed, turned
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.adapters.apart import rearranged, rows_of_change
from numflow.network.adapters.modules import rows_together
from numflow.network.adapters.tables import there, tied_table, untied, with_tokens
from numflow.network.build.names import SUFFIXES, TensorNames
from numflow.ops import Network
from numflow.spec.reader import Spec

# Parameters with the matrices of all experts, and the modules that are, one after the other, the rows of each expert.
_STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "up_proj": ("ffn_up_exps",),
           "down_proj": ("ffn_down_exps",)}
_LAYER = re.compile(r"\.(\d+)\.")
T = TypeVar("T")


@dataclass(frozen=True)
class Fitted:
    """An adapter under the names of a checkpoint's tensors, all shapes checked.

    checkpoint: with an output matrix of its own where the adapter parts it from the embedding table.
    transposed: tensors that are stored as [..., K, N]. head: the output matrix, where it was parted.
    biases: names of biases by those of their matrices, where they differ by more than the last word.
    left_out: names that were in the adapter, of parts of a model that no network has, such as the one for images.
    """

    adapter: Adapter
    checkpoint: Checkpoint
    transposed: frozenset[str]
    head: str | None = None
    biases: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def bias_of(self, matrix: str) -> str:
        """Name of a matrix's bias, also of one that is not there."""
        return self.biases.get(matrix) or f"{matrix.removesuffix('.weight')}.bias"

    def without(self) -> str:
        """One line about what is left out."""
        return (f"{self.adapter.path}: left out what is for parts that are not run here: {len(self.left_out)} changes "
                f"({self.left_out[0]}{', ...' if len(self.left_out) > 1 else ''})")


def fitted(adapter: Adapter, checkpoint: Checkpoint, spec: Spec) -> Fitted:
    """The adapter on this checkpoint.

    Raises:
        FormatError: it is for another model, in one line that names the first tensor that says so.
    """
    _check_kind(adapter, checkpoint)
    built = network.build(spec, checkpoint, fuse=False)
    names = _Names(adapter, checkpoint, spec)
    parts = [part for weight in built.weights.values() for part in weight.parts]
    left_out = names.left_out({part.tensor for part in parts})
    table = tied_table(built)
    own, head = with_tokens(names.stored(left_out, built), checkpoint, names.heads, table), None
    names.check_alone(own, built)
    if table is not None and names.parts(own, table):
        head = names.head(own)
        checkpoint = untied(own, checkpoint, spec, built, head)
    transposed = frozenset(part.tensor for part in parts if part.transpose)
    own = replace(own, added={name: _as_stored(change, checkpoint.tensors.get(name), name in transposed)
                              for name, change in own.added.items()})
    _check_shapes(own, checkpoint, transposed)
    biased = [name for name in names.heads if name in own.offsets]
    if biased and any(step.label == "head_scale" for steps in built.entries.values() for step in steps):
        raise FormatError(f"{own.path}: {biased[0]!r} gets a bias, and the model multiplies its logits: nothing says "
                          "which comes first")
    return Fitted(own, checkpoint, transposed, head, names.biases(own), left_out)


def _check_kind(adapter: Adapter, checkpoint: Checkpoint) -> None:
    if adapter.naming != checkpoint.naming:
        kinds = {"hf": "safetensors", "gguf": "a GGUF file"}
        raise FormatError(f"{adapter.path}: an adapter for a base in {kinds[adapter.naming]}, but {checkpoint.path} is "
                          f"in {kinds.get(checkpoint.naming, checkpoint.format)}: take the other form of either")
    found = checkpoint.config.get("general.architecture")
    if adapter.architecture and found is not None and adapter.architecture != found:
        raise FormatError(f"{adapter.path}: made for another model: general.architecture is {adapter.architecture!r}, "
                          f"that of {checkpoint.path} is {found!r}")


class _Names:
    """Names of an adapter as names of a checkpoint's tensors."""

    def __init__(self, adapter: Adapter, checkpoint: Checkpoint, spec: Spec):
        self._adapter, self._checkpoint = adapter, checkpoint
        self._names = TensorNames(spec, checkpoint)
        self._prefixes = [prefix for prefix in self._names.prefixes if prefix]
        stack = "decoder" if spec.type == "encoder-decoder" else ""
        heads = self._names.candidates("output", "weight", None, stack)
        self.heads = [name for name in heads if name.endswith(".weight")]
        self._short: dict[str, str] = {}
        for name in (*checkpoint.tensors, *self.heads):
            self._short.setdefault(self._shortened(name), name)

    def stored(self, left_out: Collection[str], built: Network) -> Adapter:
        """The adapter under stored names, without some of its tensors."""
        own = self._adapter

        def kept(given: Mapping[str, T]) -> dict[str, T]:
            return {name: value for name, value in given.items() if name not in left_out}

        added = {name: change for full, one in kept(own.added).items()
                 for name, change in self._by_expert(full, one, built).items()}
        own = replace(own, added=added, offsets=kept(own.offsets), replaced=kept(own.replaced),
                      multiplied=kept(own.multiplied))
        table = tied_table(built)
        head = {} if table is None else dict.fromkeys(self.heads, table)
        own = rearranged(own, self._stored, self._shortened, self._names, built, self._checkpoint, head)
        return replace(own, added=self._all(own.added), offsets=self._all(own.offsets),
                       replaced=self._all(own.replaced), tokens=self._all(kept(own.tokens)),
                       repeated=self._all(kept(own.repeated)))

    def left_out(self, used: Collection[str]) -> tuple[str, ...]:
        """Names of an adapter for parts of a model that the spec leaves out. used: the network's tensors.

        Raises:
            FormatError: the adapter has no others.
        """
        own, names = self._adapter, self._names
        scores = {name for module in names.patterns if module.startswith("score_") for role in SUFFIXES
                  for name in names.candidates(module, role, None, "")} if names.has("score_output.weight") else set()
        given = [*own.added, *own.replaced, *own.multiplied, *own.repeated, *own.tokens]
        run = {*used, *scores}
        found = tuple(name for name in given if self._stored(name) not in run and self._ignored(name))
        if found and len(found) == len(given):
            raise FormatError(f"{own.path}: changes nothing that is computed here: all of it is for parts that spec "
                              f"{names.spec.name!r} leaves out, such as {found[0]!r}")
        return found

    def check_alone(self, own: Adapter, built: Network) -> None:
        """Refuse changes of what several layers have in turns, each of which may have changes of its own."""
        uses = Counter(name for steps in built.entries.values() for step in steps for name in step.weights.values())
        together = set[str]()
        for weight in built.weights.values():
            module = next(iter(weight.name.split(".")[2:]), "")
            several, each = self._names.in_turns(module)
            if each or (several and uses[weight.name] > 1):
                together |= {part.tensor for part in weight.parts}
        for name in (*own.added, *own.offsets, *own.replaced):
            if together & {name, f"{name.removesuffix('.bias')}.weight"}:
                raise FormatError(f"{own.path}: {name!r} is in a block that several layers have in turns, and an "
                                  f"adapter changes it in each of them by itself: this is not read")

    def biases(self, own: Adapter) -> dict[str, str]:
        """Names of biases that are not those of their matrices but for the last word."""
        plain = {name: f"{name.removesuffix('.weight')}.bias" for name in (*own.added, *own.offsets)}
        found = {name: self._stored(bias) for name, bias in plain.items() if bias not in self._checkpoint.tensors}
        return {name: bias for name, bias in found.items() if bias is not None}

    def _ignored(self, name: str) -> bool:
        """Whether a tensor is of a whole part of a model that the spec leaves out: of any in the checkpoint, by those
        patterns alone that hold of any number of layers where it has none of that name."""
        forms, here = {name, self._shortened(name), name.removeprefix("model.")}, self._stored(name) is not None
        return any(fnmatchcase(form, pattern.replace("{layers}", "*").replace("{beyond}", "*"))
                   for pattern in self._names.ignored if pattern.endswith(".*") and (here or "{" not in pattern)
                   for form in forms)

    def parts(self, own: Adapter, table: str) -> bool:
        """Whether the adapter makes an output matrix and the table that it is differ."""
        changed = {*own.added, *own.replaced}
        return bool(changed & {*self.heads}) or (table in changed and not (own.head_too and table in own.added))

    def head(self, own: Adapter) -> str | None:
        """The name that an output matrix of its own has, or would have."""
        known = [name for name in self.heads if name in self._checkpoint.tensors or name in own.added
                 or name in own.replaced]
        return next(iter(known or self.heads), None)

    def _by_expert(self, full: str, change: LowRank, built: Network) -> dict[str, LowRank]:
        """A change of a stack of experts as changes of the tensors that the checkpoint has for them."""
        modules, layer = _STACKS.get(full.rpartition(".")[2], ()), _LAYER.search(full)
        stacked = self._stored(full) is not None
        if len(change.a.shape) < 3 or stacked or not modules or layer is None:
            return {full: change}
        experts, size, found = change.a.shape[0], change.b.shape[1] // len(modules), {}
        own = rows_together(self._names.spec, "ffn_gate_up_exps", [size] * len(modules))
        used = {part.tensor for weight in built.weights.values() for part in weight.parts}
        at = self._layer(layer[1], modules[0], used)
        for rows, module in zip(own, modules, strict=True):
            whole = next((name for name in self._names.candidates(module, "weight", at, "")
                          if name in self._checkpoint.tensors), None)
            if whole is not None:
                found[whole] = rows_of_change(change, rows)
                continue
            for expert in range(experts + 1):
                names = [name for name in self._names.candidates(module, "weight", at, "", expert)
                         if name in self._checkpoint.tensors]
                name = next((name for name in names if name in used), None)  # one that computes nothing may be stored
                if (name is None and not names) if expert < experts else name is not None:
                    raise FormatError(f"{self._adapter.path}: made for another model: {full!r} is for {experts} "
                                      f"experts, {self._checkpoint.path} has {'fewer' if expert < experts else 'more'}")
                if name is not None:
                    found[name] = _of_expert(change, expert, rows)
        return found

    def _layer(self, number: str, module: str, used: Collection[str]) -> int:
        """The layer of the network whose experts have this number in their names, which may count otherwise."""
        for layer in (int(number), *range(len(used))):
            for expert in (None, 0):
                for name in self._names.candidates(module, "weight", layer, "", expert):
                    found = _LAYER.search(name)
                    if found and found[1] == number and name in used:
                        return layer
        return int(number)

    def _all(self, given: Mapping[str, T]) -> dict[str, T]:
        found: dict[str, T] = {}
        for name, value in given.items():
            place = self._place(name)
            if place in found and not _equal(value, found[place]):
                raise FormatError(f"{self._adapter.path}: {name!r} is changed twice")
            found[place] = value
        return found

    def _place(self, name: str) -> str:
        short = self._shortened(name)
        if (place := self._stored(name) or self._short.get(short)) is not None:
            return place
        if name.endswith(".bias") and (matrix := self._short.get(self._shortened(f"{name[:-5]}.weight"))) is not None:
            return f"{matrix.removesuffix('.weight')}.bias"
        raise FormatError(f"{self._adapter.path}: made for another model: {self._checkpoint.path} has no tensor "
                          f"{name!r}")

    def _stored(self, name: str) -> str | None:
        """The tensor of the checkpoint that a name is for."""
        tensors, short = self._checkpoint.tensors, self._shortened(name)
        if name in tensors:
            return name
        place = self._short.get(short)
        return place if place in tensors else self._names.renamed(short)

    def _shortened(self, name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in self._prefixes if name.startswith(prefix)), name)


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors, which a file may have under two names, have the same numbers."""
    return isinstance(one, Tensor) and one.shape == other.shape and np.array_equal(one.f32(), other.f32())


def _as_stored(change: LowRank, tensor: Tensor | None, transposed: bool) -> LowRank:
    """The change of a stack [X, K, N] that was made for the matrices as they are stored, not as they multiply, or of a
    stack of one, which a matrix's looks like."""
    if tensor is None or len(tensor.shape) < 3:
        return change
    if tensor.shape[0] == 1 and len(change.a.shape) == 2:
        a, b = (replace(each, shape=(1, *each.shape)) for each in (change.a, change.b))
        change = replace(change, a=a, b=b)
    if not transposed or change.shape != tensor.shape or change.magnitude is not None or (
            tensor.shape[-2] == tensor.shape[-1]):
        return change
    shapes = [(*each.shape[:-2], *each.shape[:-3:-1]) for each in (change.b, change.a)]
    return replace(change, a=computed(change.b.name, shapes[0], lambda: change.b.f32().swapaxes(-1, -2)),
                   b=computed(change.a.name, shapes[1], lambda: change.a.f32().swapaxes(-1, -2)))


def _of_expert(change: LowRank, expert: int, rows: range) -> LowRank:
    """Some rows of one expert of a change of all."""
    rank, columns = change.a.shape[1:]
    return rows_of_change(LowRank(computed(change.a.name, (rank, columns), lambda: change.a.f32()[expert]),
                                  computed(change.b.name, change.b.shape[1:], lambda: change.b.f32()[expert]),
                                  change.factor), rows)


def _check_shapes(own: Adapter, checkpoint: Checkpoint, transposed: frozenset[str]) -> None:
    for name, change in own.added.items():
        tensor = there(own, checkpoint, name)
        shape = (*tensor.shape[:-2], *tensor.shape[:-3:-1]) if name in transposed else tensor.shape
        _expect(own, checkpoint, name, change.shape, shape)
    for name, (vector, _) in own.offsets.items():
        tensor = there(own, checkpoint, name)
        _expect(own, checkpoint, name, vector.shape, tensor.shape[-1:] if name in transposed else tensor.shape[:-1])
    for name, tensor in (*own.replaced.items(), *own.repeated.items()):
        base = checkpoint.tensors.get(name)
        if base is None and name.endswith(".bias"):
            continue  # a matrix whose bias is the adapter's
        base = there(own, checkpoint, name)
        _expect(own, checkpoint, name, as_stored(tensor, base).shape, base.shape)


def as_stored(tensor: Tensor, base: Tensor) -> Tensor:
    """A tensor in the orientation that the base's has in its file."""
    return turned(tensor) if base.turned and len(tensor.shape) == 2 else tensor


def _expect(own: Adapter, checkpoint: Checkpoint, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != tuple(expected):
        raise FormatError(f"{own.path}: made for another model: {name!r} is for {list(found)}, and is {list(expected)} "
                          f"in {checkpoint.path}")
