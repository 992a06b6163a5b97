"""The host's copy of KV blocks whose requests had to make place."""

from collections.abc import Sequence

import numpy as np

from numflow.engine.runner.kv_memory import MemoryPlan
from numflow.engine.schedule.blocks import BlockAllocator


class HostBlocks:
    """Memory for blocks of a program outside of it; grows as the allocator does.

    size: bytes of a block. window: of the layers whose blocks they are, None: of all layers.
    """

    def __init__(self, program, size: int, window: int | None = None):
        self.program, self.size = program, size
        self.only = () if window is None else (window,)  # what the program is told beside the blocks
        self.allocator = BlockAllocator()
        self.allocator.on_grow = self._grow
        self.memory: MemoryPlan | None = None  # of the machine that they are on; None: they grow as they have to
        self._data = np.zeros((0, 0), np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._data.nbytes

    def save(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy program blocks to host blocks: (block, host block)."""
        blocks, places = zip(*moves)
        self._data[list(places)] = self.program.save_blocks(list(blocks), *self.only)

    def load(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks to program blocks: (host block, block)."""
        places, blocks = zip(*moves)
        self.program.load_blocks(list(blocks), self._data[list(places)], *self.only)

    def _grow(self, capacity: int) -> None:
        if self.memory is not None:
            self.memory.check(0, -(-(capacity - len(self._data)) * self.size // max(1, self.memory.block)))
        data = np.zeros((capacity, self.size), np.uint8)
        if len(self._data):
            data[:len(self._data)] = self._data
        self._data = data
