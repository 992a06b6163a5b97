"""GEMM on tensor cores for many tokens with 8-bit or 4-bit floats on both sides, without decoding to float16.

A block has 128 rows of the matrix and 128 tokens, as in gemm.py. cp.async copies the codes of both to shared memory
unchanged; ldmatrix loads them into the fragments of mma.sync. A tile has 64 bytes of a row (64 or 128 columns), in the
layout of lang/warpgroup.py. There are three buffers for tiles of each operand:

    step u:   wait for tile u; a barrier, after which no warp reads tile u - 1
              start the copy of tile u + 2 into the buffer of tile u - 1
              multiply tile u

8-bit floats (e4m3), compute capability 8.9 and 12.x: if a matrix has scales for groups of columns, accumulators are
multiples of the current group's scale (float8.py). Compute capability 9.0 uses wgmma_gemm.py instead: there, as on
10.x, an mma.sync of 8-bit floats is emulated by two of float16.

4-bit floats (nvfp4, mxfp4), compute capability 12.x: mma.sync multiplies by the scales of blocks itself. A lane loads
the scale words of two rows of the matrix and of two tokens from global memory, one step ahead; operands of the
instruction select the lanes that supply the scales (lang/float4.py).
"""

import functools

from numflow.cuda.lang.arithmetic import load_matrices
from numflow.cuda.lang.float4 import mma_mxfp4, mma_nvfp4
from numflow.cuda.lang.float8 import mma_e4m3, mma_e5m2
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    block_x,
    block_y,
    block_z,
    copy_async,
    copy_commit,
    copy_wait_older,
    grid_z,
    lane_index,
    load2,
    load4,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import (
    FLOAT4,
    FLOAT4_MAJORS,
    FLOAT8,
    FLOAT8_MAJORS,
    DeviceFunction,
    Kernel,
    device,
    kernel,
)
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u16, u32
from numflow.cuda.lang.warpgroup import TILE, TILE_WORDS, tile_place
from numflow.cuda.linear.float4 import codes4_copier, float4_operand, rows_scaler, scale_words
from numflow.cuda.linear.float8 import codes_copier, meets_float8, scales_of
from numflow.cuda.linear.gemm import ROWS, load_bias, put_sums
from numflow.cuda.linear.parameters import Bias, Planes, Shape
from numflow.cuda.weights.layout import SCHEMES, Kept
from numflow.cuda.weights.operand import half_place
from numflow.cuda.weights.operand_float4 import tile4

TOKENS = 128          # of a block
THREADS = 128         # of a block: four warps with 64 rows and 64 tokens each
STAGES = 3            # buffers for tiles of each operand
_X_AT = ROWS * 16     # words of a tile of the matrix; the tile of tokens follows it
_STAGE = _X_AT + TOKENS * 16
_M_TILES, _N_TILES = 4, 8  # mma tiles of a warp, of 16 rows and 8 tokens
_SUMS = 4 * _M_TILES * _N_TILES
_COPIES = TOKENS * 4 // THREADS  # copies of 16 bytes, by each thread for a tile of tokens
_memory = SharedArray(u32, STAGES * _STAGE)
_sums, _left, _right = LocalArray(f32, _SUMS), LocalArray(u32, 4 * _M_TILES), LocalArray(u32, 2 * _N_TILES)
_words, _next, _bases = LocalArray(u32, 8), LocalArray(u32, 8), LocalArray(u32, 4)
_sources, _plus, _factors = LocalArray(u32, _COPIES), LocalArray(f32, 2 * _M_TILES), LocalArray(f32, 2 * _M_TILES)


UNITS = {"e4m3": 2, "nvfp4": 4, "mxfp4": 4}  # units of 32 columns in a tile, by operand


def code_operand(weight: Kept, activations: str) -> str:
    """Kind of operand with which this module multiplies a matrix for more than 64 tokens; "" for none."""
    if activations not in ("fp8", "nvfp4"):
        return ""
    return "e4m3" if meets_float8(weight) else float4_operand(weight) if activations == "nvfp4" else ""


