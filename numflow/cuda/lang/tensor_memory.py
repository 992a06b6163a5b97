"""Matrix products of the fifth-generation tensor cores (tcgen05, sm_100a): results go to tensor memory.

Tensor memory belongs to a multiprocessor. It has 128 lanes and 512 columns of 32 bits. One warp allocates columns, in
powers of two from 32 on, and frees them before the kernel ends. An address is lane << 16 | column. A product of 128
rows and 128 columns has row i in lane i, and column j in column j. Warp w of a block reads only the lanes 32 (w % 4)
.. 32 (w % 4) + 31.

One thread starts products, which run asynchronously and in order. It commits them to an mbarrier (lang/cluster.py),
one of whose arrivals comes when all products that the thread has started so far are complete:

    allocate_columns(memory, at, 128); relinquish_columns(); before_barrier(); sync_block(); after_barrier()
    if thread == 0:
        multiply_e4m3(address, tiles, 0, tiles, 2 * TILE_WORDS, 0)
        commit_products(memory, done)
    wait_turn(memory, done, 0); after_barrier()
    load_tensor(values, address)

Tiles have the rows of lang/warpgroup.py: 64 bytes with the 64-byte swizzle. A product reads 128 of them, which are two
adjacent tiles of 64 rows. Tiles that threads have written may be multiplied after `fence_tiles` and a block barrier.

Scales of blocks of 4-bit floats are in tensor memory too: 4 columns for 64 columns of 128 rows. Lanes l, l + 32, l + 64
and l + 96 all have, in column c, the scale word (lang/float4.py) of row 32 c + l. `copy_scales` brings them from shared
memory. Products come after the copies that their thread has started before. The PTX ISA does not say that a copy comes
after earlier products.

Fences: a barrier or an mbarrier orders loads and products of different threads only between `before_barrier` and
`after_barrier`. A commit includes the first of these. (PTX ISA, "TensorCore 5th Generation Family Instructions".)
"""

from collections.abc import Callable

import numpy as np

from numflow.cuda.lang.cluster import _count
from numflow.cuda.lang.float4 import e2m1_values, mxfp4_scales, nvfp4_scales
from numflow.cuda.lang.float8 import e4m3_values, e5m2_values
from numflow.cuda.lang.intrinsic import asm, builtin
from numflow.cuda.lang.intrinsics import aligned
from numflow.cuda.lang.simulator import NOW, SimulatorError, together
from numflow.cuda.lang.warpgroup import TILE_WORDS

BLACKWELL = "sm_100a"   # target of kernels with these instructions: compute capability 10.x
LANES = 128             # lanes of tensor memory, and rows of a product
COLUMNS = 512           # columns of tensor memory
ACROSS = 128            # columns of a product
LOADED = 32             # columns that load_tensor loads
SCALES = 4              # columns of the scales of 128 rows
_QUARTER = 32           # lanes that a warp reads


class TensorMemory:
    """The tensor memory of a simulated block.

    words: float32 [lanes, columns], NaN at first. allocated: columns. pending: products and copies that have been
    started, each with its first column, its columns and its function; they run when a thread waits for an mbarrier, as
    late as possible. finished: how many came before pending[0].
    """

    def __init__(self):
        self.words = np.full((LANES, COLUMNS), np.nan, np.float32)
        self.allocated = np.zeros(COLUMNS, bool)
        self.pending: list[tuple[int, int, Callable]] = []
        self.finished, self.may_allocate = 0, True

    def allocate(self, columns: int) -> int:
        """The first column of new columns, the last ones of tensor memory that are free."""
        if not self.may_allocate:
            raise SimulatorError("tensor memory is allocated after the permit was relinquished")
        if columns not in (32, 64, 128, 256, 512) or self.allocated[:columns].any():
            raise SimulatorError(f"{columns} columns of tensor memory cannot be allocated")
        first = COLUMNS - columns - int(self.allocated.sum())
        self.allocated[first:first + columns] = True
        return first

    def check(self, column: int, count: int) -> None:
        """Check that columns are allocated."""
        if column + count > COLUMNS or not self.allocated[column:column + count].all():
            raise SimulatorError(f"columns {column} .. {column + count - 1} of tensor memory are not allocated")

    def finish(self, count: int) -> None:
        """Compute the first `count` products of the block that have not been computed."""
        while self.finished < count:
            self.finished += 1
            self.pending.pop(0)[2]()

    def end(self) -> None:
        """Checks at the end of the block."""
        if self.allocated.any():
            raise SimulatorError(f"{int(self.allocated.sum())} columns of tensor memory are not freed")


