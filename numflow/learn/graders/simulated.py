"""Runs of students' GPU kernels on the simulator, in several orders of threads, with detection of data races."""

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
    """Run a kernel and return the new content of the first array.

    The kernel's parameters are pointers to the arrays, followed by the numbers.
    """
    device, addresses = Simulated(seed=seed), []
    for array in arrays:
        memory = device.alloc(max(256, array.nbytes))
        device.upload(memory.at(), array)
        addresses.append(memory.at())
    kernel = Kernel(body.__name__, body, parameters, threads)
    device.launch(Launch(kernel, (grid, 1, 1), (*addresses, *numbers)))
    return device.download(addresses[0], arrays[0].nbytes).view(arrays[0].dtype).reshape(arrays[0].shape)


class WatchedPointer(SimulatedPointer):
    """Shared memory that records which thread accessed which element, and how many barriers it had passed then.

    Two accesses are a data race if they are by two threads to the same element, at least one is a write, and no barrier
    is between them. For threads of one warp sync_warp, an exchange and sync_block are barriers; for threads of two
    warps only sync_block is one.
    """

    __slots__ = ("counts", "seen")

    def __init__(self, array: np.ndarray, counts: Any):
        super().__init__(array, 0, "shared")
        self.counts = counts
        # element -> thread -> "reads" or "writes" -> (barriers of the warp, barriers of the block) at the last access
        self.seen: dict[int, dict[int, dict[str, tuple[int, int]]]] = defaultdict(lambda: defaultdict(dict))

    def __getitem__(self, index):
        self._note(int(index), "reads")
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        self._note(int(index), "writes")
        super().__setitem__(index, value)

    def _note(self, index: int, access: str) -> None:
        thread = NOW.thread
        me = thread.warp.first + thread.lane
        warp, block = self.counts[thread.block, me]
        for other, last in self.seen[index].items():
            same_warp = other // 32 == me // 32
            for earlier, (its_warp, its_block) in last.items() if other != me else ():
                if "writes" in (access, earlier) and (its_warp == warp if same_warp else its_block == block):
                    barrier = "barrier" if same_warp else "sync_block"
                    raise SimulatorError(f"race: thread {me} {access} shared[{index}], which thread {other} {earlier}, "
                                         f"with no {barrier} between")
        self.seen[index][me][access] = warp, block


@contextmanager
def watched() -> Iterator[None]:
    """A context in which data races in shared memory are errors, in any order of threads."""
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
    """Number of exchanges and barriers per thread of a kernel, on average."""
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
    """(message, evidence) of a wrong kernel; ("", None) if it is right.

    Data races and other errors of the simulator are reported first, as the result may be right by luck.
    """
    spread = max(float(np.std(expected)), 1e-3)
    bound *= max(float(np.abs(expected).max()), spread) / spread  # for a single element, whose deviation is 0
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
