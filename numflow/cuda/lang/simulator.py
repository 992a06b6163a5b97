"""The simulator: runs kernels as plain Python, one coroutine for each GPU thread, in an order that depends on a seed.

A thread runs until a barrier. A warp continues when all 32 lanes have reached it, a block when all threads have. So a
kernel without a necessary barrier gives different results with different seeds, and a barrier that only some threads
reach is an error (on a GPU it hangs). Pointers are checked against the bounds of their memory. Shared memory is
initialised with garbage. The simulator does not find missing fences or bank conflicts, and says nothing about speed.
"""

import random
import threading
from collections.abc import Callable
from contextvars import copy_context
from itertools import pairwise
from typing import Any

import numpy as np

from numflow.cuda.lang.scalar import Scalar
from numflow.distribution import install
from numflow.errors import DeviceError

WARP = 32


class SimulatorError(Exception):
    """An error of a kernel, such as a barrier that not all threads reach, or an address out of bounds."""


class SimulatedPointer:
    """A pointer to `array[start:]`; every access is checked against the array's bounds.

    address: of the array in memory, for checks of alignment.
    """

    __slots__ = ("address", "array", "load", "size", "space", "start", "views")

    def __init__(self, array: np.ndarray, start: int = 0, space: str = "global"):
        self.array, self.start, self.space, self.size = array, start, space, array.size
        # Floats stay NumPy scalars, for float32 arithmetic; integers become Python integers, which kernels wrap.
        self.load = array.__getitem__ if array.dtype.kind == "f" else array.item
        self.address = array.ctypes.data if space == "global" else 0
        self.views: dict[type, SimulatedPointer] = {}  # views as other types, shared by all pointers into the array

    def at(self, index: int, count: int = 1) -> int:
        """Index in the array of `count` elements from `index` on, after a check of bounds."""
        place = self.start + int(index)
        if place < 0 or place + count > self.size:
            raise SimulatorError(f"{self.space} {self.array.dtype}[{self.size}] accessed at {place}"
                                 + (f" .. {place + count - 1}" if count > 1 else ""))
        return place

    def view(self, dtype: type) -> "SimulatedPointer":
        """The same address as a pointer to another type."""
        if dtype not in self.views:
            self.views[dtype] = SimulatedPointer(self.array.view(dtype), 0, self.space)
        whole = self.views[dtype]
        return whole + self.start * self.array.itemsize // whole.array.itemsize

    def __getitem__(self, index):
        place = self.start + index
        if 0 <= place < self.size:
            return self.load(place)
        return self.at(index)

    def __setitem__(self, index, value):
        place = self.start + index
        self.array[place if 0 <= place < self.size else self.at(index)] = value

    def __add__(self, count):
        other = _blank(SimulatedPointer)  # __init__ would query NumPy again, which is slow
        other.array, other.load, other.size, other.views = self.array, self.load, self.size, self.views
        other.start, other.space, other.address = self.start + int(count), self.space, self.address
        return other


_blank = object.__new__


class Thread:
    """The state of a thread.

    waits: "warp" or "block" at a barrier. turn: number of warp exchanges so far. copies: groups of pending cp.async,
    the open group last. next: the thread of the warp that runs after this one.
    """

    __slots__ = ("block", "copies", "coroutine", "error", "lane", "next", "turn", "waits", "warp", "work")

    def begin(self, block: "Block", warp: "Warp", lane: int, work: tuple[Callable, tuple]) -> None:
        """Start as a thread of this block."""
        self.block, self.warp, self.lane, self.turn, self.waits, self.work = block, warp, lane, 0, "", work
        self.copies, self.error = [[]], None


class Warp:
    """32 threads. slots: values that lanes exchange; two sets, so that one barrier per exchange is enough."""

    __slots__ = ("first", "memo", "slots", "threads")

    def __init__(self, first):
        self.first, self.threads, self.slots, self.memo = first, [], ([None] * WARP, [None] * WARP), (-1, None)


class Block:
    """A block: its index in the grid, its size, shared memory by declaration, mbarriers by their index, tensor memory
    (lang/tensor_memory.py)."""

    __slots__ = ("counts", "grid", "index", "shared", "size", "tensor")

    def __init__(self, index, grid, size):
        self.index, self.grid, self.size, self.shared = index, grid, size, {}
        self.counts: dict[int, Count] = {}
        self.tensor: Any = None

    def memory(self, declaration, scalar: Scalar, count: int) -> SimulatedPointer:
        """Shared memory of a declaration, initially garbage (NaN as a float)."""
        if declaration not in self.shared:
            array = np.full(count * scalar.size, 0xFF, np.uint8).view(scalar.dtype)
            self.shared[declaration] = SimulatedPointer(array, 0, "shared")
        return self.shared[declaration]


