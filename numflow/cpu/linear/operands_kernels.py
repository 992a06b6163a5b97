"""Kernels that compute a norm or an activation and make the operand of its output (operands.py)."""

import numpy as np

from numflow.cpu.elementwise.act_kernels import activated
from numflow.cpu.elementwise.norm_kernels import inverse_root, layer_part, rms_part, sum_of, sum_of_squares
from numflow.cpu.linear.activations import BF16, CHUNK, F32, INT8, INT16, TOKEN_TILE
from numflow.cpu.linear.activations_kernels import BY_TILE, put_row, put_tile, rows_of_token, tile_tokens
from numflow.cpu.linear.operands import FACTORS, MEANS, SCRATCH_BYTES, VALUES
from numflow.cpu.linear.slots import OPERAND
from numflow.cpu.runtime.access import f32_ptr, f64, i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.float32 import load_part, splat, store_part
from numflow.cpu.simd.vector import inline, load_f32, merged, store_f32, zero_f32

_RMS, _LAYER, _GATED, _ACT = range(4)


@merged
def _make(args, thread, n_threads, maker, operand):
    """Threads share the chunks of all token tiles, as in activations.py."""
    rows_per_token = rows_of_token(operand)
    tile = TOKEN_TILE // rows_per_token
    tokens, columns = i64(i64(args, OPERAND.header), i64(args, OPERAND.rows_field)), i64(args, OPERAND.columns)
    scratch, chunks = i64(args, OPERAND.scratch) + thread * SCRATCH_BYTES, (columns + CHUNK - 1) // CHUNK
    begin, end = share((tokens + tile - 1) // tile * chunks, thread, n_threads)
    last_tile = -1
    for item in range(begin, end):
        t, first = item // chunks * tile, item % chunks * CHUNK
        count = min(tile, tokens - t)
        if t != last_tile and maker in (_RMS, _LAYER):
            last_tile = t
            for i in range(count):
                _statistics(args, t + i, scratch, i, maker)
        by_tile = operand in BY_TILE and count == TOKEN_TILE
        for i in range(count):
            values = scratch + VALUES + (4 * CHUNK * i if by_tile else 0)
            _values(args, t + i, first, min(CHUNK, columns - first), scratch, values, i, maker)
            if i64(args, OPERAND.y):
                row = i64(args, OPERAND.y) + 4 * (t + i) * i64(args, OPERAND.y_stride)
                _copy(values, row + 4 * first, min(CHUNK, columns - first))
            if not by_tile:
                put_row(values, columns, first, i64(args, OPERAND.x), i64(args, OPERAND.aux), t * rows_per_token, i,
                        tile_tokens(count * rows_per_token), operand)
        if by_tile:
            put_tile(scratch + VALUES, 4 * CHUNK, columns, first, i64(args, OPERAND.x), i64(args, OPERAND.aux), t,
                     operand)


@inline
def _statistics(args, t, scratch, i, maker):
    """Compute mean and factor of row t and store them at index i."""
    row, size = i64(args, OPERAND.a) + 4 * t * i64(args, OPERAND.a_stride), i64(args, OPERAND.columns)
    mean = sum_of(row, size) / np.float32(size) if maker == _LAYER else np.float32(0)
    squares = sum_of_squares(row, size, splat(mean) if maker == _LAYER else zero_f32())
    f32_ptr(scratch + MEANS)[i] = mean
    f32_ptr(scratch + FACTORS)[i] = inverse_root(squares, size, f64(args, OPERAND.eps))


@inline
def _values(args, t, first, count, scratch, out, i, maker):
    """Compute columns first .. first + count of the output's row t, with statistics i, into `out`."""
    a = i64(args, OPERAND.a) + 4 * (t * i64(args, OPERAND.a_stride) + first)
    b = i64(args, OPERAND.b) + 4 * (t * i64(args, OPERAND.b_stride) + first)
    weight, bias = i64(args, OPERAND.weight) + 4 * first, i64(args, OPERAND.bias) + 4 * first
    mean, factor, kind = f32_ptr(scratch + MEANS)[i], f32_ptr(scratch + FACTORS)[i], i64(args, OPERAND.kind)
    for k in range(0, count, 16):
        offset, left = 4 * k, count - k
        if maker == _RMS:
            value = rms_part(a + offset, weight + offset, left, factor)
        elif maker == _LAYER:
            value = layer_part(a + offset, weight + offset, bias + offset, left, splat(mean), factor)
        elif maker == _GATED:
            value = activated(kind, load_part(a + offset, left)) * load_part(b + offset, left)
        else:
            value = activated(kind, load_part(a + offset, left))
        store_f32(out + offset, value)


@inline
def _copy(source, y, count):
    for k in range(0, count - 15, 16):
        store_f32(y + 4 * k, load_f32(source + 4 * k))
    if count % 16:
        k = count // 16 * 16
        store_part(y + 4 * k, load_f32(source + 4 * k), count - k)


@kernel
def rms_norm_to_int8(args, thread, n_threads):
    _make(args, thread, n_threads, _RMS, INT8)


@kernel
def rms_norm_to_int16(args, thread, n_threads):
    _make(args, thread, n_threads, _RMS, INT16)


@kernel
def rms_norm_to_f32(args, thread, n_threads):
    _make(args, thread, n_threads, _RMS, F32)


@kernel
def rms_norm_to_bf16(args, thread, n_threads):
    _make(args, thread, n_threads, _RMS, BF16)


@kernel
def layer_norm_to_int8(args, thread, n_threads):
    _make(args, thread, n_threads, _LAYER, INT8)


@kernel
def layer_norm_to_int16(args, thread, n_threads):
    _make(args, thread, n_threads, _LAYER, INT16)


@kernel
def layer_norm_to_f32(args, thread, n_threads):
    _make(args, thread, n_threads, _LAYER, F32)


@kernel
def layer_norm_to_bf16(args, thread, n_threads):
    _make(args, thread, n_threads, _LAYER, BF16)


@kernel
def act_mul_to_int8(args, thread, n_threads):
    _make(args, thread, n_threads, _GATED, INT8)


@kernel
def act_mul_to_int16(args, thread, n_threads):
    _make(args, thread, n_threads, _GATED, INT16)


@kernel
def act_mul_to_f32(args, thread, n_threads):
    _make(args, thread, n_threads, _GATED, F32)


@kernel
def act_mul_to_bf16(args, thread, n_threads):
    _make(args, thread, n_threads, _GATED, BF16)


@kernel
def act_to_int8(args, thread, n_threads):
    _make(args, thread, n_threads, _ACT, INT8)


@kernel
def act_to_int16(args, thread, n_threads):
    _make(args, thread, n_threads, _ACT, INT16)


@kernel
def act_to_f32(args, thread, n_threads):
    _make(args, thread, n_threads, _ACT, F32)


@kernel
def act_to_bf16(args, thread, n_threads):
    _make(args, thread, n_threads, _ACT, BF16)
