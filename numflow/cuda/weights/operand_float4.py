"""The operands "nvfp4" and "mxfp4": activations as 4-bit floats (E2M1) with a scale for each block of columns.

nvfp4  blocks of 16 columns with E4M3 scales. Each row is divided by its own scale, so that its largest block scale
       becomes 448, the largest E4M3 number: x = row scale * block scale * code. This is the published recipe, but with
       a scale for each token instead of one for all tokens
mxfp4  blocks of 32 columns. The scale is the power of two that brings the largest magnitude of the block to 4 .. 8;
       magnitudes above 6 then become 6. Scales of rows are 1

Tiles [T / 64][K / 128] have 64 rows of 128 columns, which are 64 bytes in the layout of lang/warpgroup.py, followed by
two scale words for each row, for 64 columns each (lang/float4.py). A tile is 4.5 contiguous KB.

`rounded` is the reference for the kernels, in NumPy.
"""

import functools
from dataclasses import replace

import numpy as np

from numflow.cuda.device.call import Call, ceil, per_row
from numflow.cuda.lang.arithmetic import bits_of, fabs, float_of, fmax
from numflow.cuda.lang.float4 import LARGEST_E2M1, e2m1_code, e2m1_values, pack_e2m1
from numflow.cuda.lang.float8 import LARGEST_E4M3, e4m3_code, e4m3_values, pack_e4m3
from numflow.cuda.lang.intrinsic import LocalArray
from numflow.cuda.lang.intrinsics import block_x, lane_index, shuffle_xor, store2, thread_index
from numflow.cuda.lang.kernel import FLOAT4, FLOAT4_MAJORS, REGISTRY, Kernel, device, kernel
from numflow.cuda.lang.reduce import block_max
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.lang.tensor_memory import BLACKWELL
from numflow.cuda.lang.warpgroup import TILE, TILE_WORDS, tile_place
from numflow.cuda.weights.decode import e4m3

FLOAT4_KINDS = ("nvfp4", "mxfp4")
COLUMNS = 128                       # of a tile
WORDS = TILE_WORDS + 2 * TILE       # words of a tile and its scales
_THREADS, _GROUP = 256, 16          # threads of a block, which has one row; columns of a thread
_LARGEST = LARGEST_E2M1 * LARGEST_E4M3
_SMALLEST = 1e-33                   # rows whose maximum is smaller become zeros: _LARGEST / max would overflow
_INFINITE = 0x7F800000              # exponent bits of a float, which are all set for infinities and NaN
_numbers = LocalArray(f32, _GROUP)


def operand4_bytes(rows: int, columns: int) -> tuple[int, int]:
    """operand.operand_bytes for these operands."""
    return ceil(rows, TILE) * ceil(columns, COLUMNS) * WORDS * 4, rows * 4


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """x [T, K], of whole blocks, rounded as by the kernels: code * scale of the block * scale of the row."""
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
    """operand.bind_operand for these operands."""
    source = *ctx.view(view), ctx.batch.counts, ctx.rows(view), view.width
    chosen = tensor_operand(kind) if ctx.device.tcgen05 else operand_float4(kind)
    return per_row(None, chosen, ctx.rows(view), 1, x, aux, ceil(view.width, COLUMNS), *source)


@device
def tile4(row, tile, tiles):
    """The word at which a tile of a row begins."""
    return u32((u32(row >> u32(6)) * tiles + tile) * WORDS)


@device
def finite_size(value):
    """The magnitude of a value; infinity for NaN."""
    return float_of(u32(_INFINITE)) if bits_of(value) & _INFINITE == _INFINITE else fabs(value)


@functools.cache
def operand_float4(kind: str) -> Kernel:
    """One block for each row; a thread converts 16 columns at a time. Rows with a value that is not finite get an
    infinite scale, so that their results are not finite."""
    powers = kind == "mxfp4"

    @kernel(f"operand_{kind}", _THREADS, target=FLOAT4, majors=FLOAT4_MAJORS)
    def _rows(y: u32.ptr, scales: f32.ptr, tiles: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32,
              width: u32):
        # The largest magnitude of the row.
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
        # Scales and codes of the blocks. A warp converts 32 groups of 16 columns at a time.
        first = u32(thread - lane)
        while first < 8 * tiles:
            group, values, size = u32(first + lane), _numbers(), f32(0)
            for i in range(_GROUP):
                at = u32(_GROUP * group + i)
                values[i] = source[at] * inverse if at < width else f32(0)
                size = fmax(size, fabs(values[i]))
            if powers:                       # for a size in 2^e .. 2^(e + 1), the scale is 2^(e - 2)
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
            # A scale word has the scales of four lanes, or (mxfp4) of the first and the third of them.
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


@functools.cache
def tensor_operand(kind: str) -> Kernel:
    """operand_float4 for compute capability 10.x, which has the same conversions."""
    made = replace(operand_float4(kind), name=f"operand_{kind}_tcgen05", target=BLACKWELL, majors=())
    return REGISTRY.setdefault(made.name, made)
