"""Weights that are no finite numbers: looked for only when a model's logits are none."""

import time

import numpy as np

from numflow.decoding.sampler import NOT_FINITE
from numflow.errors import NotFiniteError, quoted
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import to_f32
from numflow.network.weights.source import stored_tensor
from numflow.ops import Network

_AT_ONCE = 1 << 20  # weights that are looked at together
PATIENCE_S = 30.0   # requests of the model wait meanwhile


class Suspects:
    """The tensors that a network's weights come from.

    patience: seconds after which no more of them are looked at.
    """

    def __init__(self, network: Network, checkpoint: Checkpoint, patience: float = PATIENCE_S):
        self._network, self._checkpoint, self._patience = network, checkpoint, patience
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
        until, seen = time.monotonic() + self._patience, set[str]()
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
        values = to_f32(rows[first:first + step], tensor.type.name)
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            return (f"tensor {quoted(tensor.name)} has {values[row, column]} in row {first + row}, column {column}; "
                    "its file is damaged, or was written so")
    return ""
