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

import numba

from numflow import kernel_cache

_CHUNKS = 4  # ranges per thread, so that one that is slow holds nobody up


def kernel(fn: Callable) -> Callable:
    """Compiles `fn` on its first call, without the GIL, and keeps the result on disk by a hash of its sources.

    Floats are not reordered or contracted, so that results are those of the same lines in NumPy.
    """
    saved, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(kernel_cache.folder(fn.__module__))
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(fn)
    finally:
        numba.config.CACHE_DIR = saved


@functools.cache
def default_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def over_rows(fn: Callable, rows: int, threads: int | None, *args) -> None:
    """fn(*args, begin, end) on ranges that cover 0 .. rows, by `threads` threads (default: all processors)."""
    threads = min(threads or default_threads(), rows)
    if threads <= 1:
        fn(*args, 0, rows)
        return
    count = min(rows, threads * _CHUNKS)
    edges = [rows * i // count for i in range(count + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(fn, *args, begin, end) for begin, end in itertools.pairwise(edges)]:
            future.result()
