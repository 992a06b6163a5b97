"""A view of a checkpoint with adapters merged into its tensors, each computed when it is read.

    merged(checkpoint, spec, [(adapter, scale), ...])

Changed tensors are float32, whatever their stored type: the sum is computed in float32 and not rounded further. To get
such matrices in few bits, quantise the merged checkpoint (network/quantise).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from numflow import network
from numflow.errors import FormatError, SpecError, option
from numflow.formats.adapter import Adapter, LowRank, check_finite
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TYPES
from numflow.network.adapters.fit import Fitted, as_stored, fitted
from numflow.spec.reader import Spec

_ROWS = 4096  # rows of B A that are in memory at a time


def merged(checkpoint: Checkpoint, spec: Spec, adapters: Sequence[tuple[Adapter, float]],
           note: Callable[[str], None] | None = None) -> Checkpoint:
    """The checkpoint with every adapter added at its scale, in order; replacements of tensors have no scale.

    note: called with a line about an adapter's changes that are left out, if any.

    Raises:
        FormatError: an adapter is for another model. Raised by reads of a tensor: its change is not finite.
    """
    for adapter, scale in adapters:
        if adapter.invocation:
            raise FormatError(f"{adapter.path}: has no effect before its invocation tokens, and cannot be merged: load "
                              f"it for requests ({option('adapters')})")
        fit = fitted(adapter, checkpoint, spec)
        if note is not None and fit.left_out:
            note(fit.without())
        checkpoint = _merged(fit, scale, spec)
    return checkpoint


def _merged(fit: Fitted, scale: float, spec: Spec) -> Checkpoint:
    own, tensors = fit.adapter, dict(fit.checkpoint.tensors)
    last: dict[str, np.ndarray] = {}  # the tensor that was read last; its parts are read one by one

    def computed(base: Tensor, values: Callable[[], np.ndarray]) -> Tensor:
        def read() -> np.ndarray:
            if base.name not in last:
                last.clear()
                found = np.ascontiguousarray(values(), np.float32)
                last[base.name] = found.reshape(base.rows, base.columns).view(np.uint8)
            return last[base.name]

        return replace(base, type=TYPES["F32"], read=read, ordered=None)

    for name, tensor in own.replaced.items():
        base = tensors.get(name)
        tensors[name] = replace(tensor, name=name) if base is None else replace(
            as_stored(tensor, base), name=name, turned=base.turned)
    for name, change in own.added.items():
        before = tensors[name]
        tensors[name] = computed(before, partial(_changed, before, change, scale, name in fit.transposed, own.path))
    for name, (vector, factor) in own.offsets.items():
        bias = fit.bias_of(name)
        old = tensors.get(bias)
        tensors[bias] = computed(old or replace(vector, name=bias),
                                 partial(_offset, old, vector, factor * scale, own.path, bias))
    new = tensors.keys() - fit.checkpoint.tensors.keys()
    changed = replace(fit.checkpoint, tensors=tensors)
    if new:
        try:
            network.build(spec, changed, fuse=False)
        except SpecError as error:
            raise FormatError(f"{own.path}: gives the base {', '.join(map(repr, sorted(new)))}, which it has no place "
                              f"for: {error}") from None
    return changed


@np.errstate(all="ignore")  # overflow is found in the results
def _changed(base: Tensor, change: LowRank, scale: float, transposed: bool, path: Path) -> np.ndarray:
    """W + scale * factor * B A; with a magnitude (DoRA), each row is scaled to that L2 norm."""
    values = np.array(base.f32(), np.float32)
    weight = np.swapaxes(values, -1, -2) if transposed else values
    a, b = change.matrices()
    b = b * np.float32(change.factor_at(scale))
    for begin in range(0, weight.shape[-2], _ROWS):
        rows = slice(begin, begin + _ROWS)
        product = b[..., rows, :] @ a
        check_finite(path, base.name, product)
        weight[..., rows, :] += product
    if change.magnitude is not None:
        axis = -2 if change.by_column else -1
        lengths = np.linalg.norm(weight, axis=axis)
        factors = change.lengthened(lengths)
        check_finite(path, base.name, lengths, factors)
        weight *= np.expand_dims(factors, axis)
    return values


@np.errstate(all="ignore")
def _offset(base: Tensor | None, vector: Tensor, factor: float, path: Path, name: str) -> np.ndarray:
    added = vector.f32() * np.float32(factor)
    check_finite(path, name, added)
    return added if base is None else base.f32() + added
