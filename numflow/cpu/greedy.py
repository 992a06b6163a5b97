"""Several steps in one walk: behind each one a kernel picks the likeliest tokens, which are the batch of the next."""

import numpy as np

from numflow.cpu.context import Context
from numflow.cpu.elementwise.select import pick_tokens
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call


class GreedySteps:
    """Tables (threads.py) of steps of an entry.

    step: its rows up to the logits.
    """

    def __init__(self, step: np.ndarray, ctx: Context):
        self._step, self._ctx, self._logits = step.copy(), ctx, ctx.network.outputs["logits"]
        self._step[-1, 2] = 1  # a barrier: logits are whole when they are looked at
        self._tables: dict[int, tuple[np.ndarray, np.ndarray, list[Call]]] = {}

    def table(self, steps: int) -> np.ndarray:
        """int64 [calls, 3] of so many steps."""
        if steps not in self._tables:
            tokens = aligned((steps, self._ctx.room(self._logits)), np.int32)
            calls = [pick_tokens(self._ctx, self._logits, row, at < steps - 1) for at, row in enumerate(tokens)]
            rows = [np.array([[call.kernel.address, call.args.ctypes.data, 1]], np.int64) for call in calls]
            self._tables[steps] = np.concatenate([part for row in rows for part in (self._step, row)]), tokens, calls
        return self._tables[steps][0]

    def picked(self, steps: int, rows: int) -> np.ndarray:
        """The tokens of the last walk of so many steps, int32 [steps, rows]."""
        return self._tables[steps][1][:, :rows].copy()
