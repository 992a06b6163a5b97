"""One call that runs all devices of a plan that are threads of one process.

Each thread walks the table of its own device; devices synchronise in the exchanges only. So a batch is checked once and
takes one call from Python, however many devices there are, and no device waits for the GIL.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from numflow.cpu.runtime.kernel import Code
from numflow.cpu.runtime.threads import shared_threads
from numflow.errors import DeviceError
from numflow.network.batch import BatchBounds, LastBatch, checked, given_rows
from numflow.ops import Batch, Network

_CODE = Code("numflow.cpu.runtime.threads_kernels")


class Lockstep:
    """Runs the programs of all devices of a world.

    network: the whole network, of which every program has a part.
    world:   the World of the devices.
    """

    def __init__(self, network: Network, programs: Sequence[Any], world: Any):
        self._programs, self._world = programs, world
        self._limits = {entry: BatchBounds(network, steps) for entry, steps in network.entries.items()}
        self._last = LastBatch()
        self._threads = shared_threads(sum(program.threads for program in programs))
        self._pools = np.array([(program.pool.address, thread, program.threads) for program in programs
                                for thread in range(program.threads)], np.int64)
        self._table = np.array([(_CODE.kernel("walk_group").address, self._pools.ctypes.data, 0)], np.int64)

    def run(self, batch: Batch, entry: str, outputs: Sequence[str | None]) -> np.ndarray | None:
        """As Program.run. outputs: for each device, the output that it has, or None; the first of them is returned.

        Raises:
            RequestError: an id or a position of the batch is out of range.
            DeviceError: the run was aborted (`World.abort`).
        """
        first = self._programs[0]
        blocks = dict(item for program in self._programs for item in program.window_blocks.items())
        limits, reserved = self._limits[entry], (blocks, first.cross_blocks, first.adapters)
        arrays = self._last.arrays(batch, (entry, *reserved), limits, first.block_size,
                                   lambda: checked(batch, limits, first.block_size, *reserved))
        given = given_rows(batch, limits)
        for program, output in zip(self._programs, outputs, strict=True):
            program.prepare(arrays, entry, output, given)
        self._threads.run(self._table, 1)
        if self._world.aborted:
            raise DeviceError("the run was broken off")
        return next((program.result(output) for program, output in zip(self._programs, outputs, strict=True)
                     if output is not None), None)
