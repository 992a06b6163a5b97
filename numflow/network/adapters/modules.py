"""The modules of a model in the tensors of a checkpoint: one matrix of several, or some rows of a matrix of several.

    modules = Modules(stored, short, names, built, checkpoint, head)
    modules.home(name), modules.pieces(name), modules.matrix(name)

Which rows of a fused matrix are a module's, the network knows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from numflow.errors import SpecError
from numflow.formats.checkpoint import Checkpoint
from numflow.network.build.names import TensorNames
from numflow.ops import Network, Part
from numflow.spec.reader import Spec

# Modules that may be one matrix: the module that it is then, and what the network calls their rows of it.
_WHOLES: dict[str, dict[str, tuple[str, ...]]] = {
    "attn_qkv": {"attn_q": (".q",), "attn_k": (".k",), "attn_v": (".v",)},
    "ssm_in": {"attn_qkv": (".q", ".k", ".v"), "attn_gate": (".z",), "ssm_beta": (".b",), "ssm_alpha": (".a",)},
    **{f"ffn_gate_up{end}": {f"ffn_gate{end}": (".gate",), f"ffn_up{end}": (".up",)}
       for end in ("", "_shexp", "_exps")}}
Rows = range  # of a module's outputs
_WHOLES_OF: dict[str, list[tuple[str, tuple[str, ...]]]] = {"attn_gate": [("attn_qkv", (".gate",))]}
for _whole, _parts in _WHOLES.items():
    for _part, _ends in _parts.items():
        _WHOLES_OF.setdefault(_part, []).append((_whole, _ends))


@dataclass(frozen=True)
class Home:
    """Rows of a stored tensor, by their numbers after leading dimensions are flattened; of the matrix as it multiplies.

    there: whether the file has the tensor.
    """

    tensor: str
    rows: np.ndarray
    transposed: bool
    there: bool = True


@dataclass(frozen=True)
class ModuleMatrix:
    """A module's matrix [N, K] or bias [N]. back: whether its tensor has the other orientation."""

    name: str
    shape: tuple[int, ...]
    back: bool
    read: Callable[[], np.ndarray]


