"""Memory of a program: arrays on cache-line boundaries, and the buffers of a network with padded rows."""

import mmap

import numpy as np

from numflow.errors import no_memory
from numflow.ops import Network, View

LINE = 64     # bytes of a cache line and of the widest vector register
LANES = 16    # 4-byte elements per line: rows start on lines, so the last vector of a row can be read whole
_LARGE = 1 << 19


def aligned(shape: int | tuple[int, ...], dtype: type | np.dtype, spare: int = LINE) -> np.ndarray:
    """Zeros on a cache-line boundary, followed by at least `spare` more bytes that may be read."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = _zeros(size + spare + LINE)
    begin = -memory.ctypes.data % LINE
    return memory[begin:begin + size].view(dtype).reshape(shape)


def _zeros(nbytes: int) -> np.ndarray:
    """Zeros uint8 [nbytes]. Large arrays are mapped by the system: pages that are never written take no memory."""
    if nbytes < _LARGE or not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(nbytes, np.uint8)
    return np.frombuffer(anonymous(nbytes), np.uint8)


def anonymous(nbytes: int, *protection: int) -> mmap.mmap:
    """Private zeroed pages from the system.

    Raises:
        MemoryError: the system has no memory left.
    """
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):
            return mmap.mmap(-1, nbytes)
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, *protection)
    except OSError as error:
        if not no_memory(error):
            raise
        raise MemoryError(f"the system has no {nbytes} bytes left") from None


def padded(width: int) -> int:
    """`width` rounded up to whole vectors."""
    return -(-width // LANES) * LANES


class Buffers:
    """Memory of a network's buffers, by name: arrays [capacity of its rows, padded width], initially zero."""

    def __init__(self, network: Network, capacity: dict[str, int]):
        self.network, self.arrays = network, {}
        for buffer in network.buffers.values():
            dtype = np.float32 if buffer.dtype == "f32" else np.int32
            self.arrays[buffer.name] = aligned((capacity[buffer.rows], padded(buffer.width)), dtype)

    def address(self, view: View) -> int:
        """Address of the view's first element."""
        array = self.arrays[view.buffer]
        return array.ctypes.data + view.start * array.itemsize

    def stride(self, view: View) -> int:
        """Row stride of a view in elements."""
        return self.arrays[view.buffer].shape[1]

    def columns(self, view: View, rows: int) -> np.ndarray:
        """The first `rows` rows of a view, as an array that shares the memory."""
        return self.arrays[view.buffer][:rows, view.start:view.start + view.width]
