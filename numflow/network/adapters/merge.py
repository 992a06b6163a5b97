"""A checkpoint with adapters merged into its tensors, each of which is computed when it is read.

    merged(checkpoint, spec, [(adapter, scale), ...])

What an adapter changes becomes float32, whatever the type it is stored in: added in float32, nothing is rounded. To
have such matrices in few bits, the merged checkpoint is quantised (network/quantise).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from numflow import network
from numflow.errors import FormatError, SpecError
from numflow.formats.adapter import Adapter, LowRank, check_finite
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TYPES
from numflow.network.adapters.fit import Fitted, as_stored, fitted
from numflow.spec.reader import Spec

_ROWS = 4096  # of a product that is in memory at a time


def merged(checkpoint: Checkpoint, spec: Spec, adapters: Sequence[tuple[Adapter, float]],
           note: Callable[[str], None] | None = None) -> Checkpoint:
    """The checkpoint with every adapter added at its scale, one after the other; what they replace has no scale.

    note: is called with a line about what is left out of them, if anything is.

    Raises:
        FormatError: an adapter is for another model. When such a tensor is read: the change is not finite.
    """
    for adapter, scale in adapters:
        fit = fitted(adapter, checkpoint, spec)
        if note is not None and fit.left_out:
            note(fit.without())
        checkpoint = _merged(fit, scale, spec)
    return checkpoint


def _merged(fit: Fitted, scale: float, spec: Spec) -> Checkpoint:
    own, tensors = fit.adapter, dict(fit.checkpoint.tensors)
    last: dict[str, np.ndarray] = {}  # the tensor that was read last: its parts are asked for one by one

    def computed(base: Tensor, values: Callable[[], np.ndarray]) -> Tensor:
        def read() -> np.ndarray:
            if base.name not in last:
                last.clear()
                found = np.ascontiguousarray(values(), np.float32)
                last[base.name] = found.reshape(base.rows, base.columns).view(np.uint8)
            return last[base.name]

        return replace(base, type=TYPES["F32"], read=read, ordered=None)

    for name, tensor in own.replaced.items():
        there = tensors.get(name)
        tensors[name] = replace(tensor, name=name) if there is None else replace(
            as_stored(tensor, there), name=name, turned=there.turned)
    for name, change in own.added.items():
        base = tensors[name]
        tensors[name] = computed(base, partial(_changed, base, change, scale, name in fit.transposed, own.path))
    for name, (vector, factor) in own.offsets.items():
        bias = fit.bias_of(name)
        old = tensors.get(bias)
        tensors[bias] = computed(old or replace(vector, name=bias),
                                 partial(_moved, old, vector, factor * scale, own.path, bias))
    more = tensors.keys() - fit.checkpoint.tensors.keys()
    changed = replace(fit.checkpoint, tensors=tensors)
    if more:
        try:
            network.build(spec, changed, fuse=False)
        except SpecError as error:
            raise FormatError(f"{own.path}: gives the base {', '.join(map(repr, sorted(more)))}, which it has no place "
                              f"for: {error}") from None
    return changed


@np.errstate(all="ignore")  # overflow is found in the results
def _changed(base: Tensor, change: LowRank, scale: float, transposed: bool, path: Path) -> np.ndarray:
    """W + scale * factor * B A, its rows as long as the magnitude says where there is one."""
    values = np.array(base.f32(), np.float32)
    weight = np.swapaxes(values, -1, -2) if transposed else values
    a, b = change.matrices()
    b = b * np.float32(change.factor_at(scale))
    for begin in range(0, weight.shape[-2], _ROWS):
        rows = slice(begin, begin + _ROWS)
        more = b[..., rows, :] @ a
        check_finite(path, base.name, more)
        weight[..., rows, :] += more
    if change.magnitude is not None:
        axis = -2 if change.by_column else -1
        lengths = np.linalg.norm(weight, axis=axis)
        factors = change.lengthened(lengths)
        check_finite(path, base.name, lengths, factors)
        weight *= np.expand_dims(factors, axis)
    return values


@np.errstate(all="ignore")
def _moved(base: Tensor | None, vector: Tensor, factor: float, path: Path, name: str) -> np.ndarray:
    added = vector.f32() * np.float32(factor)
    check_finite(path, name, added)
    return added if base is None else base.f32() + added