class Modules:
    """stored: the tensor that a name is for, None if there is none. short: a name without prefix. head: names of an
    output matrix that is a table, which it has."""

    def __init__(self, stored: Callable[[str], str | None], short: Callable[[str], str], names: TensorNames,
                 built: Network, checkpoint: Checkpoint, head: Mapping[str, str]):
        self.stored, self._short, self._head = stored, short, head
        self._names, self._built, self._checkpoint = names, built, checkpoint

    def matrix(self, name: str) -> ModuleMatrix | None:
        """A module's matrix or bias as it multiplies, None if there is none."""
        place = self.stored(name) or self._head.get(name)
        if place is not None:
            shape, back = self.logical(place), self.transposed(place)
            base = self._checkpoint.tensors[place]
            return ModuleMatrix(name, shape, back, lambda: base.f32().T if back else base.f32())
        if pieces := self.pieces(name):
            (_, *k), total = self.logical(pieces[0][0]), sum(len(rows) for _, rows in pieces)

            def together() -> np.ndarray:
                values = np.zeros((total, *k), np.float32)
                for place, rows in pieces:
                    own = self._checkpoint.tensors[place].f32()
                    values[rows.start:rows.stop:rows.step] = own.T if self.transposed(place) else own
                return values

            return ModuleMatrix(name, (total, *k), False, together)
        home = self.home(name)
        if home is None or not home.there:
            return None
        shape = self.logical(home.tensor, home.transposed)
        width = shape[-1:] if name.endswith(".weight") else ()

        def some() -> np.ndarray:
            base = self._checkpoint.tensors[home.tensor].f32()
            return (base.swapaxes(-1, -2) if home.transposed else base).reshape(-1, *width)[home.rows]

        return ModuleMatrix(name, (len(home.rows), *width), False, some)

    def transposed(self, name: str) -> bool:
        """Whether a matrix is stored as [..., K, N]."""
        return len(self._checkpoint.tensors[name].shape) > 1 and any(
            part.tensor == name and part.transpose for weight in self._built.weights.values() for part in weight.parts)

    def pieces(self, name: str) -> list[tuple[str, Rows]]:
        """Stored tensors of the modules that a name stands for together, and which of its rows they are; none where
        they are not."""
        for module, role, layer, expert in self._names.modules_of(self._short(name)):
            places = [self._place(part, role, layer, expert) for part in _WHOLES.get(module, ())]
            if places and all(places):
                found = [place for place in places if place]
                sizes = [self.logical(place)[-2 if role == "weight" else -1] for place in found]
                return list(zip(found, rows_together(self._names.spec, module, sizes), strict=True))
        return []

    def _place(self, module: str, role: str, layer: int | None, expert: int | None) -> str | None:
        names = self._names.candidates(module, role, layer, "", expert)
        return next((name for name in names if name in self._checkpoint.tensors), None)

    def logical(self, name: str, transposed: bool | None = None) -> tuple[int, ...]:
        """Shape of a matrix as it multiplies, [..., N, K]."""
        shape = self._checkpoint.tensors[name].shape
        if transposed is None:
            transposed = self.transposed(name)
        return (*shape[:-2], *shape[:-3:-1]) if transposed and len(shape) > 1 else shape

    def home(self, name: str) -> Home | None:
        """The rows of a module in the matrix of several, None if it has none there."""
        for module, role, layer, expert in self._names.modules_of(self._short(name)):
            for forms in (*(tuple(f"{whole}{end}" for end in ends) for whole, ends in _WHOLES_OF.get(module, ())),
                          (module,) if expert is not None else ()):
                if (home := self._of_weights(forms, role, layer, expert)) is not None:
                    return home
                matrix = self._of_weights(forms, "weight", layer, expert) if role == "bias" else None
                if matrix is not None and not matrix.transposed:
                    return replace(matrix, tensor=f"{matrix.tensor.removesuffix('.weight')}.bias", there=False)
        return None

    def _of_weights(self, modules: Sequence[str], role: str, layer: int | None, expert: int | None) -> Home | None:
        homes = [self._of_weight(module, role, layer, expert) for module in modules]
        found = [home for home in homes if home is not None]
        if not found or len(found) < len(homes) or len({home.tensor for home in found}) > 1:
            return None
        return replace(found[0], rows=np.concatenate([home.rows for home in found]))

    def _of_weight(self, module: str, role: str, layer: int | None, expert: int | None) -> Home | None:
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
            each = len(rows) // weight.groups
            rows = rows[expert * each:(expert + 1) * each]
        return Home(part.tensor, rows, part.transpose)


def rows_together(spec: Spec, module: str, sizes: Sequence[int]) -> list[Rows]:
    """Rows of modules, of such sizes, in one matrix of them, which is a module too.

    Raises:
        SpecError: they lie in groups there.
    """
    section, key = {"attn_qkv": ("attention", "qkv"), "ssm_in": ("recurrent", "qkv"), "ffn_gate_up": ("ffn", "layout"),
                    "ffn_gate_up_shexp": ("moe", "shared_layout")}.get(module, ("moe", "layout"))
    said = str(spec.section("hf").get(section, {}).get(key) or spec.section(section).get(key))
    if "groups" in said or "quarters" in said:
        raise SpecError(f"{spec.path}: {section}.{key}: an adapter has {module!r} in one, and how its rows lie is not "
                        f"known")
    total = sum(sizes)
    if "interleaved" in said:
        return [range(place, total, len(sizes)) for place in range(len(sizes))]
    order = [1, 0] if "up_gate" in said else [*range(len(sizes))]
    starts = {part: sum(sizes[other] for other in order[:place]) for place, part in enumerate(order)}
    return [range(starts[part], starts[part] + size) for part, size in enumerate(sizes)]
