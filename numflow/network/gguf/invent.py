"""Placeholder names and tensors of a future GGUF file, created while its network is built."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from numflow.errors import RequestError, SpecError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TYPES
from numflow.network.steps.builder import Builder
from numflow.network.steps.names import SUFFIXES, TensorNames
from numflow.ops import View
from numflow.spec.reader import Spec
from numflow.spec.resolve import Resolved

# Fused modules and their parts: a bias of the parts is a bias of the fused module.
_PARTS = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up": ("ffn_gate", "ffn_up"),
          "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
          "ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp")}
_RELATED = {**_PARTS, **{part: (whole,) for whole, parts in _PARTS.items() for part in parts}}
_CUT = {"attn_k_b": ("attn_kv_b",), "attn_v_b": ("attn_kv_b",)}  # modules that GGUF splits in two
_ROLES = {"exp_probs_b": "bias"}  # roles of tensors whose source name does not determine them
_BARE = ("ssm_a", "ssm_d", "pass_start")  # tensor names without ".weight"
_APART = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")  # stored with three dimensions


class NamesToBe(TensorNames):
    """Tensor names of a future file, which will have the modules of the source."""

    def __init__(self, spec: Spec, checkpoint: Checkpoint, names: TensorNames, resolved: Resolved):
        super().__init__(spec, checkpoint)
        self.source, self._resolved = names, resolved
        self._written = spec.section("gguf").get("written", {})

    def has(self, name: str, layer: int | None = None, stack: str = "") -> bool:
        module, _, role = name.rpartition(".")
        if not any(True for group in (None, 0)
                   for _ in self.candidates(module, role, 0 if layer is None else layer, stack, group)):
            return False
        if module in _ROLES:
            return role == _ROLES[module] and any(self.source.has(f"{module}.{each}", layer, stack)
                                                  for each in SUFFIXES)
        if name == "output.weight" and self._resolved.option("head", "tied", None, stack):
            return "output" in self._written  # for readers that do not tie embeddings
        modules = (module, *(_RELATED.get(module, ()) if role == "bias" else _CUT.get(module, ())))
        return any(self.source.has(f"{each}.{role}", layer, stack) for each in modules)

    def candidates(self, module: str, role: str, layer: int | None, stack: str,
                   expert: int | None = None) -> Iterator[str]:
        if module not in self._written:
            for name in super().candidates(module, role, layer, stack, expert):
                yield name.removesuffix(".weight") if module in _BARE else name
            return
        text = self._resolved.evaluate(f"gguf.written.{module}", self._written[module], layer, stack)
        if text is not None:
            yield text.replace("{layer}", str(layer)) + SUFFIXES[role][0]


class Inventor(Builder):
    """A builder that creates each tensor as a placeholder just before it is looked up."""

    names: NamesToBe

    def __init__(self, resolved: Resolved, names: NamesToBe, checkpoint: Checkpoint, made: dict[str, Tensor]):
        """made: the same dict as checkpoint.tensors."""
        super().__init__(resolved, names, checkpoint)
        self._made = made

    def _invent(self, module: str, role: str, shape: tuple[int, ...], group: int | None = None) -> None:
        name = next(self.names.candidates(module, role, self.layer, self.stack, group), None)
        if name is None:
            raise SpecError(f"spec {self.resolved.spec.name!r} has no name for tensor {module!r} of GGUF files")
        old = self._made.get(name)
        if old is None or old.rows * old.columns < np.prod(shape):
            self._made[name] = Tensor(name, tuple(map(int, shape)), TYPES["F32"], _nothing)

    def expect_rows(self, module: str, count: int, exactly: bool = False) -> None:
        """No check: the future tensor will have the rows."""

    def matrix(self, module: str, rows: int | None, columns: int, select: Any = None, suffix: str = "",
               normalize_rows: bool = False) -> str:
        if rows is None:
            source = self.names.source
            tied = module == "output" and not source.has("output.weight", self.layer, self.stack)
            stored = source.need("token_embd" if tied else module, "weight", self.layer, self.stack).rows
        else:
            stored = rows if select is None else int(max(select)) + 1
        shape = (stored, 1, columns) if module in _APART else (stored, columns)
        self._invent(module, "weight", shape[::-1] if module in self.transposed else shape)
        return super().matrix(module, rows, columns, select, suffix, normalize_rows)

    def vector(self, module: str, role: str, width: int | None = None, rows: Any = None, add: float = 0.0,
               flat: bool = False, suffix: str = "", written: tuple[int, ...] = ()) -> str:
        if width is not None:
            self._invent(module, role, written or (width if rows is None else int(max(rows)) + 1,))
        return super().vector(module, role, width, rows, add, flat, suffix, written)

    def numbers(self, module: str, count: int) -> np.ndarray:
        """Values of the source, which the file will have too."""
        name = next(self.names.candidates(module, "weight", self.layer, self.stack), None)
        if name is None:
            raise SpecError(f"spec {self.resolved.spec.name!r} has no name for tensor {module!r} of GGUF files")
        value = self.names.source.need(module, "weight", self.layer, self.stack).f32().reshape(1, -1)
        self._made[name] = Tensor(name, (value.size,), TYPES["F32"], lambda: value.view(np.uint8))
        return super().numbers(module, count)

    def _norm_vector(self, module: str, role: str, groups: int, x: View, add: float = 0.0) -> str:
        width = x.width // groups
        if any(True for _ in self.names.candidates(module, role, self.layer, self.stack)):
            stored = self.names.source.find(module, role, self.layer, self.stack)
            each = groups > 1 and (stored is None or int(np.prod(stored.shape)) == x.width)
            self._invent(module, role, (groups, width) if each else (width,))
        else:
            for group in range(groups):
                self._invent(module, role, (width,), group)
        return super()._norm_vector(module, role, groups, x, add)

    def stack_of_matrices(self, module: str, groups: int, rows: int, columns: int, select: Any = None,
                          transpose: bool = False, suffix: str = "") -> str:
        stored = (rows if select is None else int(max(select)) + 1, columns)
        self._invent_stack(module, "weight", groups, stored[::-1] if transpose else stored)
        return super().stack_of_matrices(module, groups, rows, columns, select, transpose, suffix)

    def stack_of_vectors(self, module: str, role: str, groups: int, rows: int, select: Any = None, suffix: str = "",
                         add: float = 0.0) -> str:
        self._invent_stack(module, role, groups, (rows if select is None else int(max(select)) + 1,))
        return super().stack_of_vectors(module, role, groups, rows, select, suffix, add)

    def _invent_stack(self, module: str, role: str, groups: int, shape: tuple[int, ...]) -> None:
        """A stacked tensor if the spec has a name for it, else a tensor per group."""
        if any(True for _ in self.names.candidates(module, role, self.layer, self.stack)):
            self._invent(module, role, (groups, *shape))
        else:
            for group in range(groups):
                self._invent(module, role, shape, group)


def _nothing() -> np.ndarray:
    raise RequestError("a tensor that is only planned has no bytes")
