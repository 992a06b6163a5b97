"""Weights that are no finite numbers: looked for only when a model's logits are none."""

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

_AT_ONCE = 1 << 20  # weights that are looked at together
PATIENCE_S = 30.0   # requests of the model wait meanwhile


class Suspects:
    """The tensors that a network's weights come from.

    more: names of others, which are looked at first. patience: seconds after which no more of them are looked at.
    """

    def __init__(self, network: Network, checkpoint: Checkpoint, more: Sequence[str] = (),
                 patience: float = PATIENCE_S):
        self._network, self._checkpoint, self._more, self._patience = network, checkpoint, more, patience
        self._found: str | None = None

    @property
    def found(self) -> str:
        """The first tensor with a NaN or an infinity, and where, in words; "" if none is found. Looked for once."""
        if self._found is None:
            self._found = self._look()
        return self._found

    def explained(self, error: NotFiniteError) -> NotFiniteError:
        """The error with the tensor that it comes from, where there is one."""
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
    """Values that a model has computed, all of them finite. what: their name in the message.

    Raises:
        NotFiniteError: something is.
    """
    if not np.isfinite(values).all():
        raise model.runner.explained(NotFiniteError(NOT_FINITE.replace("logits", what)))
    return values


def _first_in(tensor: Tensor, until: float) -> str:
    """The first value of a tensor that is no finite number, in words, "" if there is none."""
    rows, step = tensor.raw(), max(1, _AT_ONCE // max(1, tensor.columns))
    for first in range(0, len(rows), step):
        if time.monotonic() > until:
            return ""
        some = rows[first:first + step]
        numbers = np.flatnonzero(_may_not_be_finite(some, tensor.type))
        values = to_f32(some[numbers], tensor.type.name) if len(numbers) else np.zeros((0, 1), np.float32)
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            return (f"tensor {quoted(tensor.name)} has {values[row, column]} in row {first + numbers[row]}, column "
                    f"{column}; its file is damaged, or was written so")
    return ""


def _may_not_be_finite(rows: np.ndarray, kind: TensorType) -> np.ndarray:
    """Rows of u8 [n, row_bytes] that may stand for a NaN or an infinity, bool [n].

    Rows of blocks of float16 and whole numbers are told by the former: all bits of the exponent are set.
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
    """Places of the float16 numbers of a block, where they alone decide: their products fit float32.

    Each pair of bytes is tried as a NaN of float16, which is a finite number in other types.
    """
    if kind.block == 1 or isinstance(kind, RowType):
        return ()
    tried = np.zeros((kind.size // 2, kind.size), np.uint8)
    places = 2 * np.arange(len(tried))
    tried[np.arange(len(tried)), places], tried[np.arange(len(tried)), places + 1] = 0x01, 0x7C
    found = places[~np.isfinite(to_f32(tried, kind.name)).all(axis=1)]
    return tuple(found.tolist()) if len(found) <= 2 else ()
