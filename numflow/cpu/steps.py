"""Several decoding steps in one walk: after each step a kernel samples the tokens of the next step's batch."""

from collections.abc import Sequence

import numpy as np

from numflow.cpu.context import Context
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call
from numflow.cpu.sample.sample import Draws, pick_tokens
from numflow.decoding.choice import Choice, draws, encode
from numflow.executor.contract import MOST_STEPS


class SeveralSteps:
    """Tables (threads.py) of several steps of an entry.

    step: table of one step, up to the logits.
    """

    def __init__(self, step: np.ndarray, ctx: Context):
        self._step, self._ctx, self._logits = step.copy(), ctx, ctx.network.outputs["logits"]
        self._step[-1, 2] = 1  # a barrier: sampling needs all logits
        self._draws: Draws | None = None
        self._tables: dict[tuple[int, bool], tuple[np.ndarray, np.ndarray, list[Call]]] = {}

    def table(self, steps: int, choices: Sequence[Choice] | None, rows: int) -> np.ndarray:
        """Table int64 [calls, 3] of `steps` steps. choices: settings of sampling for `rows` rows; None: greedy.

        Raises:
            RequestError: the choices are too few, or there are too many tokens to choose from.
        """
        if choices is not None:
            settings, random = encode(choices, rows), draws(choices, steps, MOST_STEPS)
            if self._draws is None:
                self._draws = Draws.of(self._ctx.max_rows(self._logits), self._logits.width, self._ctx.n_threads)
            self._draws.settings[:rows], self._draws.random[:rows] = settings, random
        key = steps, choices is not None
        if key not in self._tables:
            tokens = aligned((steps, self._ctx.max_rows(self._logits)), np.int32)
            calls = [pick_tokens(self._ctx, self._logits, row, i < steps - 1, self._draws if key[1] else None, i)
                     for i, row in enumerate(tokens)]
            picks = [np.array([[call.kernel.address, call.args.ctypes.data, 1]], np.int64) for call in calls]
            self._tables[key] = np.concatenate([part for row in picks for part in (self._step, row)]), tokens, calls
        return self._tables[key][0]

    def picked(self, steps: int, drawn: bool, rows: int) -> np.ndarray:
        """The tokens of the last walk of `steps` steps, int32 [steps, rows]."""
        return self._tables[steps, drawn][1][:, :rows].copy()
