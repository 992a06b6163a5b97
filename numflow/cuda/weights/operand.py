"""Activations as operands of matrix products: converted, and padded with zeros to whole units of 32 columns.

f32   x f32 [T, pitch]
f16   x words of two float16, in tiles [T / 64][K / 32] of 64 rows and 32 columns. A tile is 4 contiguous KB in the
      layout that tensor cores read (lang/warpgroup.py). Each row is divided by its scale f32 [T], which is 1 unless
      values would overflow
bf16  the same in bfloat16; all scales are 1
e4m3  8-bit floats, in tiles [T / 64][K / 64] of 64 rows and 64 columns; each row is divided by its scale, so that its
      largest value becomes 448, the largest E4M3 number
nvfp4, mxfp4  4-bit floats with scales of blocks (operand_float4.py)
int8  x 4-byte words [T][2][K / 32][4], columns 0 .. 15 of all units, then columns 16 .. 31; and for each unit 4 floats:
      scale = max |v| / 127, scale * sum of its int8, scale * sum of the first 16, 0. A value is scale * int8.
"""

import functools
from dataclasses import dataclass

from numflow.cuda.device.call import Call, ceil, per_row
from numflow.cuda.device.device import Ref
from numflow.cuda.lang.arithmetic import fabs, fmax, fmin, pack_bfloats, pack_halves, round_to_int
from numflow.cuda.lang.float8 import LARGEST_E4M3, pack_e4m3
from numflow.cuda.lang.intrinsic import LocalArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    block_x,
    block_y,
    load4,
    shuffle_xor,
    store2,
    store4,
    stream1,
    thread_index,
)
from numflow.cuda.lang.kernel import FLOAT8, DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.reduce import block_max
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.lang.warpgroup import TILE, TILE_WORDS, tile_place
from numflow.cuda.weights.operand_float4 import FLOAT4_KINDS, bind_operand4, operand4_bytes

UNIT = 32
THREADS = 128
MOST_HELD = 32768   # columns of a row that fit the registers of a block
ROW_THREADS = 1024  # threads of a block that has one row; fewer iterations mean fewer waits for memory
_SMALLEST = 1e-35  # rows or units whose maximum is smaller become zeros: 448 / max would overflow


@dataclass(frozen=True)
class Operand:
    """An operand of a kind. pitch: columns of a row of x. aux: scales, or units' scales and sums. calls: that write it.
    """

    kind: str
    x: Ref
    aux: Ref | None
    pitch: int
    calls: tuple[Call, ...]


def padded(columns: int) -> int:
    """The number of columns, rounded up to whole units."""
    return ceil(columns, UNIT) * UNIT


