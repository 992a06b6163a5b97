"""Device memory in slabs: a few large allocations of the driver, cut up here."""

from collections.abc import Callable
from contextlib import ExitStack

ALIGN = 256         # bytes that every piece starts on a multiple of
SLAB = 64 << 20     # bytes of a slab; larger pieces are slabs of their own


class Slabs:
    """First fit, neighbours joined when they are freed.

    reserve: allocates bytes and returns their address; release: gives an address back.
    """

    def __init__(self, reserve: Callable[[int], int], release: Callable[[int], None]):
        self._reserve, self._release = reserve, release
        self._free: dict[int, list[list[int]]] = {}  # slab -> [address, bytes] of its holes, in order
        self._owner: dict[int, tuple[int, int]] = {}  # address -> (slab, bytes)
        self._sizes: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes taken from the driver."""
        return sum(self._sizes.values())

    def take(self, nbytes: int) -> int:
        """Address of a piece."""
        size = -(-max(nbytes, 1) // ALIGN) * ALIGN
        for slab, holes in self._free.items():
            for hole in holes:
                if hole[1] >= size:
                    return self._cut(slab, holes, hole, size)
        whole = max(size, SLAB)
        slab = self._reserve(whole)
        self._sizes[slab], self._free[slab] = whole, [[slab, whole]]
        return self._cut(slab, self._free[slab], self._free[slab][0], size)

    def _cut(self, slab: int, holes: list[list[int]], hole: list[int], size: int) -> int:
        address = hole[0]
        self._owner[address] = slab, size
        hole[0], hole[1] = address + size, hole[1] - size
        if not hole[1]:
            holes.remove(hole)
        return address

    def give(self, address: int) -> None:
        """Free a piece; a slab without any goes back to the driver."""
        slab, size = self._owner.pop(address)
        holes = sorted([*self._free[slab], [address, size]])
        joined = [holes[0]]
        for hole in holes[1:]:
            if joined[-1][0] + joined[-1][1] == hole[0]:
                joined[-1][1] += hole[1]
            else:
                joined.append(hole)
        self._free[slab] = joined
        if joined[0] == [slab, self._sizes[slab]]:
            del self._free[slab], self._sizes[slab]
            self._release(slab)

    def close(self) -> None:
        """Give all slabs back; one that is refused keeps no other from being given back."""
        slabs, self._free, self._owner, self._sizes = list(self._sizes), {}, {}, {}
        with ExitStack() as rest:
            for slab in slabs:
                rest.callback(self._release, slab)
