"""Modules that an adapter names, located in the tensors of a checkpoint: fused from several tensors, or rows of one.

    modules = Modules(stored, short, names, built, checkpoint, head)
    modules.location(name), modules.pieces(name), modules.matrix(name)

The network's weights (ops.Part.rows) say which rows of a fused matrix belong to a module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numflow.errors import SpecError
from numflow.formats.checkpoint import Checkpoint
from numflow.network.steps.names import TensorNames
from numflow.ops import Network, Part
from numflow.spec.reader import Spec

# Fused module -> the modules that it consists of, with the suffixes of the network's weights for their rows.
_FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "attn_qkv": {"attn_q": (".q",), "attn_k": (".k",), "attn_v": (".v",)},
    "ssm_in": {"attn_qkv": (".q", ".k", ".v"), "attn_gate": (".z",), "ssm_beta": (".b",), "ssm_alpha": (".a",)},
    **{f"ffn_gate_up{end}": {f"ffn_gate{end}": (".gate",), f"ffn_up{end}": (".up",)}
       for end in ("", "_shexp", "_exps")}}
Rows = range  # rows of a module, which are its outputs
_FUSED_WITH: dict[str, list[tuple[str, tuple[str, ...]]]] = {"attn_gate": [("attn_qkv", (".gate",))]}
for _fused, _parts in _FUSED.items():
    for _part, _suffixes in _parts.items():
        _FUSED_WITH.setdefault(_part, []).append((_fused, _suffixes))


@dataclass(frozen=True)
class Location:
    """Rows of a stored matrix [..., N, K], as indices into the flattened leading dimensions.

    transposed: whether the tensor is stored as [..., K, N]. present: whether the checkpoint has the tensor.
    """

    tensor: str
    rows: np.ndarray
    transposed: bool
    present: bool = True


@dataclass(frozen=True)
class ModuleMatrix:
    """A module's matrix [N, K] or bias [N]. stored_transposed: whether its tensor is [K, N]."""

    name: str
    shape: tuple[int, ...]
    stored_transposed: bool
    read: Callable[[], np.ndarray]


