"""Matrix products of a warpgroup (wgmma, sm_90a): four warps multiply tiles in shared memory, asynchronously.

A tile has rows of 64 bytes: 32 columns of 16 bits, or 64 columns of 8 bits. It has the 64-byte swizzle: chunk p of 16
bytes of row r is at word 16 r + 4 (p ^ (r / 2) % 4), so that neither accesses to one chunk of 8 rows nor to all chunks
of two rows have bank conflicts. A tile is aligned to 512 bytes (PTX ISA, "Shared Memory Matrix Layout" of
wgmma.mma_async).

Synchronisation: tiles that threads have written may be multiplied after `fence_tiles` and a block barrier. Between
`multiply_tiles` and `wait_tiles`, threads must not access the accumulators or write the tiles.
"""

import numpy as np

from numflow.cuda.lang.arithmetic import _bfloats, _halves
from numflow.cuda.lang.float8 import e4m3_values, e5m2_values
from numflow.cuda.lang.intrinsic import asm, builtin
from numflow.cuda.lang.kernel import device
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.simulator import NOW, together

TILE = 64           # rows of the left tile of a product (M)
ACROSS = 128        # rows of the right tile (N)
TILE_WORDS = 16 * TILE
SUMS = ACROSS // 2  # accumulators of a thread: 32 w + l has rows 16 w + l / 4 and + 8, columns 8 j + 2 (l % 4) and + 1
ALIGNMENT = 1024    # alignment of tiles in shared memory, in bytes


@device
def tile_place(row, part):
    """Word offset in a tile of chunk 0 .. 3 of 16 bytes of a row."""
    return u32(row * 16 + 4 * (part ^ (row >> u32(1) & u32(3))))


@asm((), (), "fence.proxy.async.shared::cta;", "effect", "memory")
def fence_tiles() -> None:
    """Make this thread's writes to shared memory visible to the tensor cores; before the barrier."""


@asm((), (), "wgmma.fence.sync.aligned;", "effect", "memory", "convergent")
def begin_tiles() -> None:
    """wgmma.fence: make this warp's writes to accumulators visible; before the first product, and after later
    writes."""


@builtin("wgmma_f16")
def multiply_tiles_f16(sums, at: int, left, left_at: int, right, right_at: int) -> None:
    """sums[at : at + 64] += left [64, 32] times right [128, 32] transposed: float16 tiles in shared memory.

    left, right: u32 pointers; left_at, right_at: word offsets of the tiles. Each warp of the warpgroup has 16 rows.
    """
    _multiply(sums, at, left, left_at, right, right_at, _halves, _halves)


@builtin("wgmma_bf16")
def multiply_tiles_bf16(sums, at: int, left, left_at: int, right, right_at: int) -> None:
    """multiply_tiles_f16 for bfloat16 tiles."""
    _multiply(sums, at, left, left_at, right, right_at, _bfloats, _bfloats)


@builtin("wgmma_e4m3")
def multiply_tiles_e4m3(sums, at: int, left, left_at: int, right, right_at: int) -> None:
    """sums[at : at + 64] += left [64, 64] times right [128, 64] transposed: tiles of 8-bit floats, E4M3."""
    _multiply(sums, at, left, left_at, right, right_at, e4m3_values, e4m3_values)


@builtin("wgmma_e5m2")
def multiply_tiles_e5m2(sums, at: int, left, left_at: int, right, right_at: int) -> None:
    """multiply_tiles_e4m3 with a left tile of E5M2 floats."""
    _multiply(sums, at, left, left_at, right, right_at, e5m2_values, e4m3_values)


def _multiply(sums, at, left, left_at, right, right_at, values, right_values) -> None:
    thread = NOW.thread
    first = thread.warp.first // 32 % 4 * 16

    def rows(pointer, begin, wanted, values):
        begin = pointer.at(begin, 16 * (wanted[-1] + 1))
        parts = np.arange(4) ^ wanted[:, None] // 2 % 4
        places = begin + 16 * wanted[:, None, None] + 4 * parts[:, :, None] + np.arange(4)
        return values(np.ascontiguousarray(pointer.array[places].reshape(len(wanted), 16))).reshape(len(wanted), -1)

    def product(_):
        own = rows(left, left_at, first + np.arange(16), values)
        return own @ rows(right, right_at, np.arange(ACROSS), right_values).T

    result, row, column = together(None, product), thread.lane // 4, thread.lane % 4 * 2
    for j in range(ACROSS // 8):
        for i in range(4):
            sums[at + 4 * j + i] = f32(sums[at + 4 * j + i] + result[row + 8 * (i >> 1), 8 * j + column + (i & 1)])


@asm((), (), "wgmma.commit_group.sync.aligned;", "effect", "memory", "convergent")
def send_tiles() -> None:
    """wgmma.commit_group: close the group of products since the last call."""


@asm((), (), "wgmma.wait_group.sync.aligned 1;", "effect", "memory", "convergent")
def wait_older_tiles() -> None:
    """wgmma.wait_group 1: wait for all groups of this warp but the last. Once all warps have waited, the tiles of the
    finished products may be overwritten."""


@builtin("wgmma_wait")
def wait_tiles(sums) -> None:
    """wgmma.wait_group 0: wait for all products of this warp. sums: its 128 accumulators."""