def _memory() -> TensorMemory:
    block = NOW.thread.block
    if block.tensor is None:
        block.tensor = TensorMemory()
    return block.tensor


@builtin("columns_allocate")
def allocate_columns(shared, at: int, columns: int) -> None:
    """tcgen05.alloc: allocate columns, and write the address to shared[at]. All lanes of one warp call it. It waits
    until another block of the multiprocessor has freed enough of them."""
    def run(_):
        shared.array[shared.at(at)] = _memory().allocate(columns)
    together(None, run)


@asm((), (), "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", "effect", "memory", "convergent")
def relinquish_columns() -> None:
    """tcgen05.relinquish_alloc_permit: this block allocates no more columns. All lanes of one warp call it."""
    _memory().may_allocate = False


@builtin("columns_free")
def free_columns(address: int, columns: int) -> None:
    """tcgen05.dealloc: free columns. All lanes of the warp that allocated them call it."""
    def run(_):
        memory, first = _memory(), address & 0xFFFF
        memory.check(first, columns)
        if memory.pending:
            raise SimulatorError("tensor memory is freed while products are pending")
        memory.allocated[first:first + columns] = False
    together(None, run)


@asm((), (), "tcgen05.fence::before_thread_sync;", "effect", "memory")
def before_barrier() -> None:
    """tcgen05.fence::before_thread_sync: a following barrier orders this thread's accesses to tensor memory."""


@asm((), (), "tcgen05.fence::after_thread_sync;", "effect", "memory")
def after_barrier() -> None:
    """tcgen05.fence::after_thread_sync: this thread's accesses to tensor memory come after the previous barrier."""


@builtin("tcgen05_e4m3")
def multiply_e4m3(address: int, left, left_at: int, right, right_at: int, accumulate: int) -> None:
    """Start the product left [128, 64] times right [128, 64] transposed, of tiles of 8-bit floats, E4M3; the results
    are added to tensor memory, or if `accumulate` is 0 replace it. One thread calls it.

    left, right: u32 pointers; left_at, right_at: word offsets of the tiles.
    """
    _multiply(address, left, left_at, right, right_at, accumulate, e4m3_values, e4m3_values)


@builtin("tcgen05_e5m2")
def multiply_e5m2(address: int, left, left_at: int, right, right_at: int, accumulate: int) -> None:
    """multiply_e4m3 with a left tile of E5M2 floats."""
    _multiply(address, left, left_at, right, right_at, accumulate, e5m2_values, e4m3_values)


@builtin("tcgen05_nvfp4")
def multiply_nvfp4(address: int, left, left_at: int, right, right_at: int, left_scales: int, right_scales: int,
                   accumulate: int) -> None:
    """multiply_e4m3 for tiles of 4-bit floats, left [128, 128] times right [128, 128] transposed, with NVFP4 scales.

    left_scales, right_scales: addresses of the scales of columns 0 .. 63; those of the others are SCALES columns
    further.
    """
    _multiply(address, left, left_at, right, right_at, accumulate, _scaled(left_scales, nvfp4_scales),
              _scaled(right_scales, nvfp4_scales))


