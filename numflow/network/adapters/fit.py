"""An adapter matched with a checkpoint: changes keyed by the checkpoint's tensors, with shapes checked.

Names are resolved by the spec: its prefixes are optional on both sides, and it gives the name of a tied output matrix.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from numflow import network
from numflow.errors import FormatError
from numflow.formats.adapter import Adapter, LowRank, computed, turned
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.adapters.apart import rearranged, rows_of_change
from numflow.network.adapters.in_turns import with_copies
from numflow.network.adapters.modules import rows_together
from numflow.network.adapters.tables import existing, tied_table, untied, with_tokens
from numflow.network.steps.names import SUFFIXES, TensorNames
from numflow.ops import Network
from numflow.spec.reader import Spec

# Stacked parameters of all experts -> the modules that each expert's rows consist of, in order.
_STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "up_proj": ("ffn_up_exps",),
           "down_proj": ("ffn_down_exps",)}
_SCALES = ("attn_out_scale", "router_scale")  # labels of steps that scale a product
_LAYER = re.compile(r"\.(\d+)\.")
T = TypeVar("T")


@dataclass(frozen=True)
class Fitted:
    """An adapter keyed by the names of a checkpoint's tensors, with checked shapes.

    checkpoint: has a separate output matrix if the adapter unties it from the embedding table, and separate tensors for
                each layer of a shared block that the adapter changes.
    transposed: tensors that are stored as [..., K, N]. head: the output matrix, if it was untied.
    biases: name of a matrix -> name of its bias, where they differ by more than the suffix.
    left_out: the adapter's names for parts that networks don't have, such as an image encoder.
    """

    adapter: Adapter
    checkpoint: Checkpoint
    transposed: frozenset[str]
    head: str | None = None
    biases: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def bias_of(self, matrix: str) -> str:
        """Name of a matrix's bias, also if the checkpoint has none."""
        return self.biases.get(matrix) or f"{matrix.removesuffix('.weight')}.bias"

    def without(self) -> str:
        """One line about ignored changes."""
        return (f"{self.adapter.path}: ignored {len(self.left_out)} changes of parts that the network does not have "
                f"({self.left_out[0]}{', ...' if len(self.left_out) > 1 else ''})")


def fitted(adapter: Adapter, checkpoint: Checkpoint, spec: Spec) -> Fitted:
    """Match the adapter with this checkpoint.

    Raises:
        FormatError: the adapter is for another model; the message names the first tensor that does not match.
    """
    _check_kind(adapter, checkpoint)
    built = network.build(spec, checkpoint, fuse=False)
    names = _Names(adapter, checkpoint, spec)
    if (copied := with_copies(adapter, checkpoint, built, names.shortened)) is not checkpoint:
        checkpoint, built = copied, network.build(spec, copied, fuse=False)
        names = _Names(adapter, checkpoint, spec)
    parts = [part for weight in built.weights.values() for part in weight.parts]
    left_out = names.left_out({part.tensor for part in parts})
    table = tied_table(built)
    own, head = with_tokens(names.stored(left_out, built), checkpoint, names.heads, table), None
    if table is not None and names.unties(own, table):
        head = names.head(own)
        checkpoint = untied(own, checkpoint, spec, built, head)
    transposed = frozenset(part.tensor for part in parts if part.transpose)
    own = replace(own, added={name: _reshaped(change, checkpoint.tensors.get(name), name in transposed)
                              for name, change in own.added.items()})
    _check_shapes(own, checkpoint, transposed)
    biased = [name for name in names.heads if name in own.offsets]
    if biased and any(step.label == "head_scale" for steps in built.entries.values() for step in steps):
        raise FormatError(f"{own.path}: {biased[0]!r} gets a bias, but the model scales its logits: the adapter does "
                          "not say which comes first")
    fit = Fitted(own, checkpoint, transposed, head, names.biases(own), left_out)
    _check_biases(fit, built)
    return fit


def _check_biases(fit: Fitted, built: Network) -> None:
    """Refuse a new bias of a product that is scaled: some models scale the input instead."""
    for before, step in (pair for steps in built.entries.values() for pair in pairwise(steps)):
        if not step.label.endswith(_SCALES) or before.op != "linear" or before.outputs != step.inputs:
            continue
        for part in built.weights[before.weights["weight"]].parts:
            name, bias = part.tensor, fit.bias_of(part.tensor)
            if bias not in fit.checkpoint.tensors and (name in fit.adapter.offsets or bias in fit.adapter.replaced):
                raise FormatError(f"{fit.adapter.path}: {name!r} gets a bias, but the model scales this product: the "
                                  f"adapter does not say which comes first")


def _check_kind(adapter: Adapter, checkpoint: Checkpoint) -> None:
    if adapter.naming != checkpoint.naming:
        kinds = {"hf": "safetensors", "gguf": "a GGUF file"}
        raise FormatError(f"{adapter.path}: an adapter for a base in {kinds[adapter.naming]}, but {checkpoint.path} is "
                          f"in {kinds.get(checkpoint.naming, checkpoint.format)}: convert one of the two")
    found = checkpoint.config.get("general.architecture")
    if adapter.architecture and found is not None and adapter.architecture != found:
        raise FormatError(f"{adapter.path}: made for another model: general.architecture is {adapter.architecture!r}, "
                          f"that of {checkpoint.path} is {found!r}")


