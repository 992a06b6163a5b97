"""Kernels of this package: compiled functions that work on a range of rows, shared among threads outside the GIL.

    @kernel
    def _double(x, y, begin, end):
        for row in range(begin, end): ...

    over_rows(_double, len(x), threads, x, y)

Plain threads and explicit ranges rather than prange: they compile several times faster, need no threading layer, and
may be called from any thread at once.
"""

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba

from numflow import kernel_cache

_RANGES = 16  # per thread, so that none waits long for another, or an interrupt for them


def kernel(fn: Callable) -> Callable:
    """Compiles `fn` on its first call, without the GIL, and keeps the result on disk by a hash of its sources.

    Floats are not reordered or contracted, so that results are those of the same lines in NumPy.
    """
    config: Any = numba.config  # its names are made when it is imported
    saved, config.CACHE_DIR = config.CACHE_DIR, str(kernel_cache.folder(fn.__module__))
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(fn)
    finally:
        config.CACHE_DIR = saved


def part(fn: Callable) -> Callable:
    """A function of kernels, and of no one else: it becomes part of each that calls it. A call would pass seven words
    for each array, and count its users."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(forceinline=True, error_model="numpy", **options)(fn)


@functools.cache
def default_threads() -> int:
    """Processors that this process may use."""
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
        except BaseException:  # an interrupt does not wait for what has not begun
            pool.shutdown(cancel_futures=True)
            raise
