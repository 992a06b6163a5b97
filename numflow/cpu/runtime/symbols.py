"""Functions of the system and of CPython that kernels call by name; addresses are resolved when code is loaded.

Kernels that use them can so be cached on disk: their code does not depend on addresses of this process.
"""

import ctypes
import functools
import sys
import time

WINDOWS = sys.platform == "win32"
LINUX = sys.platform.startswith("linux")
# CLOCK: id of the clock. CLOCK_MICROSECONDS: microseconds per unit of each of the two int64 that it writes.
if sys.platform == "win32":
    _kernel32 = ctypes.WinDLL("kernel32")
    _yield, _clock, _frequency = _kernel32.SwitchToThread, _kernel32.QueryPerformanceCounter, ctypes.c_int64()
    _kernel32.QueryPerformanceFrequency(ctypes.byref(_frequency))
    CLOCK, CLOCK_MICROSECONDS = 0, (1e6 / _frequency.value, 0.0)  # ticks, unused
    _nap, NAP = _kernel32.Sleep, 1  # ms
else:
    _yield, _clock = ctypes.CDLL(None).sched_yield, ctypes.CDLL(None).clock_gettime
    CLOCK, CLOCK_MICROSECONDS = time.CLOCK_MONOTONIC, (1e6, 1e-3)  # seconds and nanoseconds
    _nap, NAP = ctypes.CDLL(None).usleep, 50  # us

# Symbols of functions that differ by system, or belong to this Python.
NAMED = {
    "numflow_yield": _yield, "numflow_clock": _clock, "numflow_nap": _nap,
    "numflow_acquire": ctypes.pythonapi.PyThread_acquire_lock,
    "numflow_release": ctypes.pythonapi.PyThread_release_lock,
}
if LINUX:
    NAMED |= {f"numflow_{name}": getattr(ctypes.CDLL(None), name) for name in ("sched_getcpu", "sched_setaffinity")}


def address_of(name: str) -> int:
    """Address of the symbol `name` of an object file.

    Raises:
        KeyError: the symbol is unknown.
    """
    if name in NAMED:
        return _address(NAMED[name])
    # Numba adds code to every kernel that reports an exception. numflow's kernels raise none, so it is unreachable.
    if name.startswith(("numba_", "NRT_")):
        return _address(ctypes.CDLL(None).abort)
    for library in _libraries():
        function = getattr(library, name, None)
        if function is not None:
            return _address(function)
    raise KeyError(name)


@functools.cache
def _libraries() -> list:
    libraries = [ctypes.pythonapi, ctypes.CDLL(None)]
    if LINUX:
        libraries.append(ctypes.CDLL("libm.so.6"))
    return libraries


def _address(function) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
