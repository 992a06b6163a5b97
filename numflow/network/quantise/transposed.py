"""Transposition of matrices stored as [inputs, outputs]: quantisation works on rows of inputs.

    transposed(checkpoint, spec)     # a Checkpoint whose transposed matrices are transposed when read
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from numflow import network
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.spec.reader import Spec


def transposed(checkpoint: Checkpoint, spec: Spec) -> Checkpoint:
    """The checkpoint with matrices [inputs, outputs] transposed; GGUF checkpoints are unchanged."""
    if checkpoint.naming == "gguf":
        return checkpoint
    built = network.build(spec, checkpoint, fuse=False)
    return transpose(checkpoint, {part.tensor for weight in built.weights.values() for part in weight.parts
                                  if part.transpose})


def transpose(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """The checkpoint with these tensors [..., K, N] as [..., N, K], in their types, which must have no blocks.

    The last read tensor is cached, for readers of single rows.
    """
    last: dict[str, np.ndarray] = {}

    def turn(tensor: Tensor) -> Tensor:
        def read() -> np.ndarray:
            if tensor.name not in last:
                last.clear()
                last[tensor.name] = _transposed_bytes(tensor)
            return last[tensor.name]

        *stack, k, n = tensor.shape
        return Tensor(tensor.name, (*stack, n, k), tensor.type, read, not tensor.turned)

    if not names:
        return checkpoint
    return replace(checkpoint, tensors={name: turn(tensor) if name in names else tensor
                                        for name, tensor in checkpoint.tensors.items()})


def _transposed_bytes(tensor: Tensor) -> np.ndarray:
    """uint8 [rows, row_bytes]."""
    *stack, k, n = tensor.shape
    size = tensor.type.row_bytes(1)
    values = np.swapaxes(tensor.raw().reshape(*stack, k, n, size), -3, -2)
    return np.ascontiguousarray(values).reshape(-1, k * size)
