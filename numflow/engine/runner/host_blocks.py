"""Host memory for KV blocks that are swapped out."""

from collections.abc import Sequence

import numpy as np

from numflow.engine.runner.kv_memory import MemoryPlan
from numflow.engine.schedule.blocks import BlockAllocator


class HostBlocks:
    """Host memory for blocks of a program; grows with its allocator.

    size: bytes of a block. window: window of the layers of these blocks, None: all layers.
    """

    def __init__(self, program, size: int, window: int | None = None):
        self.program, self.size = program, size
        self.only = () if window is None else (window,)  # further arguments of the program's methods
        self.allocator = BlockAllocator()
        self.allocator.on_grow = self._grow
        self.memory: MemoryPlan | None = None  # plan of the machine; None: grow without a check
        self._data = np.zeros((0, 0), np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._data.nbytes

    def save(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy program blocks to host blocks: (block, host block)."""
        blocks, host_blocks = zip(*moves)
        self._data[list(host_blocks)] = self.program.save_blocks(list(blocks), *self.only)

    def load(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks to program blocks: (host block, block)."""
        host_blocks, blocks = zip(*moves)
        self.program.load_blocks(list(blocks), self._data[list(host_blocks)], *self.only)

    def _grow(self, capacity: int) -> None:
        if self.memory is not None:
            self.memory.check(0, -(-(capacity - len(self._data)) * self.size // max(1, self.memory.block)))
        data = np.zeros((capacity, self.size), np.uint8)
        if len(self._data):
            data[:len(self._data)] = self._data
        self._data = data