@builtin("tcgen05_mxfp4")
def multiply_mxfp4(address: int, left, left_at: int, right, right_at: int, left_scales: int, right_scales: int,
                   accumulate: int) -> None:
    """multiply_nvfp4 with MXFP4 scales."""
    _multiply(address, left, left_at, right, right_at, accumulate, _scaled(left_scales, mxfp4_scales),
              _scaled(right_scales, mxfp4_scales))


def _multiply(address, left, left_at, right, right_at, accumulate, values, right_values) -> None:
    memory, column = _memory(), address & 0xFFFF
    if address >> 16:
        raise SimulatorError(f"a product in lane {address >> 16} of tensor memory")
    memory.check(column, ACROSS)

    def rows(pointer, begin, values):
        begin, row = pointer.at(begin, 2 * TILE_WORDS), np.arange(LANES)[:, None, None]
        part = np.arange(4)[:, None] ^ row // 2 % 4
        words = pointer.array[begin + 16 * row + 4 * part + np.arange(4)]
        return values(np.ascontiguousarray(words.reshape(LANES, 16))).reshape(LANES, -1)

    def product():
        result = rows(left, left_at, values) @ rows(right, right_at, right_values).T
        to = memory.words[:, column:column + ACROSS]
        to[:] = to + result if accumulate else result

    memory.pending.append((column, ACROSS, product))


def _scaled(address: int, scales_of: Callable) -> Callable:
    """A function that returns the values of 4-bit floats, times their scales in tensor memory."""
    memory, column = _memory(), address & 0xFFFF
    memory.check(column, 2 * SCALES)

    def values(words):
        found = memory.words.view(np.uint32)[:_QUARTER, column:column + 2 * SCALES]
        scales = scales_of(np.ascontiguousarray(found.reshape(_QUARTER, 2, SCALES).transpose(2, 0, 1)))
        scales = scales.reshape(LANES, -1)
        return e2m1_values(words).reshape(LANES, -1) * np.repeat(scales, 128 // scales.shape[1], axis=1)

    return values


@builtin("tcgen05_copy")
def copy_scales(address: int, shared, at: int) -> None:
    """tcgen05.cp: start a copy of 128 scale words from shared[at] to 4 columns of tensor memory. Word 4 l + c goes to
    column c of lanes l, l + 32, l + 64 and l + 96. One thread calls it."""
    memory, column = _memory(), address & 0xFFFF
    begin = aligned(shared, at, 4)
    shared.at(at, LANES)
    memory.check(column, SCALES)

    def copy():
        words = shared.array[begin:begin + LANES].reshape(_QUARTER, SCALES)
        memory.words.view(np.uint32)[:, column:column + SCALES] = np.tile(words, (LANES // _QUARTER, 1))

    memory.pending.append((column, SCALES, copy))


@builtin("tcgen05_commit")
def commit_products(shared, at: int) -> None:
    """tcgen05.commit: when all products that this thread has started are complete, one arrival at the mbarrier at
    shared[at]."""
    memory = _memory()
    count = memory.finished + len(memory.pending)
    _count(shared, at).arrive_later(lambda: memory.finish(count))


@builtin("tensor_load")
def load_tensor(values, address: int) -> None:
    """tcgen05.ld and tcgen05.wait::ld: values[i] is column i of 16, in the lane of the calling thread. All lanes of the
    warp call it, with the address of the warp's first lane. values: an array of the thread, 16 f32."""
    memory, thread = _memory(), NOW.thread
    lane, column = address >> 16, address & 0xFFFF
    memory.check(column, LOADED)
    if lane != thread.warp.first % LANES:
        raise SimulatorError(f"warp {thread.warp.first // 32} reads tensor memory from lane {lane} on")
    if any(first < column + LOADED and column < first + count for first, count, _ in memory.pending):
        raise SimulatorError(f"columns from {column} on are loaded while products into them are pending")
    values[:LOADED] = memory.words[lane + thread.lane, column:column + LOADED]
