"""Memory for weights: a few large mappings, which the system may back with huge pages.

A token reads every weight once. With pages of 4 KB that is a look-up in the page table for each of them, and the
hardware's own prefetching stops at its end: huge pages gave 10 to 20 % more of the memory bandwidth.
"""

import mmap
import threading

import numpy as np

from numflow.cpu.memory.buffers import anonymous

_CHUNK = 64 << 20  # bytes of a mapping; what is not used of it takes no memory
_HUGE = 2 << 20


class Arena:
    """Hands out zeroed arrays one after the other. A mapping is given back when none of its arrays is left.

    chunk: bytes of a mapping, at least.
    """

    def __init__(self, chunk: int = _CHUNK):
        self._size = chunk
        self._chunk, self._used, self._lock = np.empty(0, np.uint8), 0, threading.Lock()

    def zeros(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], zero, starting on a cache line."""
        with self._lock:
            if self._used + nbytes > self._chunk.nbytes:
                self._chunk, self._used = _mapping(max(nbytes, self._size)), 0
            array = self._chunk[self._used:self._used + nbytes]
            self._used += -(-nbytes // 64) * 64
        return array


def _mapping(nbytes: int) -> np.ndarray:
    """Zeroed memory of at least `nbytes` that starts where a huge page may."""
    size = -(-nbytes // _HUGE) * _HUGE + _HUGE
    memory = anonymous(size)  # private: shared memory has no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    return array[-array.ctypes.data % _HUGE:]
