"""Rotary frequencies that depend on the length limit of a sequence: one row for each sequence of a batch.

Op `rope_angles` reads the row of a token's sequence, so the other sequences of a batch have no influence. Rows are
computed here for all executors, in float64, and rounded once to float32.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache

import numpy as np

from numflow.ops import OPS, Network, Step, param

CACHED = 1024  # rows of earlier batches in the cache


class ByLength:
    """Frequencies of all steps of a network that depend on the length, side by side.

    f32:   returns a weight by name.
    width: columns of a row: per step F frequencies and the factor on cosines and sines.
    """

    def __init__(self, network: Network, f32: Callable[[str], np.ndarray]):
        self._starts, self.width = dict[tuple, int](), 0
        self._steps = list[tuple[Step, dict[str, np.ndarray]]]()
        for step in _steps(network):
            if _kind(step) not in self._starts:
                self._starts[_kind(step)] = self.width
                self._steps.append((step, {role: f32(name) for role, name in step.weights.items()}))
                self.width += step.outputs[0].width // 2 + 1
        self._row = lru_cache(CACHED)(self._row_of)

    def start(self, step: Step) -> int:
        """The first column of a step's frequencies."""
        return self._starts[_kind(step)]

    def rows(self, limits: np.ndarray) -> np.ndarray:
        """float32 [B, width] of sequences with these limits (Batch.limits)."""
        if not self.width:
            return np.zeros((len(limits), 0), np.float32)
        return np.stack([self._row(limit) for limit in limits.tolist()])

    def _row_of(self, limit: int) -> np.ndarray:
        return np.concatenate([chosen(limit, **weights, **params_of(step)) for step, weights in self._steps])


def chosen(limit: int, inv_freq: np.ndarray, long: np.ndarray | None = None, *, border: int, scale: float,
           long_scale: float, stretch: float, span: float = 0.0) -> np.ndarray:
    """Frequencies and the factor on cosines and sines, float32 [F + 1], for a sequence with this limit. Other
    arguments: weights and parameters of op `rope_angles`."""
    if limit <= border:
        return np.append(inv_freq, scale).astype(np.float32)
    if long is None:
        count, wider = len(inv_freq), stretch * limit / border - (stretch - 1)
        long = inv_freq * wider ** (-np.arange(count) / (span or max(count - 1, 1)))
    return np.append(long, long_scale).astype(np.float32)


def params_of(step: Step) -> dict[str, float]:
    """Parameters of a step that its frequencies depend on, defaults included."""
    return {name: param(step, name) for name in OPS[step.op].params if name != "offset"}


def variant(network: Network, limit: int) -> Hashable:
    """Key of the rotary frequencies for this limit, equal for equal frequencies. Cached keys depend on it."""
    found = {_kind(step): (limit if "long" not in step.weights else 1) for step in _steps(network)
             if limit > param(step, "border")}
    return tuple(found.items()) if found else 0


def _steps(network: Network) -> list[Step]:
    return [step for steps in network.entries.values() for step in steps
            if step.op == "rope_angles" and param(step, "border")]


def _kind(step: Step) -> tuple:
    """Key of a step, equal for steps with the same result."""
    return (*sorted(step.weights.items()), *sorted(step.params.items()))
