"""Adapters that multiply the base's matrices (IA3, OFT), rewritten as replacements of tensors."""

from dataclasses import replace

import numpy as np

from numflow.errors import FormatError
from numflow.formats.adapter import Adapter, LowRank, Multiplied, computed
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.network.adapters.modules import ModuleMatrix, Modules


def multiplied(own: Adapter, modules: Modules, checkpoint: Checkpoint) -> Adapter:
    """The adapter with factors applied to the base's tensors, and with wide changes cut to the matrix's columns.

    Raises:
        FormatError: factors do not fit their matrix, or a tensor is changed twice.
    """
    replaced, added = dict(own.replaced), dict(own.added)
    for name, factors in own.multiplied.items():
        values = _matrix(own, name, modules, checkpoint)
        if not factors.fits(*values.shape):
            raise FormatError(f"{own.path}: made for another model: {name!r} is {list(values.shape)} in "
                              f"{checkpoint.path}, and its factors are for another shape")
        bias = modules.matrix(f"{name.removesuffix('.weight')}.bias") if factors.bias else None
        for each in (values, bias):
            if each is not None and replaced.setdefault(each.name, tensor := _product(factors, each)) is not tensor:
                raise FormatError(f"{own.path}: {each.name!r} is changed twice")
    for name, change in own.added.items():
        if change.wide:
            added[name] = _first_columns(change, _matrix(own, name, modules, checkpoint).shape[-1])
    return replace(own, replaced=replaced, added=added)


def _matrix(own: Adapter, name: str, modules: Modules, checkpoint: Checkpoint) -> ModuleMatrix:
    found = modules.matrix(name)
    if found is None:
        raise FormatError(f"{own.path}: made for another model: {checkpoint.path} has no tensor {name!r}")
    if len(found.shape) != 2:
        raise FormatError(f"{own.path}: {name!r} is {list(found.shape)} in {checkpoint.path}, but is changed as a "
                          f"single matrix, which is not supported")
    return found


def _product(factors: Multiplied, values: ModuleMatrix) -> Tensor:
    """The factors applied to a matrix, or to a bias, which only has row factors."""
    rows = factors.rows

    def read() -> np.ndarray:
        if len(values.shape) > 1:
            found = factors.of(values.read())
            return found.T if values.stored_transposed else found
        assert rows is not None
        return values.read() * rows.f32().reshape(-1)

    return computed(values.name, values.shape[::-1] if values.stored_transposed else values.shape, read)


def _first_columns(change: LowRank, k: int) -> LowRank:
    """The change cut to the first k columns."""
    return change if change.a.shape[-1] <= k else replace(
        change, a=computed(change.a.name, (change.rank, k), lambda: change.a.f32()[:, :k]))
