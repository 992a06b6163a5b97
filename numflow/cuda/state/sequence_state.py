"""State of a recurrent step in device memory: one slot for each sequence."""

import numpy as np

from numflow.cuda.device.device import Device, Memory, within_reach
from numflow.cuda.lang.parameters import Slots
from numflow.network.windows import STATE
from numflow.ops import State

UNIT = 16  # bytes; the size of a slot is a multiple of it


class StateMemory:
    """Slots for states of shape `shape`. The batch's `slots` gives each sequence's slot index.

    words: 32-bit words of a slot; for a matrix state, see its layout (matrix_state.py).
    """

    window = STATE

    def __init__(self, device: Device, state: State, words: int):
        self.device, self.shape, self.blocks = device, state, 0
        self.block_bytes = -(-4 * words // UNIT) * UNIT
        self._memory: Memory = device.alloc(self.block_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.blocks * self.block_bytes

    @property
    def slots(self) -> Slots:
        """Address of the first slot, and 32-bit words from one slot to the next. `resize` may move the memory."""
        return Slots(self._memory.at(), self.block_bytes // 4)

    def resize(self, blocks: int) -> bool:
        """Resize to `blocks` slots, and keep the content of the remaining ones. Returns whether the memory moved."""
        if blocks == self.blocks:
            return False
        new = self.device.alloc(within_reach("the states of a layer", max(blocks, 1) * self.block_bytes))
        if kept := min(blocks, self.blocks):
            self.device.copy(new.at(), self._memory.at(), kept * self.block_bytes)
        self.device.free(self._memory)
        self._memory, self.blocks = new, blocks
        return True

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Slot sources[i] -> slot targets[i], int64 [n] each."""
        size = self.block_bytes
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.device.copy(self._memory.at(target * size), self._memory.at(source * size), size)

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """Content of slots int64 [n], uint8 [n, block_bytes]."""
        saved = np.empty((len(blocks), self.block_bytes), np.uint8)
        for row, slot in zip(saved, blocks.tolist(), strict=True):
            row[:] = self.device.download(self._memory.at(slot * self.block_bytes), self.block_bytes)
        return saved

    def load(self, blocks: np.ndarray, data: np.ndarray) -> None:
        """The inverse of `save`."""
        for row, slot in zip(data, blocks.tolist(), strict=True):
            self.device.upload(self._memory.at(slot * self.block_bytes), row)
