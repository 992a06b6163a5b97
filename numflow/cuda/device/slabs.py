"""A sub-allocator of device memory: a few large allocations of the driver (slabs), cut into pieces."""

from collections.abc import Callable
from contextlib import ExitStack

ALIGN = 256         # alignment of every piece, in bytes
SLAB = 64 << 20     # bytes of a slab; a larger piece gets a slab of its own


class Slabs:
    """A first-fit allocator that merges adjacent free ranges.

    reserve: allocates bytes from the driver and returns their address. release: frees such an address.
    """

    def __init__(self, reserve: Callable[[int], int], release: Callable[[int], None]):
        self._reserve, self._release = reserve, release
        self._free: dict[int, list[list[int]]] = {}  # slab -> [address, bytes] of its free ranges, in order
        self._owner: dict[int, tuple[int, int]] = {}  # address -> (slab, bytes)
        self._sizes: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes taken from the driver."""
        return sum(self._sizes.values())

    def take(self, nbytes: int) -> int:
        """Allocate a piece, and return its address."""
        size = -(-max(nbytes, 1) // ALIGN) * ALIGN
        for slab, holes in self._free.items():
            for hole in holes:
                if hole[1] >= size:
                    return self._cut(slab, holes, hole, size)
        slab_size = max(size, SLAB)
        slab = self._reserve(slab_size)
        self._sizes[slab], self._free[slab] = slab_size, [[slab, slab_size]]
        return self._cut(slab, self._free[slab], self._free[slab][0], size)

    def _cut(self, slab: int, holes: list[list[int]], hole: list[int], size: int) -> int:
        address = hole[0]
        self._owner[address] = slab, size
        hole[0], hole[1] = address + size, hole[1] - size
        if not hole[1]:
            holes.remove(hole)
        return address

    def give(self, address: int) -> None:
        """Free a piece. A slab without pieces is returned to the driver."""
        slab, size = self._owner.pop(address)
        holes = sorted([*self._free[slab], [address, size]])
        merged = [holes[0]]
        for hole in holes[1:]:
            if merged[-1][0] + merged[-1][1] == hole[0]:
                merged[-1][1] += hole[1]
            else:
                merged.append(hole)
        self._free[slab] = merged
        if merged[0] == [slab, self._sizes[slab]]:
            del self._free[slab], self._sizes[slab]
            self._release(slab)

    def close(self) -> None:
        """Return all slabs to the driver. If one fails, the others are returned nevertheless."""
        slabs, self._free, self._owner, self._sizes = list(self._sizes), {}, {}, {}
        with ExitStack() as rest:
            for slab in slabs:
                rest.callback(self._release, slab)
