"""Memory for weights: a few large mappings, which the system may back with huge pages.

Decoding a token reads every weight once. Pages of 4 KB cost a TLB miss each, and the hardware prefetcher stops at the
end of a page: huge pages gave 10 to 20 % more memory bandwidth.
"""

import mmap
import threading

import numpy as np

from numflow.cpu.memory.buffers import anonymous

_CHUNK = 64 << 20  # bytes of a mapping; its unused part takes no physical memory
_HUGE = 2 << 20


class Arena:
    """Allocates zeroed arrays one after the other. A mapping is freed with the last of its arrays.

    chunk: least bytes of a mapping.
    """

    def __init__(self, chunk: int = _CHUNK):
        self._size = chunk
        self._chunk, self._used, self._lock = np.empty(0, np.uint8), 0, threading.Lock()

    def zeros(self, nbytes: int) -> np.ndarray:
        """Zeros uint8 [nbytes] that start on a cache line."""
        with self._lock:
            if self._used + nbytes > self._chunk.nbytes:
                self._chunk, self._used = _mapping(max(nbytes, self._size)), 0
            array = self._chunk[self._used:self._used + nbytes]
            self._used += -(-nbytes // 64) * 64
        return array


def _mapping(nbytes: int) -> np.ndarray:
    """Zeroed memory of at least `nbytes`, aligned to huge pages."""
    size = -(-nbytes // _HUGE) * _HUGE + _HUGE
    memory = anonymous(size)  # private: shared mappings get no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    return array[-array.ctypes.data % _HUGE:]