class Modules:
    """Lookup of modules by the names of an adapter.

    stored: maps a name to that of a checkpoint's tensor, or None. short: strips a name's prefix.
    head: names of a tied output matrix -> name of the embedding table.
    """

    def __init__(self, stored: Callable[[str], str | None], short: Callable[[str], str], names: TensorNames,
                 built: Network, checkpoint: Checkpoint, head: Mapping[str, str]):
        self.stored, self._short, self._head = stored, short, head
        self._names, self._built, self._checkpoint = names, built, checkpoint

    def matrix(self, name: str) -> ModuleMatrix | None:
        """A module's matrix as [N, K], or its bias; None if the checkpoint has none."""
        tensor = self.stored(name) or self._head.get(name)
        if tensor is not None:
            shape, transposed = self.logical(tensor), self.transposed(tensor)
            base = self._checkpoint.tensors[tensor]
            return ModuleMatrix(name, shape, transposed, lambda: base.f32().T if transposed else base.f32())
        if pieces := self.pieces(name):
            (_, *k), total = self.logical(pieces[0][0]), sum(len(rows) for _, rows in pieces)

            def fused() -> np.ndarray:
                values = np.zeros((total, *k), np.float32)
                for piece, rows in pieces:
                    matrix = self._checkpoint.tensors[piece].f32()
                    values[rows.start:rows.stop:rows.step] = matrix.T if self.transposed(piece) else matrix
                return values

            return ModuleMatrix(name, (total, *k), False, fused)
        location = self.location(name)
        if location is None or not location.present:
            return None
        shape = self.logical(location.tensor, location.transposed)
        width = shape[-1:] if name.endswith(".weight") else ()

        def selected() -> np.ndarray:
            base = self._checkpoint.tensors[location.tensor].f32()
            return (base.swapaxes(-1, -2) if location.transposed else base).reshape(-1, *width)[location.rows]

        return ModuleMatrix(name, (len(location.rows), *width), False, selected)

    def transposed(self, name: str) -> bool:
        """Whether a matrix is stored as [..., K, N]."""
        return len(self._checkpoint.tensors[name].shape) > 1 and any(
            part.tensor == name and part.transpose for weight in self._built.weights.values() for part in weight.parts)

    def pieces(self, name: str) -> list[tuple[str, Rows]]:
        """The stored tensors that a fused module consists of, each with its rows of the module; empty if `name` is no
        fused module, or a tensor is missing."""
        for module, role, layer, expert in self._names.modules_of(self._short(name)):
            tensors = [self._tensor(part, role, layer, expert) for part in _FUSED.get(module, ())]
            if tensors and all(tensors):
                found = [tensor for tensor in tensors if tensor]
                sizes = [self.logical(tensor)[-2 if role == "weight" else -1] for tensor in found]
                return list(zip(found, rows_together(self._names.spec, module, sizes), strict=True))
        return []

    def _tensor(self, module: str, role: str, layer: int | None, expert: int | None) -> str | None:
        names = self._names.candidates(module, role, layer, "", expert)
        return next((name for name in names if name in self._checkpoint.tensors), None)

    def logical(self, name: str, transposed: bool | None = None) -> tuple[int, ...]:
        """Shape of a matrix as [..., N, K]."""
        shape = self._checkpoint.tensors[name].shape
        if transposed is None:
            transposed = self.transposed(name)
        return (*shape[:-2], *shape[:-3:-1]) if transposed and len(shape) > 1 else shape

    def location(self, name: str) -> Location | None:
        """The rows of a module in a fused matrix or in a stack of experts, None if there is no such matrix."""
        for module, role, layer, expert in self._names.modules_of(self._short(name)):
            weights = [tuple(f"{fused}{suffix}" for suffix in suffixes)
                       for fused, suffixes in _FUSED_WITH.get(module, ())]
            for modules in (*weights, (module,) if expert is not None else ()):
                if (location := self._of_weights(modules, role, layer, expert)) is not None:
                    return location
                matrix = self._of_weights(modules, "weight", layer, expert) if role == "bias" else None
                if matrix is not None and not matrix.transposed:
                    return replace(matrix, tensor=f"{matrix.tensor.removesuffix('.weight')}.bias", present=False)
        return None

    def _of_weights(self, modules: Sequence[str], role: str, layer: int | None, expert: int | None
                    ) -> Location | None:
        locations = [self._of_weight(module, role, layer, expert) for module in modules]
        found = [location for location in locations if location is not None]
        if not found or len(found) < len(locations) or len({location.tensor for location in found}) > 1:
            return None
        return replace(found[0], rows=np.concatenate([location.rows for location in found]))

    def _of_weight(self, module: str, role: str, layer: int | None, expert: int | None) -> Location | None:
        weight = self._built.weights.get(f"{'' if layer is None else f'blk.{layer}.'}{module}.{role}")
        if weight is None or len(weight.parts) != 1 or (expert is not None and expert >= weight.groups):
            return None
        part: Part = weight.parts[0]
        if part.turned or part.columns is not None:
            return None
        shape = self.logical(part.tensor, part.transpose)
        count = int(np.prod(shape if role == "bias" else shape[:-1]))
        rows = np.arange(count) if part.rows is None else np.asarray(part.rows)
        if expert is not None:
            per_expert = len(rows) // weight.groups
            rows = rows[expert * per_expert:(expert + 1) * per_expert]
        return Location(part.tensor, rows, part.transpose)


def rows_together(spec: Spec, module: str, sizes: Sequence[int]) -> list[Rows]:
    """The rows of each part of a fused module. sizes: the parts' row counts.

    Raises:
        SpecError: the spec lays the rows out in groups, which are not supported.
    """
    section, key = {"attn_qkv": ("attention", "qkv"), "ssm_in": ("recurrent", "qkv"), "ffn_gate_up": ("ffn", "layout"),
                    "ffn_gate_up_shexp": ("moe", "shared_layout")}.get(module, ("moe", "layout"))
    layout = str(spec.section("hf").get(section, {}).get(key) or spec.section(section).get(key))
    if "groups" in layout or "quarters" in layout:
        raise SpecError(f"{spec.path}: {section}.{key}: an adapter changes the fused {module!r}, whose order of rows "
                        f"is not known")
    total = sum(sizes)
    if "interleaved" in layout:
        return [range(index, total, len(sizes)) for index in range(len(sizes))]
    order = [1, 0] if "up_gate" in layout else [*range(len(sizes))]
    starts = {part: sum(sizes[before] for before in order[:index]) for index, part in enumerate(order)}
    return [range(starts[part], starts[part] + size) for part, size in enumerate(sizes)]
