"""Rotary frequencies that depend on how long a sequence may become: one row of them for each sequence of a batch.

Executors look the row of a token's sequence up in op `rope_angles`, so each sequence has the frequencies that it would
have alone. They are made here for all executors, in float64 and then rounded once.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache

import numpy as np

from numflow.ops import OPS, Network, Step, param

KEPT = 1024  # rows of earlier batches that are not made again


class ByLength:
    """The frequencies of all steps of a network that depend on the length, side by side.

    f32:   gives a weight by its name.
    width: columns: of each step, F frequencies and then the factor on cosines and sines.
    """

    def __init__(self, network: Network, f32: Callable[[str], np.ndarray]):
        self._starts, self.width = dict[tuple, int](), 0
        self._steps = list[tuple[Step, dict[str, np.ndarray]]]()
        for step in _steps(network):
            if _kind(step) not in self._starts:
                self._starts[_kind(step)] = self.width
                self._steps.append((step, {role: f32(name) for role, name in step.weights.items()}))
                self.width += step.outputs[0].width // 2 + 1
        self._row = lru_cache(KEPT)(self._made)

    def start(self, step: Step) -> int:
        """The first column of a step's frequencies."""
        return self._starts[_kind(step)]

    def rows(self, limits: np.ndarray) -> np.ndarray:
        """float32 [B, width] of sequences with these limits (Batch.limits)."""
        if not self.width:
            return np.zeros((len(limits), 0), np.float32)
        return np.stack([self._row(limit) for limit in limits.tolist()])

    def _made(self, limit: int) -> np.ndarray:
        return np.concatenate([chosen(limit, **weights, **params_of(step)) for step, weights in self._steps])


def chosen(limit: int, inv_freq: np.ndarray, long: np.ndarray | None = None, *, border: int, scale: float,
           long_scale: float, stretch: float, span: float = 0.0) -> np.ndarray:
    """float32 [F + 1]: frequencies, and the factor on cosines and sines, of a sequence with this limit. The rest are
    weights and parameters of op `rope_angles`."""
    if limit <= border:
        return np.append(inv_freq, scale).astype(np.float32)
    if long is None:
        count, wider = len(inv_freq), stretch * limit / border - (stretch - 1)
        long = inv_freq * wider ** (-np.arange(count) / (span or max(count - 1, 1)))
    return np.append(long, long_scale).astype(np.float32)


def params_of(step: Step) -> dict[str, float]:
    """The step's parameters that frequencies depend on, defaults included."""
    return {name: param(step, name) for name in OPS[step.op].params if name != "offset"}


def variant(network: Network, limit: int) -> Hashable:
    """Key of the rotary frequencies under this limit, on which cached keys depend: equal for equal frequencies."""
    found = {_kind(step): (limit if "long" not in step.weights else 1) for step in _steps(network)
             if limit > param(step, "border")}
    return tuple(found.items()) if found else 0


def _steps(network: Network) -> list[Step]:
    return [step for steps in network.entries.values() for step in steps
            if step.op == "rope_angles" and param(step, "border")]


def _kind(step: Step) -> tuple:
    """Equal for steps with the same result."""
    return (*sorted(step.weights.items()), *sorted(step.params.items()))