class Count:
    """An mbarrier (lang/cluster.py).

    arrivals: expected in a phase. left: arrivals that the current phase still waits for. turn: number of completed
    phases. expected: bytes that the phase waits for. copies: pending bulk copies of the phase. products: functions
    that compute the products whose completion counts as an arrival.
    """

    __slots__ = ("arrivals", "copies", "expected", "left", "products", "turn")

    def __init__(self, arrivals: int):
        self.arrivals = self.left = arrivals
        self.turn, self.expected, self.copies = 0, 0, []
        self.products: list[Callable] = []

    def arrive(self) -> None:
        """Arrive with one thread."""
        if self.left == 0:
            raise SimulatorError("more threads arrive at a count than it has")
        self.left -= 1
        if not self.expected:
            self._end()

    def arrive_later(self, product: Callable) -> None:
        """Arrive when products are complete; `product` computes them when the phase ends."""
        if self.left == 0:
            self._end()
        if self.left == 0:
            raise SimulatorError("more threads arrive at a count than it has")
        self.left -= 1
        self.products.append(product)

    def send(self, array: np.ndarray, at: int, words: np.ndarray) -> None:
        """Start a copy of words to array[at:]."""
        self.copies.append((array, at, words))

    def is_over(self, turn: int) -> bool:
        """Whether the phase with this parity is complete. A phase completes as late as possible: when a thread
        polls."""
        if self.turn & 1 == turn:
            self._end()
        return self.turn & 1 != turn

    def _end(self) -> None:
        """Complete the phase if all arrivals and bytes are there: write the copies."""
        if self.left or sum(words.nbytes for _, _, words in self.copies) != self.expected:
            return
        for array, at, words in self.copies:
            array[at:at + words.size] = words
        for product in self.products:
            product()
        self.turn, self.left, self.expected, self.copies, self.products = self.turn + 1, self.arrivals, 0, [], []


class _Now:
    """The running thread, and the scheduler's coroutine."""

    thread: Thread
    scheduler: Any


NOW = _Now()
_ONE_AT_A_TIME = threading.Lock()  # NOW is global in the process
_CREW = threading.local()          # idle simulated threads, reused by later launches because creating them is slow


def launch(body: Callable, grid: tuple[int, int, int], threads: int, args: tuple, seed: int = 0) -> None:
    """Run a kernel on every block of the grid. The seed determines the order of blocks, warps and lanes.

    Raises:
        SimulatorError: an error of the kernel.
        DeviceError: the package greenlet is missing.
    """
    try:
        from greenlet import getcurrent
    except ImportError:
        raise DeviceError(f"the simulator of the GPU needs the package greenlet: {install('cuda')}") from None
    rng = random.Random(seed)
    indices = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    if seed:
        rng.shuffle(indices)
    if threads % WARP:
        raise SimulatorError(f"blocks should be of whole warps, not of {threads} threads")
    with _ONE_AT_A_TIME, np.errstate(all="ignore"):
        NOW.scheduler, crew = getcurrent(), _crew(threads)
        for index in indices:
            _run_block(crew, (body, args), Block(index, grid, threads), rng if seed else None)
        for thread in crew:
            thread.work = thread.block = thread.warp = None
        _CREW.idle += crew


def _crew(count: int) -> list[Thread]:
    """Take `count` idle simulated threads; create more if needed."""
    from greenlet import greenlet

    idle = _CREW.__dict__.setdefault("idle", [])
    while len(idle) < count:
        thread = Thread()
        thread.coroutine = greenlet(_work)
        thread.coroutine.gr_context = copy_context()  # NumPy's error settings are context variables
        thread.coroutine.switch(thread)
        idle.append(thread)
    taken = idle[-count:]
    del idle[-count:]
    return taken


def _work(thread: Thread) -> None:
    """The loop of a thread's coroutine: wait for a block, run the kernel, switch to the next coroutine."""
    thread.coroutine.parent.switch()
    while True:
        body, args = thread.work
        try:
            body(*args)
        except Exception as error:
            thread.error = error
            NOW.scheduler.switch()
        del body, args  # an idle thread must not keep device memory alive
        thread.waits = "end"
        _get_on(thread)


def _get_on(thread: Thread) -> None:
    """Switch to the next thread of the warp. The call returns when the thread is resumed."""
    after = thread.next
    if after is None:
        NOW.scheduler.switch()
    else:
        NOW.thread = after
        after.coroutine.switch()


def _run_block(crew, work, block, rng):
    warps = [Warp(first) for first in range(0, block.size, WARP)]
    for warp in warps:
        warp.threads = crew[warp.first:warp.first + WARP]
        for lane, thread in enumerate(warp.threads):
            thread.begin(block, warp, lane, work)
        if rng:
            rng.shuffle(warp.threads)
        for thread, after in pairwise([*warp.threads, None]):
            thread.next = after
    if rng:
        rng.shuffle(warps)
    waiting = warps
    while waiting:
        waiting = [warp for warp in waiting if _run_warp(warp)]
        if waiting and len(waiting) < len(warps):
            raise SimulatorError(f"{len(waiting)} of {len(warps)} warps wait at a barrier of their block, "
                                 "the others have ended")
    if block.tensor is not None:
        block.tensor.end()


def _run_warp(warp) -> bool:
    """Run the lanes until all have exited (returns False) or all wait at a block barrier (returns True)."""
    first = warp.threads[0]
    while True:
        NOW.thread = first
        first.coroutine.switch()
        if NOW.thread.error is not None:
            raise NOW.thread.error
        states = {thread.waits for thread in warp.threads}
        if len(states) > 1:
            raise SimulatorError(f"the lanes of a warp part: some are at {' and some at '.join(sorted(states))}")
        (state,) = states
        if state != "warp":
            return state == "block"


def wait(kind: str) -> None:
    """Wait at a barrier of the "warp" or the "block"."""
    thread = NOW.thread
    thread.waits = kind
    _get_on(thread)


def exchange(value) -> list:
    """Exchange a value within the warp. Returns the values of all lanes."""
    thread = NOW.thread
    slots = thread.warp.slots[thread.turn & 1]
    slots[thread.lane] = value
    thread.turn += 1
    thread.waits = "warp"
    _get_on(thread)
    return slots


def together(value, function: Callable):
    """function(values of all lanes), computed once for the whole warp."""
    thread = NOW.thread
    slots, warp = exchange(value), thread.warp
    if warp.memo[0] != thread.turn:
        warp.memo = thread.turn, function(slots)
    return warp.memo[1]
