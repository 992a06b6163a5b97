"""The matrices of an adapter for one step of a network (ops.ADAPTING)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AdaptedPart:
    """Matrices for one matrix of a product: a f32 [r, K], b f32 [N, r] with all factors in it, bias f32 [N] or None,
    and scale f32 [N] or None, which the product is multiplied with first. Of a look-up, a is [V, r] and b [D, r]."""

    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray | None = None
    scale: np.ndarray | None = None


AdaptedParts = Mapping[str, Sequence[AdaptedPart | None]]  # by `part` of a step: one for each expert, or one
