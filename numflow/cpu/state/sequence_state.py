"""Memory of a recurrent step: one slot per sequence."""

import numpy as np

from numflow.cpu.memory.buffers import LINE, aligned
from numflow.network.windows import STATE
from numflow.ops import State


class StateMemory:
    """Slots of `nbytes` bytes; kernels find a sequence's slot index in the header's STATE_SLOTS.

    addresses: int64 [1], current address of the first slot. Kernels read it at run time, so the memory may move.
    stride:    bytes from one slot to the next, whole cache lines.
    """

    window = STATE

    def __init__(self, state: State, nbytes: int):
        self.shape, self.blocks = state, 0
        self.stride = -(-nbytes // LINE) * LINE
        self.addresses = np.zeros(1, np.int64)
        self._slots = aligned((0, self.stride), np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._slots.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot."""
        return self.stride

    def resize(self, blocks: int) -> bool:
        """Reserve `blocks` slots; slots that remain keep their content.

        Returns False: no kernel has to be bound again, since kernels read `addresses`.
        """
        if blocks == self.blocks:
            return False
        new = aligned((blocks, self.stride), np.uint8)
        count = min(blocks, self.blocks)
        new[:count] = self._slots[:count]
        self._slots, self.addresses[0], self.blocks = new, new.ctypes.data, blocks
        return False

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy slots, int64 [n] each; no target is a source."""
        self._slots[targets] = self._slots[sources]

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """The bytes of slots int64 [n], uint8 [n, block_bytes]."""
        return self._slots[blocks]

    def load(self, blocks: np.ndarray, data: np.ndarray) -> None:
        """Restore the bytes of slots that `save` returned, uint8 [n, block_bytes]."""
        self._slots[blocks] = data