class _Names:
    """Lookup of an adapter's names among a checkpoint's tensors. heads: possible names of the output matrix."""

    def __init__(self, adapter: Adapter, checkpoint: Checkpoint, spec: Spec):
        self._adapter, self._checkpoint = adapter, checkpoint
        self._names = TensorNames(spec, checkpoint)
        self._prefixes = sorted(filter(None, self._names.prefixes), key=len, reverse=True)
        stack = "decoder" if spec.type == "encoder-decoder" else ""
        heads = self._names.candidates("output", "weight", None, stack)
        self.heads = [name for name in heads if name.endswith(".weight")]
        self._short: dict[str, str] = {}
        for name in (*checkpoint.tensors, *self.heads):
            self._short.setdefault(self.shortened(name), name)

    def stored(self, left_out: Collection[str], built: Network) -> Adapter:
        """The adapter keyed by stored tensors, without the names `left_out`."""
        own = self._adapter

        def kept(given: Mapping[str, T]) -> dict[str, T]:
            return {name: value for name, value in given.items() if name not in left_out}

        added = {name: change for full, one in kept(own.added).items()
                 for name, change in self._by_expert(full, one, built).items()}
        own = replace(own, added=added, offsets=kept(own.offsets), replaced=kept(own.replaced),
                      multiplied=kept(own.multiplied))
        table = tied_table(built)
        head = {} if table is None else dict.fromkeys(self.heads, table)
        own = rearranged(own, self._stored, self.shortened, self._names, built, self._checkpoint, head)
        return replace(own, added=self._renamed(own.added), offsets=self._renamed(own.offsets),
                       replaced=self._renamed(own.replaced), tokens=self._renamed(kept(own.tokens)),
                       repeated=self._renamed(kept(own.repeated)))

    def left_out(self, used: Collection[str]) -> tuple[str, ...]:
        """The adapter's names for parts of a model that the spec leaves out. used: the network's tensors.

        Raises:
            FormatError: the adapter changes no other part.
        """
        own, names = self._adapter, self._names
        scores = {name for module in names.patterns if module.startswith("score_") for role in SUFFIXES
                  for name in names.candidates(module, role, None, "")} if names.has("score_output.weight") else set()
        given = [*own.added, *own.replaced, *own.multiplied, *own.repeated, *own.tokens]
        run = {*used, *scores}
        found = tuple(name for name in given if (stored := self._stored(name)) not in run and (
            self._ignored(name) or (stored is not None and stored not in self.heads)))
        if found and len(found) == len(given):
            raise FormatError(f"{own.path}: changes nothing that is computed here: all its changes are for parts that "
                              f"spec {names.spec.name!r} ignores, such as {found[0]!r}")
        return found

    def biases(self, own: Adapter) -> dict[str, str]:
        """Name of a matrix -> name of its bias, where they differ by more than the suffix."""
        plain = {name: f"{name.removesuffix('.weight')}.bias" for name in (*own.added, *own.offsets)}
        found = {name: self._stored(bias) for name, bias in plain.items() if bias not in self._checkpoint.tensors}
        return {name: bias for name, bias in found.items() if bias is not None}

    def _ignored(self, name: str) -> bool:
        """Whether a tensor belongs to a part of a model that the spec leaves out, by its patterns that end in ".*".
        Patterns with layer numbers apply to tensors of the checkpoint only."""
        forms, stored = {name, self.shortened(name), name.removeprefix("model.")}, self._stored(name) is not None
        return any(fnmatchcase(form, pattern.replace("{layers}", "*").replace("{beyond}", "*"))
                   for pattern in self._names.ignored if pattern.endswith(".*") and (stored or "{" not in pattern)
                   for form in forms)

    def unties(self, own: Adapter, table: str) -> bool:
        """Whether the adapter makes a tied output matrix differ from the embedding table."""
        changed = {*own.added, *own.replaced}
        return bool(changed & {*self.heads}) or (table in changed and not (own.head_too and table in own.added))

    def head(self, own: Adapter) -> str | None:
        """The name of a separate output matrix."""
        present = [name for name in self.heads if name in self._checkpoint.tensors or name in own.added
                   or name in own.replaced]
        return next(iter(present or self.heads), None)

    def _by_expert(self, full: str, change: LowRank, built: Network) -> dict[str, LowRank]:
        """A change of stacked experts, split into changes of the checkpoint's tensors."""
        modules, layer = _STACKS.get(full.rpartition(".")[2], ()), _LAYER.search(full)
        stacked = self._stored(full) is not None
        if len(change.a.shape) < 3 or stacked or not modules or layer is None:
            return {full: change}
        experts, size, found = change.a.shape[0], change.b.shape[1] // len(modules), {}
        ranges = rows_together(self._names.spec, "ffn_gate_up_exps", [size] * len(modules))
        used = {part.tensor for weight in built.weights.values() for part in weight.parts}
        at = self._layer(layer[1], modules[0], used)
        for rows, module in zip(ranges, modules, strict=True):
            stack = next((name for name in self._names.candidates(module, "weight", at, "")
                          if name in self._checkpoint.tensors), None)
            if stack is not None:
                found[stack] = rows_of_change(change, rows)
                continue
            for expert in range(experts + 1):
                names = [name for name in self._names.candidates(module, "weight", at, "", expert)
                         if name in self._checkpoint.tensors]
                name = next((name for name in names if name in used), None)  # unused experts may be stored
                if (name is None and not names) if expert < experts else name is not None:
                    raise FormatError(f"{self._adapter.path}: made for another model: {full!r} is for {experts} "
                                      f"experts, {self._checkpoint.path} has {'fewer' if expert < experts else 'more'}")
                if name is not None:
                    found[name] = _of_expert(change, expert, rows)
        return found

    def _layer(self, number: str, module: str, used: Collection[str]) -> int:
        """The network's layer whose experts' tensors have this layer number in their names, which may differ."""
        for layer in (int(number), *range(len(used))):
            for expert in (None, 0):
                for name in self._names.candidates(module, "weight", layer, "", expert):
                    found = _LAYER.search(name)
                    if found and found[1] == number and name in used:
                        return layer
        return int(number)

    def _renamed(self, given: Mapping[str, T]) -> dict[str, T]:
        """Values keyed by stored names."""
        found: dict[str, T] = {}
        for name, value in given.items():
            stored = self._stored_name(name)
            if stored in found and not _equal(value, found[stored]):
                raise FormatError(f"{self._adapter.path}: {name!r} is changed twice")
            found[stored] = value
        return found

    def _stored_name(self, name: str) -> str:
        """The name of a tensor in the checkpoint, also of a bias or output matrix that it does not have."""
        short = self.shortened(name)
        if (stored := self._stored(name) or self._short.get(short)) is not None:
            return stored
        if name.endswith(".bias") and (matrix := self._short.get(self.shortened(f"{name[:-5]}.weight"))) is not None:
            return f"{matrix.removesuffix('.weight')}.bias"
        raise FormatError(f"{self._adapter.path}: made for another model: {self._checkpoint.path} has no tensor "
                          f"{name!r}")

    def _stored(self, name: str) -> str | None:
        """The tensor of the checkpoint for an adapter's name, None if there is none."""
        tensors, short = self._checkpoint.tensors, self.shortened(name)
        if name in tensors:
            return name
        stored = self._short.get(short)
        return stored if stored in tensors else self._names.renamed(short)

    def shortened(self, name: str) -> str:
        """A name without its prefix."""
        return next((name.removeprefix(prefix) for prefix in self._prefixes if name.startswith(prefix)), name)


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors have equal values: a file may have a tensor under two names."""
    return isinstance(one, Tensor) and one.shape == other.shape and np.array_equal(one.f32(), other.f32())


def _reshaped(change: LowRank, tensor: Tensor | None, transposed: bool) -> LowRank:
    """The change of a stack of experts as [X, N, K]: one made for the stored orientation [X, K, N] is transposed, and
    one of a single matrix becomes one of a stack with X = 1."""
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
    """The part of a stack's change that is for some rows of one expert."""
    rank, columns = change.a.shape[1:]
    return rows_of_change(LowRank(computed(change.a.name, (rank, columns), lambda: change.a.f32()[expert]),
                                  computed(change.b.name, change.b.shape[1:], lambda: change.b.f32()[expert]),
                                  change.factor), rows)


