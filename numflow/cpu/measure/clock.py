"""Time inside a run: kernels that note when thread 0 passes, put between the calls of a table."""

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Code
from numflow.cpu.runtime.symbols import CLOCK_MICROSECONDS

_CODE = Code("numflow.cpu.measure.clock_kernels")
_MICROSECONDS = np.array(CLOCK_MICROSECONDS)


class Stamps:
    """A table of calls (threads.py) with the clock read before its first row and after the rows `ends`.

    table: to be walked in place of the one given; every group of rows ends in a barrier.
    """

    def __init__(self, table: np.ndarray, ends: list[int]):
        self._times = aligned((len(ends) + 1, 2), np.int64)
        self._args = aligned((len(ends) + 1, 1), np.int64)
        self._args[:, 0] = self._times.ctypes.data + self._times.strides[0] * np.arange(len(ends) + 1)
        awake = self._row(0)  # its barrier waits for threads that sleep; what they take is no part of a step
        awake[0, 2] = 1
        rows, begin = [awake, self._row(0)], 0
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
        """float64 [len(ends)], what each group of rows took in the last walk."""
        return np.diff(self._times, axis=0) @ _MICROSECONDS