def operand_bytes(rows: int, columns: int, kind: str) -> tuple[int, int]:
    """Bytes of x and of aux for `rows` rows."""
    pitch = padded(columns)
    if kind in ("f16", "bf16"):
        return ceil(rows, TILE) * TILE * pitch * 2, rows * 4
    if kind == "e4m3":
        return ceil(rows, TILE) * TILE * ceil(pitch, 2 * UNIT) * 2 * UNIT, rows * 4
    if kind in FLOAT4_KINDS:
        return operand4_bytes(rows, columns)
    return (rows * pitch, rows * pitch // UNIT * 16) if kind == "int8" else (rows * pitch * 4, 0)


def bind_operand(ctx, view, kind: str, x: Ref, aux: Ref | None) -> Call:
    """The call that writes the operand."""
    pitch, source = padded(view.width), (*ctx.view(view), ctx.batch.counts, ctx.rows(view), view.width)
    if kind == "int8":
        return per_row(None, _int8, ctx.rows(view), ceil(pitch, 4 * THREADS), x, aux, pitch // UNIT, *source)
    if kind in ("f16", "bf16"):
        whole = view.width == pitch and view.start % 4 == 0 and pitch <= MOST_HELD
        chosen = _held(kind, ceil(pitch, 4 * ROW_THREADS)) if whole else _halves(kind == "bf16")
        return per_row(None, chosen, ctx.rows(view), 1, x, aux, pitch // 2, *source)
    if kind == "e4m3":
        return per_row(None, _float8, ctx.rows(view), 1, x, aux, ceil(pitch, 2 * UNIT), *source)
    if kind in FLOAT4_KINDS:
        return bind_operand4(ctx, view, kind, x, aux)
    return per_row(None, _f32, ctx.rows(view), ceil(pitch, THREADS), x, pitch, *source)


@device
def half_place(row, unit, part, units):
    """The word of a 16-bit operand at which part 0 .. 3 (8 columns) of a unit of a row begins. The next unit is
    TILE_WORDS further; part p is at the word of part 0 XOR 4 p."""
    return u32((u32(row >> u32(6)) * units + unit) * TILE_WORDS + tile_place(row & u32(TILE - 1), part))


@device
def half_word(row, column, units):
    """The word of a 16-bit operand that has an even column and the next one."""
    return u32(half_place(row, u32(column >> u32(5)), u32(column >> u32(3) & u32(3)), units)
               + (column >> u32(1) & u32(3)))


@kernel("operand_f32", THREADS)
def _f32(y: f32.ptr, pitch: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32):
    row, column = block_x(), block_y() * 128 + thread_index()
    if row < counts[rows] and column < pitch:
        y[row * pitch + column] = x[row * x_stride + column] if column < width else f32(0)


@kernel("operand_int8", THREADS)
def _int8(y: u32.ptr, aux: f32.ptr, units: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32):
    """One thread for 4 columns."""
    row, column = block_x(), u32(4 * (block_y() * 128 + thread_index()))
    if row >= counts[rows]:
        return
    source = x + row * x_stride
    a = source[column] if column < width else f32(0)
    b = source[column + 1] if column + 1 < width else f32(0)
    c = source[column + 2] if column + 2 < width else f32(0)
    d = source[column + 3] if column + 3 < width else f32(0)
    put_int8(y, aux, units, row, column, a, b, c, d)


@device
def put_int8(y, aux, units, row, column, a, b, c, d):
    """Write 4 columns of an int8 operand. 8 adjacent lanes have one unit, and all lanes of a warp must call it. Columns
    beyond the units are not written."""
    largest = fmax(fmax(fabs(a), fabs(b)), fmax(fabs(c), fabs(d)))
    largest = fmax(largest, shuffle_xor(largest, 1))
    largest = fmax(largest, shuffle_xor(largest, 2))
    largest = fmax(largest, shuffle_xor(largest, 4))
    inverse = f32(127) / largest if largest > f32(_SMALLEST) else f32(0)
    p, q = round_to_int(a * inverse), round_to_int(b * inverse)
    r, s = round_to_int(c * inverse), round_to_int(d * inverse)
    word = u32(u32(p & 255) | u32(q & 255) << u32(8) | u32(r & 255) << u32(16) | u32(s & 255) << u32(24))
    total = i32(p + q + r + s)
    total = i32(total + shuffle_xor(total, 1))
    half = i32(total + shuffle_xor(total, 2))
    total = i32(half + shuffle_xor(half, 4))
    unit, part = u32(column >> u32(5)), u32(column >> u32(2) & u32(7))
    if unit < units:
        y[((row * 2 + (part >> u32(2))) * units + unit) * 4 + (part & u32(3))] = word
        if part == 0:
            scale = largest / f32(127)
            store4(aux, u32((row * units + unit) * 4), scale, scale * f32(total), scale * f32(half), f32(0))


@functools.cache
def putter(kind: str) -> DeviceFunction:
    """put(to, aux, row, column, width, inverse, a, b, c, d): write 4 columns of an int8, f16 or bf16 operand of whole
    units. All lanes of a warp must call it, with adjacent columns. inverse: factor of 16-bit values."""
    pack = pack_bfloats if kind == "bf16" else pack_halves

    @device
    def put_bytes(to, aux, row, column, width, inverse, a, b, c, d):
        put_int8(to, aux, width >> u32(5), row, column, a, b, c, d)

    @device
    def put_words(to, aux, row, column, width, inverse, a, b, c, d):
        if column < width:
            store2(to, half_word(u32(row), column, width >> u32(5)), pack(a * inverse, b * inverse),
                   pack(c * inverse, d * inverse))

    return put_bytes if kind == "int8" else put_words


@functools.cache
def _held(kind: str, rounds: int) -> Kernel:
    """One block for each row. Each thread loads 4 columns in each of the rounds once, and keeps them in registers."""
    put, held = putter(kind), LocalArray(f32, 4 * rounds)

    @kernel(f"operand_{kind}_{rounds}", ROW_THREADS)
    def _operand(y: u32.ptr, scales: f32.ptr, words: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32,
                 width: u32):
        # Load the row to registers; find its largest magnitude.
        row, first, values, largest = block_x(), u32(4 * thread_index()), held(), f32(0)
        there = row < stream1(counts, rows)
        after_previous()
        if not there:
            return
        for i in range(rounds):
            n, column = 4 * i, u32(first + 4 * ROW_THREADS * i)
            values[n], values[n + 1], values[n + 2], values[n + 3] = f32(0), f32(0), f32(0), f32(0)
            if column < width:
                values[n], values[n + 1], values[n + 2], values[n + 3] = load4(x + row * x_stride, column)
        inverse, scale = f32(1), f32(1)
        if kind == "f16":
            for i in range(4 * rounds):
                largest = fmax(largest, fabs(values[i]))
            largest = block_max(largest, ROW_THREADS // 32)
            if largest > f32(LARGEST_HALF):
                scale, inverse = largest / f32(LARGEST_HALF), f32(LARGEST_HALF) / largest
        # Store the operand.
        if first == 0:
            scales[row] = scale
        for i in range(rounds):
            n = 4 * i
            put(y, scales, row, u32(first + 4 * ROW_THREADS * i), width, inverse,
                values[n], values[n + 1], values[n + 2], values[n + 3])

    return _operand


@device
def finite(value):
    """The value, clamped to the range of float16, which rounding may have exceeded."""
    return fmin(fmax(value, f32(-65504)), f32(65504))


LARGEST_HALF = 16384.0  # largest magnitude in a float16 operand; rows with larger values are scaled


@kernel("operand_e4m3", ROW_THREADS, target=FLOAT8)
def _float8(y: u32.ptr, scales: f32.ptr, units: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32,
            width: u32):
    """One block for each row; a thread writes a word of 4 columns at a time."""
    row, thread = block_x(), u32(thread_index())
    if row >= counts[rows]:
        return
    source, largest, column = x + row * x_stride, f32(0), thread
    while column < width:
        largest = fmax(largest, fabs(source[column]))
        column = u32(column + ROW_THREADS)
    largest = block_max(largest, ROW_THREADS // 32)
    inverse = f32(LARGEST_E4M3) / largest if largest > f32(_SMALLEST) else f32(0)
    if thread == 0:
        scales[row] = largest * f32(1 / LARGEST_E4M3)
    word = thread
    while word < 16 * units:
        column = u32(4 * word)
        a = source[column] * inverse if column < width else f32(0)
        b = source[column + 1] * inverse if column + 1 < width else f32(0)
        c = source[column + 2] * inverse if column + 2 < width else f32(0)
        d = source[column + 3] * inverse if column + 3 < width else f32(0)
        y[half_word(u32(row), u32(2 * word), units)] = u32(u32(pack_e4m3(a, b)) | u32(pack_e4m3(c, d)) << u32(16))
        word = u32(word + ROW_THREADS)


@functools.cache
def _halves(bfloat: bool) -> Kernel:
    """One block for each row."""

    @kernel("operand_bf16" if bfloat else "operand_f16", ROW_THREADS)
    def _operand(y: u32.ptr, scales: f32.ptr, words: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32,
                 width: u32):
        row, thread = block_x(), u32(thread_index())
        if row >= counts[rows]:
            return
        source, units = x + row * x_stride, u32(words >> u32(4))
        inverse, scale = f32(1), f32(1)
        if not bfloat:
            largest, column = f32(0), thread
            while column < width:
                largest = fmax(largest, fabs(source[column]))
                column = u32(column + ROW_THREADS)
            largest = block_max(largest, ROW_THREADS // 32)
            if largest > f32(LARGEST_HALF):
                scale, inverse = largest / f32(LARGEST_HALF), f32(LARGEST_HALF) / largest
        if thread == 0:
            scales[row] = scale
        word = thread
        while word < words:
            column = u32(2 * word)
            a = source[column] * inverse if column < width else f32(0)
            b = source[column + 1] * inverse if column + 1 < width else f32(0)
            y[half_word(u32(row), column, units)] = pack_bfloats(a, b) if bfloat else pack_halves(a, b)
            word = u32(word + ROW_THREADS)

    return _operand