@functools.cache
def code_gemm(kind: str, operand: str, grouped: bool = False) -> Kernel:
    """Grid (N / 128, rows / 128, parts). Parameters as in gemm.gemm, without outliers; x is the operand."""
    scheme, fours = SCHEMES[kind], operand != "e4m3"
    multiply, tiles_a_scale = mma_e5m2 if scheme.table == "e5m2" else mma_e4m3, 0 if fours else scheme.shared // 64
    multiply4, columns = mma_mxfp4 if operand == "mxfp4" else mma_nvfp4, UNITS[operand]
    copy_codes, copy_tokens = (codes4_copier if fours else codes_copier)(THREADS), _tokens_copier(fours)
    change_scales, apply_scales = scales_of(scheme, _M_TILES, 16, 4 * _N_TILES) if not fours else (None, None)
    load_scales, apply_rows = scale_words(scheme), rows_scaler(scheme, _M_TILES, 4 * _N_TILES)
    put = put_sums(_M_TILES, _N_TILES, 1.0, grouped)

    @kernel(f"mma_{kind}_{'float4' if fours else 'float8'}{'_grouped' * grouped}", THREADS, blocks=2,
            target=FLOAT4 if fours else FLOAT8, majors=FLOAT4_MAJORS if fours else FLOAT8_MAJORS)
    def _gemm(y: Rows, partial: f32.ptr, x: u32.ptr, scales: f32.ptr, planes: Planes, bias: Bias, shape: Shape,
              tiles: i32.ptr, order: i32.ptr, by_token: u32, slots: u32.ptr, outliers: u32):
        # Block indices: a tile of rows and tokens. Grouped: the tile's expert and routes.
        thread, lane, warp = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
        first_row, first_token, count = u32(block_x() * ROWS), u32(block_y() * TOKENS), u32(shape.counts[shape.field])
        above_row = u32(0)                   # rows of the matrix before the expert's
        if grouped:
            expert, begin, end, _ = load4(tiles, u32(4 * block_y()))
            if expert < 0:
                return
            first_token, count, above_row = u32(begin), u32(end), u32(expert * shape.n)
        elif first_token >= count:
            return
        # The tiles of this part.
        parts, units = u32(grid_z()), u32(u32(shape.units + columns - 1) // columns)
        share = u32((units + parts - 1) // parts)
        unit = u32(block_z() * share)
        last = u32(unit + share) if unit + share < units else units
        # Registers and shared memory; the tokens that this thread copies (tokens beyond the batch repeat the last one).
        tile, acc, a, b, rows_of, scale = _memory(), _sums(), _left(), _right(), _sources(), _factors()
        for i in range(_SUMS):
            acc[i] = f32(0)
        for i in range(2 * _M_TILES):
            scale[i] = f32(1)
        for i in range(_COPIES):
            at = u32(first_token + (thread + THREADS * i >> 2))
            at = at if at < count else u32(count - 1)
            rows_of[i] = u32(order[2 * at + by_token]) if grouped else at
        words, after, bases = _words(), _next(), _bases()
        # Addresses for ldmatrix: lane l gives the address of row l % 8 of 8x8 matrix l // 8. For weights: rows and
        # rows + 8 of 16 bytes, then of the next 16. For tokens: both 16 bytes of 8 tokens, then of the next 8.
        matrix, inside = lane >> u32(3), lane & u32(7)
        m_first, n_first = u32((warp >> u32(1)) * (16 * _M_TILES)), u32((warp & u32(1)) * (8 * _N_TILES))
        w_lane = u32(tile_place(m_first + inside + 8 * (matrix & u32(1)), matrix >> u32(1)))
        x_lane = u32(_X_AT + tile_place(n_first + inside + 8 * (matrix >> u32(1)), matrix & u32(1)))
        lane_row, lane_token = u32(first_row + m_first + (lane >> u32(2))), u32(n_first + 2 * (lane & u32(3)))
        # The rows and tokens whose scales this lane loads.
        if fours:
            for i in range(2):
                pair = u32(2 * i + (lane >> u32(1) & u32(1)))
                at = u32(first_row + m_first + 16 * pair + 8 * (lane & u32(1)) + (lane >> u32(2)))
                bases[i] = u32(above_row + (at if at < shape.n else u32(shape.n - 1)))
                at = u32(first_token + n_first + 8 * (4 * i + (lane & u32(3))) + (lane >> u32(2)))
                at = at if at < count else u32(count - 1)
                bases[2 + i] = u32(order[2 * at + by_token]) if grouped else at
            if unit < last:
                _load_words(after, load_scales, planes.head, x, bases, unit, shape.units, units)
        # Start the copies of two tiles.
        for i in range(2):
            if unit + i < last:
                copy_codes(tile, u32(i * _STAGE), planes.low, planes.high, first_row, above_row, shape.n,
                           u32(unit + i), shape.units, thread)
                copy_tokens(tile, u32(i * _STAGE + _X_AT), x, rows_of, u32(unit + i), units, thread)
            copy_commit()
        turn, free, fresh = u32(0), u32(2 * _STAGE), u32(1)
        while unit < last:
            # Wait for this tile. After the barrier, no warp reads the previous tile: copy a new one to its buffer.
            copy_wait_older()
            sync_block()
            if unit + 2 < last:
                copy_codes(tile, free, planes.low, planes.high, first_row, above_row, shape.n, u32(unit + 2),
                           shape.units, thread)
                copy_tokens(tile, u32(free + _X_AT), x, rows_of, u32(unit + 2), units, thread)
            copy_commit()
            # The scale words of this tile; load those of the next one.
            if fours:
                for i in range(8):
                    words[i] = after[i]
                if unit + 1 < last:
                    _load_words(after, load_scales, planes.head, x, bases, u32(unit + 1), shape.units, units)
            # Rescale accumulators to multiples of this tile's scales.
            if tiles_a_scale > 0:  # noqa: SIM102  a constant condition of its own, which the compiler can remove
                if fresh != 0 or unit % tiles_a_scale == 0:
                    change_scales(acc, scale, planes.head, planes.above, planes.per_row, above_row, lane_row, shape.n,
                                  unit, shape.units)
                    fresh = u32(0)
            # Load matrices from shared memory (ldmatrix) and multiply them (mma).
            for k in range(2):
                for m in range(_M_TILES):
                    at = u32(u32(turn + w_lane + 256 * m) ^ u32(8 * k))
                    a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3] = load_matrices(tile, at)
                for pair in range(_N_TILES // 2):
                    at = u32(u32(turn + x_lane + 256 * pair) ^ u32(8 * k))
                    b[4 * pair], b[4 * pair + 1], b[4 * pair + 2], b[4 * pair + 3] = load_matrices(tile, at)
                for m in range(_M_TILES):
                    for j in range(_N_TILES):
                        c = 4 * (m * _N_TILES + j)
                        if fours:
                            acc[c], acc[c + 1], acc[c + 2], acc[c + 3] = multiply4(
                                a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3], b[2 * j], b[2 * j + 1],
                                acc[c], acc[c + 1], acc[c + 2], acc[c + 3],
                                words[2 * (m >> 1) + k], u16(m & 1), words[4 + 2 * (j >> 2) + k], u16(j & 3))
                        else:
                            acc[c], acc[c + 1], acc[c + 2], acc[c + 3] = multiply(
                                a[4 * m], a[4 * m + 1], a[4 * m + 2], a[4 * m + 3], b[2 * j], b[2 * j + 1],
                                acc[c], acc[c + 1], acc[c + 2], acc[c + 3])
            free, turn = turn, u32(turn + _STAGE) if turn < (STAGES - 1) * _STAGE else u32(0)
            unit = u32(unit + 1)
        # Epilogue: scales, bias, y; if there are several parts, partial sums for gemm_sum.
        if fours:
            apply_rows(acc, planes.per_row, above_row, lane_row, shape.n)
        else:
            apply_scales(acc, scale, planes.head, planes.above, planes.per_row, above_row, lane_row, shape.n)
        place, added = u32(first_token + lane_token), _plus()
        load_bias(added, bias.data + above_row if grouped and bias.present != 0 else bias.data,
                  bias.present != 0 and parts == 1, lane_row, shape.n, _M_TILES, 16)
        if not grouped and parts > 1:
            put(acc, partial + block_z() * count * shape.n, shape.n, scales, added, shape.n, count, lane_row, place,
                order, by_token)
        else:
            put(acc, *y, scales, added, shape.n, count, lane_row, place, order, by_token)

    return _gemm


@functools.cache
def _tokens_copier(fours: bool) -> DeviceFunction:
    """copy(...): copy 64 bytes of each of 128 tokens to a tile. rows_of: rows of x that this thread copies."""

    @device
    def copy(tile, at, x, rows_of, unit, units, thread):
        for i in range(_COPIES):
            token, part = u32(thread + THREADS * i) >> u32(2), thread & u32(3)
            if fours:
                source = u32(tile4(rows_of[i], unit, units) + tile_place(rows_of[i] & u32(TILE - 1), part))
            else:
                source = half_place(rows_of[i], unit, part, units)
            copy_async(tile, u32(at + tile_place(token, part)), x, source)

    return copy


@device
def _load_words(words, load_scales, head, x, bases, unit, units, tiles):
    """Load the scale words of a tile: two words each for two rows of the matrix, then for two tokens."""
    for i in range(2):
        words[2 * i], words[2 * i + 1] = load_scales(head, bases[i], unit, units)
        row = bases[2 + i]
        words[4 + 2 * i], words[5 + 2 * i] = load2(
            x, u32(tile4(row, unit, tiles) + TILE_WORDS + 2 * (row & u32(TILE - 1))))
