"""Functions of the system and of CPython that kernels call by name; their addresses are filled in when code is loaded.

So kernels that use them can be kept on disk: nothing in them depends on where this process has them.
"""

import ctypes
import functools
import sys
import time

WINDOWS = sys.platform == "win32"
LINUX = sys.platform.startswith("linux")
# Of the clock: the number it is asked for by, and microseconds in each of the two numbers that it writes.
if sys.platform == "win32":
    _kernel32 = ctypes.WinDLL("kernel32")
    _yield, _clock, _frequency = _kernel32.SwitchToThread, _kernel32.QueryPerformanceCounter, ctypes.c_int64()
    _kernel32.QueryPerformanceFrequency(ctypes.byref(_frequency))
    CLOCK, CLOCK_MICROSECONDS = 0, (1e6 / _frequency.value, 0.0)  # ticks, and nothing
    _nap, NAP = _kernel32.Sleep, 1  # ms
else:
    _yield, _clock = ctypes.CDLL(None).sched_yield, ctypes.CDLL(None).clock_gettime
    CLOCK, CLOCK_MICROSECONDS = time.CLOCK_MONOTONIC, (1e6, 1e-3)  # seconds and nanoseconds
    _nap, NAP = ctypes.CDLL(None).usleep, 50  # us

# numflow's names of functions that differ by system, or are this Python's own.
NAMED = {
    "numflow_yield": _yield, "numflow_clock": _clock, "numflow_nap": _nap,
    "numflow_acquire": ctypes.pythonapi.PyThread_acquire_lock,
    "numflow_release": ctypes.pythonapi.PyThread_release_lock,
}
if LINUX:
    NAMED |= {f"numflow_{name}": getattr(ctypes.CDLL(None), name) for name in ("sched_getcpu", "sched_setaffinity")}


def address_of(name: str) -> int:
    """Address of what an object file calls `name`.

    Raises:
        KeyError: nobody knows it.
    """
    if name in NAMED:
        return _address(NAMED[name])
    # Numba ends every kernel in code that reports an exception. numflow's kernels raise none: it cannot be reached.
    if name.startswith(("numba_", "NRT_")):
        return _address(ctypes.CDLL(None).abort)
    for library in _libraries():
        function = getattr(library, name, None)
        if function is not None:
            return _address(function)
    raise KeyError(name)


@functools.cache
def _libraries() -> list:
    found = [ctypes.pythonapi, ctypes.CDLL(None)]
    if LINUX:
        found.append(ctypes.CDLL("libm.so.6"))
    return found


def _address(function) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
