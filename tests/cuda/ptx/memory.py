"""Global and shared memory with shadow memory: the allocation of each byte, and whether it was ever written.

Global memory is one NumPy array, and device addresses are its real addresses. Allocations are separated by guard bytes.
Shared memory is one array with the memory of all blocks that run side by side.
"""

from bisect import bisect_right

import numpy as np

from .findings import Fault

GUARD = 4096   # bytes between allocations
GRAIN = 256    # alignment of allocations
_TRUE = {1: (np.bool_, True), 2: (np.uint16, 0x0101), 4: (np.uint32, 0x01010101), 8: (np.uint64, 0x0101010101010101)}


class Shadowed:
    """Bytes, with a flag for each that says whether it was written."""

    def __init__(self, array: np.ndarray, written: np.ndarray):
        self.bytes, self.written = array, written
        self._views, self._flags = {}, {size: (written.view(kind), true) for size, (kind, true) in _TRUE.items()}

    def view(self, dtype) -> np.ndarray:
        """The bytes as elements of another type."""
        if dtype not in self._views:
            self._views[dtype] = self.bytes.view(dtype)
        return self._views[dtype]

    def mark(self, offset: np.ndarray, size: int) -> None:
        """Mark `size` bytes at each offset as written."""
        flags, true = self._flags[min(size, 8)]
        place = offset // min(size, 8)
        flags[place] = true
        if size == 16:
            flags[place + 1] = true

    def is_written(self, offset: np.ndarray, size: int) -> bool:
        """Whether all of these bytes have been written."""
        flags, true = self._flags[min(size, 8)]
        place = offset // min(size, 8)
        return bool((flags[place] == true).all()) and (size < 16 or bool((flags[place + 1] == true).all()))


class GlobalMemory(Shadowed):
    """Device memory: allocations with guards between them. Freed memory is not reused, so that use after free shows."""

    def __init__(self, nbytes: int = 256 << 20):
        raw = np.empty(nbytes + GUARD, np.uint8)
        begin = -raw.ctypes.data % GUARD
        super().__init__(raw[begin:begin + nbytes], np.zeros(nbytes, np.bool_))
        self.base = self.bytes.ctypes.data
        self.begins, self.ends, self.freed = [], [], []     # of allocations, in order
        self._used, self._constants = GUARD, {}

    def allocate(self, nbytes: int) -> np.ndarray:
        """Allocate uint8 [nbytes], filled with 0xFF (NaN as floats) and marked as unwritten."""
        begin, end = self._used, self._used + nbytes
        if end + GUARD > self.bytes.size:
            raise MemoryError(f"the machine has {self.bytes.size} bytes of global memory; give it more")
        self._used = -(-end // GRAIN) * GRAIN + GUARD
        self.begins.append(begin)
        self.ends.append(end)
        self.freed.append(False)
        self.bytes[begin:end] = 0xFF
        return self.bytes[begin:end]

    def free(self, array: np.ndarray) -> None:
        """Free an allocation of `allocate`."""
        self.freed[self.owner(array.ctypes.data - self.base)] = True

    def mark_written(self, array: np.ndarray) -> None:
        """Mark bytes that the host has written."""
        begin = array.ctypes.data - self.base
        self.written[begin:begin + array.nbytes] = True

    def constant(self, name: str, data: np.ndarray) -> int:
        """Address of a constant array of the module, allocated on first use."""
        key = name, data.tobytes()
        if key not in self._constants:
            place = self.allocate(data.size)
            place[:] = data
            self.mark_written(place)
            self._constants[key] = place.ctypes.data
        return self._constants[key]

    def owner(self, offset: int) -> int:
        """Index of the last allocation that begins at or before an offset, -1 if there is none."""
        return bisect_right(self.begins, offset) - 1

    def extent(self, offsets: np.ndarray) -> int:
        """Total bytes of the allocations that contain these offsets."""
        numbers = np.unique(np.searchsorted(self.begins, offsets, "right") - 1)
        return sum(self.ends[number] - self.begins[number] for number in numbers.tolist())

    def offsets(self, address: np.ndarray, size: int, what: str) -> tuple[np.ndarray, int]:
        """Offsets in `bytes` of these addresses, and their allocation, -1 if they are in several.

        Raises:
            Fault: an address is misaligned, or its bytes are not within one allocation.
        """
        if (address & (size - 1)).any():
            bad = int(address[(address & (size - 1)) != 0][0])
            raise Fault(f"misaligned {what} of {size} bytes, {bad % size} beyond a multiple")
        offset = address - self.base
        low, high = int(offset.min()), int(offset.max()) + size
        number = self.owner(low)
        if number >= 0 and high <= self.ends[number] and not self.freed[number]:
            return offset, number
        for place in np.unique(offset).tolist():
            self._refuse(place, size, what)
        return offset, -1

    def _refuse(self, offset: int, size: int, what: str) -> None:
        number = self.owner(offset)
        if number < 0 or offset >= self.ends[number] + GUARD:
            raise Fault(f"{what} of {size} bytes outside global memory: nowhere near an allocation")
        room = self.ends[number] - self.begins[number]
        if self.freed[number]:
            raise Fault(f"{what} of {size} bytes outside global memory: allocation {number} of {room} bytes was freed")
        if offset + size > self.ends[number]:
            raise Fault(f"{what} of {size} bytes outside global memory: at {offset - self.begins[number]} of the "
                        f"{room} bytes of allocation {number}")


class SharedMemory(Shadowed):
    """Shared memory of the blocks that run side by side, 0xFF until written.

    pending: for each word, whether a cp.async into it is pending.
    """

    def __init__(self, blocks: int, nbytes: int):
        self.limit, self.pitch = nbytes, max(-(-nbytes // 16) * 16, 16)
        super().__init__(np.full(blocks * self.pitch, 0xFF, np.uint8), np.zeros(blocks * self.pitch, np.bool_))
        self.pending = np.zeros(blocks * self.pitch // 4, np.bool_)
        self.in_flight = 0

    def offsets(self, address: np.ndarray, size: int, block: np.ndarray, what: str) -> np.ndarray:
        """Offsets in `bytes` of addresses in the shared memory of blocks.

        Raises:
            Fault: an address is misaligned, or outside the block's memory.
        """
        if (address & (size - 1)).any():
            raise Fault(f"misaligned {what} of {size} bytes at {int(address[(address & (size - 1)) != 0][0])}")
        low, high = int(address.min()), int(address.max())
        if low < 0 or high + size > self.limit:
            raise Fault(f"{what} of {size} bytes at {low if low < 0 else high} of {self.limit} bytes of shared memory")
        return block * self.pitch + address
