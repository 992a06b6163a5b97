"""Time inside a run: kernels that note when thread 0 passes, put between the calls of a table."""

import ctypes
import sys
import time

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.kernel import i64, i64_ptr, kernel
from numflow.cpu.memory import aligned

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_WINDOWS = sys.platform == "win32"

if sys.platform == "win32":
    _function = ctypes.WinDLL("kernel32").QueryPerformanceCounter
    _count = ctypes.c_int64()
    ctypes.WinDLL("kernel32").QueryPerformanceFrequency(ctypes.byref(_count))
    _ID, _MICROSECONDS = 0, np.array([1e6 / _count.value, 0.0])  # ticks, and nothing
else:
    _function = ctypes.CDLL(None).clock_gettime
    _ID, _MICROSECONDS = time.CLOCK_MONOTONIC, np.array([1e6, 1e-3])  # seconds and nanoseconds
binding.add_symbol("numflow_clock", ctypes.cast(_function, ctypes.c_void_p).value)

# Arguments: address of int64 [2] that the clock is read into.
AT = 0


@intrinsic
def _read_clock(typingctx, address):
    """Write the time to the two int64 at `address`."""
    def codegen(context, builder, signature, args):
        arguments = [args[0]] if _WINDOWS else [_I32(_ID), args[0]]
        fn = ir.FunctionType(_I32, [a.type for a in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, fn, "numflow_clock"), arguments)
        return context.get_dummy_value()
    return types.void(types.int64), codegen


@kernel
def _stamp(args, thread, n_threads):
    """args: address of the two int64."""
    if thread == 0:
        at = i64(args, AT)
        i64_ptr(at)[0] = 0
        i64_ptr(at)[1] = 0
        _read_clock(at)


class Stamps:
    """A table of calls (threads.py) with the clock read before its first row and after the rows `ends`.

    table: to be walked in place of the one given; every group of rows ends in a barrier.
    """

    def __init__(self, table: np.ndarray, ends: list[int]):
        self._times = aligned((len(ends) + 1, 2), np.int64)
        self._args = aligned((len(ends) + 1, 1), np.int64)
        self._args[:, 0] = self._times.ctypes.data + self._times.strides[0] * np.arange(len(ends) + 1)
        rows, begin = [self._row(0)], 0
        for index, end in enumerate(ends, 1):
            group = table[begin:end].copy()
            if len(group):
                group[-1, 2] = 1
            rows += [group, self._row(index)]
            begin = end
        self.table = np.concatenate(rows)

    def _row(self, index: int) -> np.ndarray:
        return np.array([[_stamp.address, self._args.ctypes.data + self._args.strides[0] * index, 0]], np.int64)

    @property
    def microseconds(self) -> np.ndarray:
        """float64 [len(ends)], what each group of rows took in the last walk."""
        return np.diff(self._times, axis=0) @ _MICROSECONDS
