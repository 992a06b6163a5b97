"""Compiled kernels of this package: functions on a range of rows, run by several threads without the GIL.

    @kernel
    def _double(x, y, begin, end):
        for row in range(begin, end): ...

    over_rows(_double, len(x), threads, x, y)

Plain threads with explicit ranges instead of prange: kernels compile several times faster, need no threading layer, and
may be called from several threads at once.
"""

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba

from numflow import kernel_cache

_RANGES = 16  # per thread: balances load and keeps interrupts responsive


def kernel(fn: Callable) -> Callable:
    """Compile `fn` on its first call, without the GIL, and cache the result on disk by a hash of its sources.

    Float operations are not reordered or contracted, so results equal those of the same code in NumPy.
    """
    config: Any = numba.config  # attributes are created at import
    saved, config.CACHE_DIR = config.CACHE_DIR, str(kernel_cache.folder(fn.__module__))
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(fn)
    finally:
        config.CACHE_DIR = saved


def part(fn: Callable) -> Callable:
    """A function that is inlined into the kernels that call it. A real call would pass seven words per array and count
    references."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(forceinline=True, error_model="numpy", **options)(fn)


@functools.cache
def default_threads() -> int:
    """Number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def over_rows(fn: Callable, rows: int, threads: int | None, *args) -> None:
    """fn(*args, begin, end) on ranges that cover 0 .. rows, by `threads` threads (default: all processors)."""
    threads = min(threads or default_threads(), rows)
    count = min(rows, threads * _RANGES)
    ranges = list(itertools.pairwise(rows * i // count for i in range(count + 1))) if count else []
    if threads <= 1:
        for begin, end in ranges:
            fn(*args, begin, end)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(fn, *args, begin, end) for begin, end in ranges]
        try:
            for future in futures:
                future.result()
        except BaseException:  # an interrupt cancels ranges that have not begun
            pool.shutdown(cancel_futures=True)
            raise
