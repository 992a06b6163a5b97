"""Students' GPU kernels on the simulator, under several orders of threads, with races in shared memory as errors."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.lang import intrinsics, simulator
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.lang.simulator import NOW, SimulatedPointer, SimulatorError
from numflow.learn.cases.verdict import described, furthest

SEEDS = range(8)


def run_kernel(body: Callable, parameters: tuple, grid: int, threads: int, arrays: tuple[np.ndarray, ...],
               numbers: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    """The first array after a kernel whose parameters are pointers to the arrays, then the numbers."""
    device, places = Simulated(seed=seed), []
    for array in arrays:
        memory = device.alloc(max(256, array.nbytes))
        device.upload(memory.at(), array)
        places.append(memory.at())
    kernel = Kernel(body.__name__, body, parameters, threads)
    device.launch(Launch(kernel, (grid, 1, 1), (*places, *numbers)))
    return device.download(places[0], arrays[0].nbytes).view(arrays[0].dtype).reshape(arrays[0].shape)


class WatchedPointer(SimulatedPointer):
    """Shared memory that remembers who touched what between which barriers.

    Two accesses race if they are of two threads, touch the same element, at least one writes, and no barrier stands
    between: threads of one warp have passed no sync_warp, exchange or sync_block since; of two warps, no sync_block.
    """

    __slots__ = ("counts", "seen")

    def __init__(self, array: np.ndarray, counts: Any):
        super().__init__(array, 0, "shared")
        self.counts = counts
        # element -> thread -> the barriers of its warp and of its block, when it last read and when it last wrote
        self.seen: dict[int, dict[int, dict[str, tuple[int, int]]]] = defaultdict(lambda: defaultdict(dict))

    def __getitem__(self, index):
        self._note(int(index), "reads")
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        self._note(int(index), "writes")
        super().__setitem__(index, value)

    def _note(self, index: int, does: str) -> None:
        thread = NOW.thread
        number = thread.warp.first + thread.lane
        warp, block = self.counts[thread.block, number]
        for other, last in self.seen[index].items():
            near = other // 32 == number // 32
            for did, (its_warp, its_block) in last.items() if other != number else ():
                if "writes" in (does, did) and (its_warp == warp if near else its_block == block):
                    barrier = "barrier" if near else "sync_block"
                    raise SimulatorError(f"race: thread {number} {does} shared[{index}], which thread {other} {did}, "
                                         f"and no {barrier} stands between")
        self.seen[index][number][does] = warp, block


@contextmanager
def watched() -> Iterator[None]:
    """Races in shared memory are errors inside, whatever the order of threads is."""
    counts: Any = defaultdict(lambda: [0, 0])
    memory, wait, exchange = simulator.Block.memory, intrinsics.wait, intrinsics.exchange

    def me():
        return counts[NOW.thread.block, NOW.thread.warp.first + NOW.thread.lane]

    def watching(block, declaration, scalar, count):
        if declaration not in block.shared:
            array = np.full(count * scalar.size, 0xFF, np.uint8).view(scalar.dtype)
            block.shared[declaration] = WatchedPointer(array, counts)
        return block.shared[declaration]

    def waiting(kind):
        wait(kind)
        me()[0] += 1
        me()[1] += kind == "block"

    def exchanging(value):
        slots = exchange(value)
        me()[0] += 1
        return slots

    simulator.Block.memory = watching  # type: ignore[method-assign, assignment]
    intrinsics.wait, intrinsics.exchange = waiting, exchanging
    try:
        yield
    finally:
        simulator.Block.memory = memory  # type: ignore[method-assign]
        intrinsics.wait, intrinsics.exchange = wait, exchange


def waits(body: Callable, parameters: tuple, grid: int, threads: int, arrays: tuple, numbers: tuple = ()) -> int:
    """Exchanges and barriers that each thread of a kernel's blocks goes through, on average."""
    counted, wait, exchange = [0], intrinsics.wait, intrinsics.exchange

    def waiting(kind):
        counted[0] += 1
        wait(kind)

    def exchanging(value):
        counted[0] += 1
        return exchange(value)

    intrinsics.wait, intrinsics.exchange = waiting, exchanging
    try:
        run_kernel(body, parameters, grid, threads, arrays, numbers)
    finally:
        intrinsics.wait, intrinsics.exchange = wait, exchange
    return counted[0] // (grid * threads)


def fault(body: Callable, parameters: tuple, grid: int, threads: int, arrays: tuple, numbers: tuple,
          expected: np.ndarray, bound: float = 1e-5) -> tuple[str, Any]:
    """The fault of a kernel and what shows it; ("", None) if it is right.

    A race or another fault that the simulator finds comes first: numbers may be right by luck.
    """
    spread = max(float(np.std(expected)), 1e-3)
    bound *= max(float(np.abs(expected).max()), spread) / spread  # a single number has no spread
    try:
        with watched():
            found = run_kernel(body, parameters, grid, threads, arrays, numbers)
    except SimulatorError as error:
        return str(error), str(error)
    for seed in SEEDS:
        try:
            found = run_kernel(body, parameters, grid, threads, arrays, numbers, seed)
        except SimulatorError as error:
            return f"seed {seed}: {error}", str(error)
        flat = found.reshape(len(found), -1) if found.ndim > 1 else found
        if place := furthest(flat, expected.reshape(flat.shape), bound):
            return f"seed {seed}: {described(place)}", found
    return "", None
