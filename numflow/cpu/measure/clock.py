"""Timing within a run: time stamps of thread 0, by kernels inserted between the calls of a table."""

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Code
from numflow.cpu.runtime.symbols import CLOCK_MICROSECONDS

_CODE = Code("numflow.cpu.measure.clock_kernels")
_MICROSECONDS = np.array(CLOCK_MICROSECONDS)


class Stamps:
    """A table of calls (threads.py) with time stamps before its first row and after the rows `ends`.

    table: the new table, to run instead of the given one; every group of rows ends with a barrier.
    """

    def __init__(self, table: np.ndarray, ends: list[int]):
        self._times = aligned((len(ends) + 1, 2), np.int64)
        self._args = aligned((len(ends) + 1, 1), np.int64)
        self._args[:, 0] = self._times.ctypes.data + self._times.strides[0] * np.arange(len(ends) + 1)
        warm_up = self._row(0)  # its barrier waits until sleeping threads are awake, outside of the measured steps
        warm_up[0, 2] = 1
        rows, begin = [warm_up, self._row(0)], 0
        for index, end in enumerate(ends, 1):
            group = table[begin:end].copy()
            if len(group):
                group[-1, 2] = 1
            rows += [group, self._row(index)]
            begin = end
        self.table = np.concatenate(rows)

    def _row(self, index: int) -> np.ndarray:
        return np.array([[_CODE.kernel("stamp").address,
                          self._args.ctypes.data + self._args.strides[0] * index, 0]], np.int64)

    @property
    def microseconds(self) -> np.ndarray:
        """float64 [len(ends)], the time of each group of rows in the last run."""
        return np.diff(self._times, axis=0) @ _MICROSECONDS
