"""Matrices of an adapter for one step of a network (ops.ADAPTING)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AdaptedPart:
    """An adapter's matrices for one weight matrix W [N, K]: y = scale * (W x + base bias) + b (a x) + bias.

    a:     f32 [r, K], of an embedding table [V, r].
    b:     f32 [N, r], of an embedding table [D, r]; includes all factors.
    bias:  f32 [N], None for none.
    scale: f32 [N], None for ones.
    """

    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray | None = None
    scale: np.ndarray | None = None


AdaptedParts = Mapping[str, Sequence[AdaptedPart | None]]  # by a step's parameter `part`: one per expert, or one
