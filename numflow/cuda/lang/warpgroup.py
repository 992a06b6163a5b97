"""Matrices of a warpgroup (wgmma, sm_90a): four warps multiply tiles that lie in shared memory, in the background.

A tile has rows of 32 columns of 16 bits, or 64 columns of 8 bits, 64 bytes each, in the order that the tensor cores
call the swizzle of 64 bytes: part p of 16 bytes of row r is at words 16 r + 4 (p ^ (r / 2) % 4), so that neither 8 rows
of one part nor two rows with all parts meet in a bank. A tile begins at a multiple of 512 bytes (PTX ISA, "Shared
Memory Matrix Layout" of wgmma.mma_async).

Who may touch what: after `fence_tiles` and a barrier of the block, tiles that threads wrote may be multiplied. From
`multiply_tiles` to `wait_tiles` sums and tiles are the tensor cores'.
"""

import numpy as np

from numflow.cuda.lang.arithmetic import _bfloats, _halves
from numflow.cuda.lang.float8 import e4m3_values, e5m2_values
from numflow.cuda.lang.intrinsic import asm, builtin
from numflow.cuda.lang.kernel import device
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.simulator import NOW, together

TILE = 64           # rows of the left tile of a product
ACROSS = 128        # rows of the right one
TILE_WORDS = 16 * TILE
SUMS = ACROSS // 2  # of a thread: 32 w + l has rows 16 w + l / 4 and 8 below, columns 8 j + 2 (l % 4) and the next
ALIGNMENT = 1024    # bytes that tiles in shared memory begin at multiples of


@device
def tile_place(row, part):
    """The word of a tile at which part 0 .. 3 of 16 bytes of a row begins."""
    return u32(row * 16 + 4 * (part ^ (row >> u32(1) & u32(3))))


@asm((), (), "fence.proxy.async.shared::cta;", "effect", "memory")
def fence_tiles() -> None:
    """Let the tensor cores see what this thread wrote to shared memory; before the barrier."""


@asm((), (), "wgmma.fence.sync.aligned;", "effect", "memory", "convergent")
def begin_tiles() -> None:
    """Hand over sums that this warp has written; before the first product, and after others touched them."""


@builtin("wgmma_f16")
def multiply_tiles_f16(sums, at: int, left, left_at: int, right, right_at: int) -> None:
    """sums[at : at + 64] += left [64, 32] times right [128, 32] transposed: tiles of float16 in shared memory (u32
    pointers) from these words on; a warp's 16 rows are those of its place in the warpgroup."""
    _multiply(sums, at, left, left_at, right, right_at, _halves, _halves)


@builtin("wgmma_bf16")
def multiply_tiles_bf16(sums, at: int, left, left_at: int, right, right_at: int) -> None:
    """multiply_tiles_f16 of bfloat16."""
    _multiply(sums, at, left, left_at, right, right_at, _bfloats, _bfloats)


@builtin("wgmma_e4m3")
def multiply_tiles_e4m3(sums, at: int, left, left_at: int, right, right_at: int) -> None:
    """sums[at : at + 64] += left [64, 64] times right [128, 64] transposed: tiles of 8-bit floats of 4 + 3 bits."""
    _multiply(sums, at, left, left_at, right, right_at, e4m3_values, e4m3_values)


@builtin("wgmma_e5m2")
def multiply_tiles_e5m2(sums, at: int, left, left_at: int, right, right_at: int) -> None:
    """multiply_tiles_e4m3 with a left tile of floats of 5 + 2 bits."""
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
    """Begin the products since the last call."""


@asm((), (), "wgmma.wait_group.sync.aligned 1;", "effect", "memory", "convergent")
def wait_older_tiles() -> None:
    """Wait for the products of this warp but those that were sent off last: the tiles of the others are free, once all
    warps have come here."""


@builtin("wgmma_wait")
def wait_tiles(sums) -> None:
    """Wait for all products of this warp, of which `sums` has 128."""
