"""The operands "nvfp4" and "mxfp4": rows as 4-bit floats (E2M1) with a scale for each block of columns.

nvfp4  a block has 16 columns, its scale is a float of 4 + 3 bits, and a row is divided by a scale of its own, so that
       the largest scale of its blocks is the largest that there is: x = row * block * code. It is the published recipe,
       with a scale for a token where that has one for all
mxfp4  a block has 32 columns, its scale is the power of two by which its largest number becomes 4 .. 8; what is more
       than 6 then becomes 6. Scales of rows are 1

Tiles [T / 64][K / 128] have 64 rows of 128 columns, 64 bytes each in the order of lang/warpgroup.py, and then two words
of scales for each row, those of 64 columns each, as lang/float4.py has them: 4.5 KB in a row.

`rounded` says in NumPy what the kernels do.
"""

import functools

import numpy as np

from numflow.cuda.device.call import Call, ceil, per_row
from numflow.cuda.lang.arithmetic import bits_of, fabs, float_of, fmax
from numflow.cuda.lang.float4 import LARGEST_E2M1, e2m1_code, e2m1_values, pack_e2m1
from numflow.cuda.lang.float8 import LARGEST_E4M3, e4m3_code, e4m3_values, pack_e4m3
from numflow.cuda.lang.intrinsic import LocalArray
from numflow.cuda.lang.intrinsics import block_x, lane_index, shuffle_xor, store2, thread_index
from numflow.cuda.lang.kernel import FLOAT4, FLOAT4_MAJORS, Kernel, device, kernel
from numflow.cuda.lang.reduce import block_max
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.lang.warpgroup import TILE, TILE_WORDS, tile_place
from numflow.cuda.weights.decode import e4m3

FLOAT4_KINDS = ("nvfp4", "mxfp4")
COLUMNS = 128                       # of a tile
WORDS = TILE_WORDS + 2 * TILE       # of a tile and its scales
_THREADS, _GROUP = 256, 16          # of a block, which has a row for itself; columns of a thread
_LARGEST = LARGEST_E2M1 * LARGEST_E4M3
_SMALLEST = 1e-33                   # below, _LARGEST / max would overflow: such a row counts as zeros
_INFINITE = 0x7F800000              # bits of a float that are all set where it is infinite or no number
_numbers = LocalArray(f32, _GROUP)


def operand4_bytes(rows: int, columns: int) -> tuple[int, int]:
    """As operand.operand_bytes."""
    return ceil(rows, TILE) * ceil(columns, COLUMNS) * WORDS * 4, rows * 4


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """x [T, K], whole blocks, as the kernels round it: code * scale of the block * scale of the row."""
    block = 16 if kind == "nvfp4" else 32
    x = np.asarray(x, np.float32)
    blocks = x.reshape(len(x), -1, block)
    size, row = np.abs(blocks).max(2, keepdims=True), np.ones((len(x), 1, 1), np.float32)
    if kind == "nvfp4":
        row = np.maximum(size.max(1, keepdims=True), np.float32(_SMALLEST)) / np.float32(_LARGEST)
        scale = e4m3_values(e4m3_code(size / row / np.float32(LARGEST_E2M1)).astype(np.uint8))
    else:
        scale = np.ldexp(np.float32(1), np.maximum(np.frexp(size)[1] - 3, -127))
    codes = e2m1_code(blocks / row * np.where(scale > 0, 1 / np.maximum(scale, np.float32(2.0**-127)), 0))
    return (e2m1_values(codes)[..., 0] * scale * row).reshape(x.shape)


def bind_operand4(ctx, view, kind: str, x, aux) -> Call:
    """As operand.bind_operand."""
    source = *ctx.view(view), ctx.batch.counts, ctx.rows(view), view.width
    return per_row(None, operand_float4(kind), ctx.rows(view), 1, x, aux, ceil(view.width, COLUMNS), *source)


@device
def tile4(row, tile, tiles):
    """The word at which the tile of 128 columns of a row begins."""
    return u32((u32(row >> u32(6)) * tiles + tile) * WORDS)


@device
def finite_size(value):
    """The magnitude, infinite of what is no number."""
    return float_of(u32(_INFINITE)) if bits_of(value) & _INFINITE == _INFINITE else fabs(value)


@functools.cache
def operand_float4(kind: str) -> Kernel:
    """A block for each row, 16 columns of a thread at a time. Rows with a number that is not finite have an infinite
    scale, and so no finite result."""
    powers = kind == "mxfp4"

    @kernel(f"operand_{kind}", _THREADS, target=FLOAT4, majors=FLOAT4_MAJORS)
    def _rows(y: u32.ptr, scales: f32.ptr, tiles: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32,
              width: u32):
        # The row's largest number.
        row, thread, lane = u32(block_x()), u32(thread_index()), u32(lane_index())
        if row >= counts[rows]:
            return
        source, largest, column = x + row * x_stride, f32(0), thread
        while column < width:
            largest = fmax(largest, finite_size(source[column]))
            column = u32(column + _THREADS)
        largest = block_max(largest, _THREADS // 32)
        scale, inverse = f32(1), f32(1)
        if powers:
            scale = largest if largest == float_of(u32(_INFINITE)) else f32(1)
        else:
            scale = largest * f32(1 / _LARGEST)
            inverse = f32(_LARGEST) / largest if largest > f32(_SMALLEST) else f32(0)
        if thread == 0:
            scales[row] = scale
        # Blocks: their scales and codes; a warp takes 32 groups of 16 columns at a time.
        first = u32(thread - lane)
        while first < 8 * tiles:
            group, values, size = u32(first + lane), _numbers(), f32(0)
            for i in range(_GROUP):
                at = u32(_GROUP * group + i)
                values[i] = source[at] * inverse if at < width else f32(0)
                size = fmax(size, fabs(values[i]))
            if powers:                       # of 2^e .. 2^(e + 1): the scale is 2^(e - 2)
                size = fmax(size, shuffle_xor(size, 1))
                exponent = u32(bits_of(size) >> u32(23) & u32(255))
                code = u32(exponent - 2) if exponent > 2 else u32(0)
                factor = float_of(u32((254 - code) << u32(23)))
            else:
                code = u32(u32(pack_e4m3(size * f32(1 / LARGEST_E2M1), f32(0))) & u32(255))
                held = e4m3(code)
                factor = f32(1) / held if held > f32(0) else f32(0)
            for i in range(_GROUP):
                values[i] = values[i] * factor
            # A word of scales has those of four lanes, or of the first and the third of these.
            if powers:
                word = u32(code | u32(shuffle_xor(i32(code), 2)) << u32(8))
            else:
                word = u32(code << u32(8 * (lane & u32(3))))
                word = u32(word | u32(shuffle_xor(i32(word), 1)))
                word = u32(word | u32(shuffle_xor(i32(word), 2)))
            tile, part = u32(group >> u32(3)), u32(group & u32(7))
            if tile < tiles:
                begin, own = tile4(row, tile, tiles), u32(row & u32(TILE - 1))
                if part & u32(3) == u32(0):
                    y[begin + TILE_WORDS + 2 * own + (part >> u32(2))] = word
                low = pack_e2m1(values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7])
                high = pack_e2m1(values[8], values[9], values[10], values[11], values[12], values[13], values[14],
                                 values[15])
                store2(y, u32(begin + tile_place(own, part >> u32(1)) + 2 * (part & u32(1))), low, high)
            first = u32(first + _THREADS)

    return _rows
