"""Search for weights that are NaN or infinite, run only when a model's logits are not finite."""

import functools
import time
from collections.abc import Sequence

import numpy as np

from numflow.decoding.sampler import NOT_FINITE
from numflow.errors import NotFiniteError, quoted
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import RowType, TensorType, to_f32
from numflow.network.weights.source import stored_tensor
from numflow.ops import Network

_AT_ONCE = 1 << 20  # weights checked at a time
PATIENCE_S = 30.0   # requests of the model wait during the search


class Suspects:
    """Tensors of a network's weights.

    more: names of further tensors, which are searched first. patience: time limit of the search in seconds.
    """

    def __init__(self, network: Network, checkpoint: Checkpoint, more: Sequence[str] = (),
                 patience: float = PATIENCE_S):
        self._network, self._checkpoint, self._more, self._patience = network, checkpoint, more, patience
        self._found: str | None = None

    @property
    def found(self) -> str:
        """Description of the first NaN or infinity: tensor and position; "" if none is found. Searched once."""
        if self._found is None:
            self._found = self._look()
        return self._found

    def explain(self, error: NotFiniteError) -> NotFiniteError:
        """The error with the name of the tensor at fault, if one is found."""
        return NotFiniteError(f"{str(error).partition(';')[0]}: {self.found}") if self.found else error

    def _look(self) -> str:
        until, seen = time.monotonic() + self._patience, set(self._more)
        for name in self._more:
            if found := _first_in(self._checkpoint.tensors[name], until):
                return found
        for weight in self._network.weights.values():
            for part in weight.parts:
                if part.tensor not in seen and (found := _first_in(stored_tensor(self._checkpoint, part), until)):
                    return found
                seen.add(part.tensor)
        return ""


def finite(model, values: np.ndarray, what: str) -> np.ndarray:
    """Check that values computed by a model are finite, and return them. what: their name in the message.

    Raises:
        NotFiniteError: a value is not finite.
    """
    if not np.isfinite(values).all():
        raise model.runner.explain(NotFiniteError(NOT_FINITE.replace("logits", what)))
    return values


def _first_in(tensor: Tensor, until: float) -> str:
    """Description of the first value of a tensor that is not finite, "" if there is none."""
    rows, step = tensor.raw(), max(1, _AT_ONCE // max(1, tensor.columns))
    for first in range(0, len(rows), step):
        if time.monotonic() > until:
            return ""
        part = rows[first:first + step]
        candidates = np.flatnonzero(_may_not_be_finite(part, tensor.type))
        values = to_f32(part[candidates], tensor.type.name) if len(candidates) else np.zeros((0, 1), np.float32)
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            return (f"tensor {quoted(tensor.name)} has {values[row, column]} in row {first + candidates[row]}, column "
                    f"{column}; its file is damaged, or was written so")
    return ""


def _may_not_be_finite(rows: np.ndarray, kind: TensorType) -> np.ndarray:
    """Mask bool [n] of the rows u8 [n, row_bytes] that may contain a NaN or an infinity.

    In block types, only the float16 scales matter: NaN and infinity have all exponent bits set.
    """
    fields = _floats_of(kind)
    if not fields:
        return np.ones(len(rows), bool)
    found, blocks = np.zeros(len(rows), bool), rows.reshape(len(rows), -1, kind.size)
    for field in fields:
        found |= (blocks[..., field + 1] & 0x7C == 0x7C).any(axis=1)
    return found


@functools.cache
def _floats_of(kind: TensorType) -> tuple[int, ...]:
    """Byte offsets of the float16 scales of a block, if the block is finite whenever the scales are; else ().

    Each pair of bytes is set to a float16 NaN: only the bytes of a scale make the block NaN.
    """
    if kind.block == 1 or isinstance(kind, RowType):
        return ()
    tried = np.zeros((kind.size // 2, kind.size), np.uint8)
    offsets = 2 * np.arange(len(tried))
    tried[np.arange(len(tried)), offsets], tried[np.arange(len(tried)), offsets + 1] = 0x01, 0x7C
    found = offsets[~np.isfinite(to_f32(tried, kind.name)).all(axis=1)]
    return tuple(found.tolist()) if len(found) <= 2 else ()
