"""Intrinsics for indices, barriers, warp shuffles and memory.

Each function is the Python twin of an intrinsic, which the simulator runs; on the device it becomes an LLVM intrinsic
or a PTX instruction (lowering.py). Arithmetic is in arithmetic.py. A word is a u32 with packed values: 4 bytes, or 2
halves, the lower column in the lower bits.
"""

import numpy as np

from numflow.cuda.lang import simulator
from numflow.cuda.lang.intrinsic import NEWER, WAIT, asm, builtin
from numflow.cuda.lang.simulator import NOW, exchange, wait

# ---- thread and block indices


@builtin("tid")
def thread_index() -> int:
    """u32: index of the thread in its block."""
    thread = NOW.thread
    return thread.warp.first + thread.lane


@builtin("laneid")
def lane_index() -> int:
    """u32: index of the thread in its warp, 0 .. 31."""
    return NOW.thread.lane


@builtin("ctaid.x")
def block_x() -> int:
    return NOW.thread.block.index[0]


@builtin("ctaid.y")
def block_y() -> int:
    return NOW.thread.block.index[1]


@builtin("ctaid.z")
def block_z() -> int:
    return NOW.thread.block.index[2]


@builtin("nctaid.x")
def grid_x() -> int:
    return NOW.thread.block.grid[0]


@builtin("nctaid.y")
def grid_y() -> int:
    return NOW.thread.block.grid[1]


@builtin("nctaid.z")
def grid_z() -> int:
    return NOW.thread.block.grid[2]


# ---- barriers and exchange


@builtin("syncthreads")
def sync_block() -> None:
    """Barrier of all threads of the block. Writes before it are visible after it."""
    wait("block")


@builtin("syncwarp")
def sync_warp() -> None:
    """Barrier of the lanes of the warp."""
    wait("warp")


@builtin("shfl_xor")
def shuffle_xor(value, mask: int):
    """The f32 or i32 value of lane `lane ^ mask`."""
    return exchange(value)[NOW.thread.lane ^ mask]


@builtin("shfl_idx")
def shuffle(value, lane: int):
    """The f32 or i32 value of a lane."""
    return exchange(value)[lane & 31]


@builtin("ballot")
def ballot(predicate) -> int:
    """u32: bit i is set if the predicate is true in lane i."""
    return sum(1 << lane for lane, value in enumerate(exchange(bool(predicate))) if value)


@asm((), (), f"{NEWER}{WAIT}", "effect", "memory")
def after_previous() -> None:
    """griddepcontrol.wait: wait for all earlier kernels, which may still run when this kernel starts (programmatic
    dependent launch). Memory that they write may be accessed only afterwards. If a kernel calls this, all of its
    threads must call it."""


# ---- memory


@builtin("prefetch")
def prefetch(pointer, index: int) -> None:
    """Prefetch the cache line with pointer[index] into L2 (sm_90)."""
    pointer.at(index)


@builtin("load4")
def load4(pointer, index: int) -> tuple:
    """4 values of 4 bytes from pointer[index] on: one 128-bit load, aligned to 16 bytes."""
    at, load = aligned(pointer, index, 4), pointer.load
    return load(at), load(at + 1), load(at + 2), load(at + 3)


@builtin("load2")
def load2(pointer, index: int) -> tuple:
    """2 values of 4 bytes: one 64-bit load."""
    at, load = aligned(pointer, index, 2), pointer.load
    return load(at), load(at + 1)


@builtin("stream4")
def stream4(pointer, index: int) -> tuple:
    """4 u32 of read-only memory that is read once, such as weights: one 128-bit load without allocation in L1."""
    at, load = aligned(pointer, index, 4), pointer.load
    return load(at), load(at + 1), load(at + 2), load(at + 3)


@builtin("stream2")
def stream2(pointer, index: int) -> tuple:
    """2 u32, as stream4."""
    at, load = aligned(pointer, index, 2), pointer.load
    return load(at), load(at + 1)


@builtin("stream1")
def stream1(pointer, index: int):
    """One u32 or u16 of read-only memory: no kernel writes it while this one runs."""
    return pointer[index]


@builtin("store4")
def store4(pointer, index: int, a, b, c, d) -> None:
    """4 values of 4 bytes at pointer[index]: one 128-bit store."""
    at, array = aligned(pointer, index, 4), pointer.array
    array[at], array[at + 1], array[at + 2], array[at + 3] = a, b, c, d


@builtin("store2")
def store2(pointer, index: int, a, b) -> None:
    """2 values of 4 bytes."""
    at, array = aligned(pointer, index, 2), pointer.array
    array[at], array[at + 1] = a, b


def aligned(pointer, index: int, count: int) -> int:
    """Index in the array of a vector access to `count` elements, after checking bounds and alignment."""
    at = pointer.start + index
    if at < 0 or at + count > pointer.size:
        pointer.at(index, count)
    size = pointer.array.itemsize
    if (pointer.address + at * size) % (count * size):
        raise simulator.SimulatorError(f"a vector of {count} at element {at} of {pointer.space} {pointer.array.dtype} "
                                       "is not aligned")
    return at


@builtin("as_u32")
def as_words(pointer):
    """The same address as a pointer to u32."""
    return pointer.view(np.uint32)


@builtin("as_u16")
def as_u16(pointer):
    """The same address as a pointer to u16."""
    return pointer.view(np.uint16)


@builtin("as_f32")
def as_floats(pointer):
    """The same address as a pointer to f32."""
    return pointer.view(np.float32)


@builtin("cp_async")
def copy_async(shared, at: int, source, index: int) -> None:
    """cp.async: copy 16 bytes from source[index] to shared[at], both u32 pointers, asynchronously (sm_80)."""
    begin = aligned(source, index, 4)
    NOW.thread.copies[-1].append((shared.array, aligned(shared, at, 4), source.array[begin:begin + 4].copy()))


@asm((), (), "cp.async.commit_group;", "effect", "memory")
def copy_commit() -> None:
    """cp.async.commit_group: close a group of asynchronous copies."""
    NOW.thread.copies.append([])


@asm((), (), "cp.async.wait_group 0;", "effect", "memory")
def copy_wait() -> None:
    """cp.async.wait_group 0: wait for all copies of this thread. A barrier must follow before other threads read."""
    _land(0)


@asm((), (), "cp.async.wait_group 1;", "effect", "memory")
def copy_wait_older() -> None:
    """cp.async.wait_group 1: wait for all groups of this thread but the last."""
    _land(1)


@asm((), (), "cp.async.wait_group 2;", "effect", "memory")
def copy_wait_third() -> None:
    """cp.async.wait_group 2: wait for all groups of this thread but the last two."""
    _land(2)


def _land(most: int) -> None:
    copies = NOW.thread.copies  # copies arrive as late as possible
    while len(copies) > 1 + most:
        for array, at, words in copies.pop(0):
            array[at:at + 4] = words


@builtin("atomic_add")
def atomic_add(pointer, index: int, value: int) -> int:
    """Add to an integer in memory, with wrap-around. Returns the old value."""
    before, bits = pointer[index], 8 * pointer.array.itemsize
    total = (before + value) % (1 << bits)
    pointer[index] = total - (1 << bits) if pointer.array.dtype.kind == "i" and total >> (bits - 1) else total
    return before