def _check_shapes(own: Adapter, checkpoint: Checkpoint, transposed: frozenset[str]) -> None:
    for name, change in own.added.items():
        tensor = existing(own, checkpoint, name)
        shape = (*tensor.shape[:-2], *tensor.shape[:-3:-1]) if name in transposed else tensor.shape
        _expect(own, checkpoint, name, change.shape, shape)
    for name, (vector, _) in own.offsets.items():
        tensor = existing(own, checkpoint, name)
        _expect(own, checkpoint, name, vector.shape, tensor.shape[-1:] if name in transposed else tensor.shape[:-1])
    for name, tensor in (*own.replaced.items(), *own.repeated.items()):
        base = checkpoint.tensors.get(name)
        if base is None and name.endswith(".bias"):
            continue  # the adapter adds a bias to a matrix without one
        base = existing(own, checkpoint, name)
        _expect(own, checkpoint, name, as_stored(tensor, base).shape, base.shape)


def as_stored(tensor: Tensor, base: Tensor) -> Tensor:
    """A tensor in the orientation of the base's tensor in its file."""
    return turned(tensor) if base.turned and len(tensor.shape) == 2 else tensor


def _expect(own: Adapter, checkpoint: Checkpoint, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != tuple(expected):
        raise FormatError(f"{own.path}: made for another model: {name!r} is for {list(found)}, and is {list(expected)} "
                          f"in {checkpoint.path}")
