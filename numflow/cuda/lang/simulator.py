"""Runs kernels as plain Python, one coroutine per GPU thread, in an order that a seed shuffles.

A thread runs until it meets a barrier; its warp goes on when all 32 lanes are there, its block when all threads are. So
kernels that forget a barrier give other results under another seed, and one that some threads pass and others do not
is an error here, as it hangs there. Pointers know the memory they point into: an index outside it is an error too, and
shared memory begins as garbage. What cannot be found here: missing fences, bank conflicts, speed.
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
    """A kernel did what no kernel may: a barrier that not all threads reach, an address outside its memory."""


class SimulatedPointer:
    """A pointer: `array[start:]`, with every access checked against the array's bounds. address: of the array, as a
    multiple of what vectors may be."""

    __slots__ = ("address", "array", "load", "size", "space", "start", "views")

    def __init__(self, array: np.ndarray, start: int = 0, space: str = "global"):
        self.array, self.start, self.space, self.size = array, start, space, array.size
        # Floats stay NumPy's, for their arithmetic; integers become Python's, which kernels wrap as they say.
        self.load = array.__getitem__ if array.dtype.kind == "f" else array.item
        self.address = array.ctypes.data if space == "global" else 0
        self.views: dict[type, SimulatedPointer] = {}  # the array as other types, of all pointers into it

    def at(self, index: int, count: int = 1) -> int:
        """Checked place in the array of `count` elements from `index` on."""
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
        other = _blank(SimulatedPointer)  # asking NumPy again would take longer than all else here
        other.array, other.load, other.size, other.views = self.array, self.load, self.size, self.views
        other.start, other.space, other.address = self.start + int(count), self.space, self.address
        return other


_blank = object.__new__


class Thread:
    """State of a thread. waits: "warp" or "block" at a barrier; turn: number of exchanges that it took part in.
    copies: groups of background copies that have not landed, the open one last. next: who runs then in its warp."""

    __slots__ = ("block", "copies", "coroutine", "error", "lane", "next", "turn", "waits", "warp", "work")

    def begin(self, block: "Block", warp: "Warp", lane: int, work: tuple[Callable, tuple]) -> None:
        """Be a thread of this block."""
        self.block, self.warp, self.lane, self.turn, self.waits, self.work = block, warp, lane, 0, "", work
        self.copies, self.error = [[]], None


class Warp:
    """32 threads; slots: what they hand to each other, twice, so that one barrier per exchange is enough."""

    __slots__ = ("first", "memo", "slots", "threads")

    def __init__(self, first):
        self.first, self.threads, self.slots, self.memo = first, [], ([None] * WARP, [None] * WARP), (-1, None)


class Block:
    """A block: its place in the grid, its size, its shared memory by declaration, counts in it by their place."""

    __slots__ = ("counts", "grid", "index", "shared", "size")

    def __init__(self, index, grid, size):
        self.index, self.grid, self.size, self.shared = index, grid, size, {}
        self.counts: dict[int, Count] = {}

    def memory(self, declaration, scalar: Scalar, count: int) -> SimulatedPointer:
        """Shared memory of a declaration; garbage until written (NaN as a float)."""
        if declaration not in self.shared:
            array = np.full(count * scalar.size, 0xFF, np.uint8).view(scalar.dtype)
            self.shared[declaration] = SimulatedPointer(array, 0, "shared")
        return self.shared[declaration]


class Count:
    """Arrivals and bytes that threads wait for (lang/cluster.py). arrivals: of a turn; left: that it still waits for.
    expected: bytes of the turn; copies: of it that have not landed."""

    __slots__ = ("arrivals", "copies", "expected", "left", "turn")

    def __init__(self, arrivals: int):
        self.arrivals = self.left = arrivals
        self.turn, self.expected, self.copies = 0, 0, []

    def arrive(self) -> None:
        """One thread has."""
        if self.left == 0:
            raise SimulatorError("more threads arrive at a count than it has")
        self.left -= 1
        if not self.expected:
            self._end()

    def send(self, array: np.ndarray, at: int, words: np.ndarray) -> None:
        """Words are on their way to a place."""
        self.copies.append((array, at, words))

    def is_over(self, turn: int) -> bool:
        """Whether a turn of this number has ended; it ends as late as it may, when somebody asks."""
        if self.turn & 1 == turn:
            self._end()
        return self.turn & 1 != turn

    def _end(self) -> None:
        """End the turn if nothing is missing: its copies land."""
        if self.left or sum(words.nbytes for _, _, words in self.copies) != self.expected:
            return
        for array, at, words in self.copies:
            array[at:at + words.size] = words
        self.turn, self.left, self.expected, self.copies = self.turn + 1, self.arrivals, 0, []


class _Now:
    """The thread that is running, and who gets on when a warp has."""

    thread: Thread
    scheduler: Any


NOW = _Now()
_ONE_AT_A_TIME = threading.Lock()  # NOW is one for the process
_CREW = threading.local()          # threads that have ended, for the next launch: to make one costs more than most run


def launch(body: Callable, grid: tuple[int, int, int], threads: int, args: tuple, seed: int = 0) -> None:
    """Run a kernel on every block of the grid. The seed decides the order of blocks, warps and lanes.

    Raises:
        SimulatorError: the kernel is wrong; the message says how.
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
    """So many threads that have nothing to do."""
    from greenlet import greenlet

    idle = _CREW.__dict__.setdefault("idle", [])
    while len(idle) < count:
        thread = Thread()
        thread.coroutine = greenlet(_work)
        thread.coroutine.gr_context = copy_context()  # where NumPy keeps what it warns of
        thread.coroutine.switch(thread)
        idle.append(thread)
    taken = idle[-count:]
    del idle[-count:]
    return taken


def _work(thread: Thread) -> None:
    """Endless loop of a thread's coroutine: wait for a block, run the kernel, let the next coroutine run."""
    thread.coroutine.parent.switch()
    while True:
        body, args = thread.work
        try:
            body(*args)
        except Exception as error:
            thread.error = error
            NOW.scheduler.switch()
        del body, args  # of device memory nothing is held while it waits
        thread.waits = "end"
        _get_on(thread)


def _get_on(thread: Thread) -> None:
    """Let the next thread of the warp run; who does that runs again when its turn has come."""
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


def _run_warp(warp) -> bool:
    """Run the lanes until all have ended (False) or all wait for the block (True)."""
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
    """Wait for the "warp" or the "block"."""
    thread = NOW.thread
    thread.waits = kind
    _get_on(thread)


def exchange(value) -> list:
    """Hand a value to the warp; the values of all lanes."""
    thread = NOW.thread
    slots = thread.warp.slots[thread.turn & 1]
    slots[thread.lane] = value
    thread.turn += 1
    thread.waits = "warp"
    _get_on(thread)
    return slots


def together(value, function: Callable):
    """function(values of all lanes), worked out once for the whole warp."""
    thread = NOW.thread
    slots, warp = exchange(value), thread.warp
    if warp.memo[0] != thread.turn:
        warp.memo = thread.turn, function(slots)
    return warp.memo[1]
