"""Conversion of rows of a matrix state (matrix_state.py) between their stored type and float32."""

import numpy as np
from numba import types

from numflow.cpu.runtime.access import f32_ptr
from numflow.cpu.simd.float32 import magnitude, max_lanes, maximum, splat, store_as_f16
from numflow.cpu.simd.value import load, save, staged
from numflow.cpu.simd.value import load_bf16 as value_bf16
from numflow.cpu.simd.vector import f32x16, inline, load_f16, load_f32, store_f32, zero_f32
from numflow.cpu.state.matrix_state import BF16, F16
from numflow.quant.state import SMALLEST

_i64 = types.int64
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the integer, rounded half to even, in the low bits


@inline
def read_row(kind, source, columns, y):
    """Decode a row of 16 * columns values to y as float32."""
    scale = np.float32(0)
    if kind != F16 and kind != BF16:
        scale = f32_ptr(source + 16 * columns)[0]
    for c in range(columns):
        if kind == F16:
            store_f32(y + 64 * c, load_f16(source + 32 * c))
        elif kind == BF16:
            store_f32(y + 64 * c, _load_bf16(source + 32 * c))
        else:
            store_f32(y + 64 * c, _load_i8(source + 16 * c) * scale)


@inline
def write_row(kind, x, columns, target):
    """Encode float32 at x as a row: rounded half to even; int8 with the scale max |x| / 127."""
    if kind == F16:
        for i in range(16 * columns):
            store_as_f16(target + 2 * i, f32_ptr(x)[i])
    elif kind == BF16:
        for c in range(columns):
            _save_bf16(target + 32 * c, load_f32(x + 64 * c))
    else:
        peak = zero_f32()
        for c in range(columns):
            peak = maximum(magnitude(load_f32(x + 64 * c)), peak)
        largest = max_lanes(peak)
        inverse = np.float32(127) / largest if largest > SMALLEST else np.float32(0)
        f32_ptr(target + 16 * columns)[0] = largest / np.float32(127) if largest > SMALLEST else np.float32(0)
        for c in range(columns):
            _save_i8(target + 16 * c, load_f32(x + 64 * c) * splat(inverse))


@staged(f32x16, _i64)
def _load_bf16(address):
    return value_bf16(address)


@staged(f32x16, _i64)
def _load_i8(address):
    return load(address, "u8", 16).widen_signed().to_f32()


@staged(types.void, _i64, f32x16)
def _save_bf16(address, value):
    """Store as bfloat16, rounded half to even; NaN stays NaN."""
    bits = value.as_("i32", 16)
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
    special = (bits & 0x7FFFFFFF).compare(">", 0x7F800000)
    save(address, (special.choose(bits | 0x400000, rounded) >> 16).narrow("u16"), 2)


@staged(types.void, _i64, f32x16)
def _save_i8(address, value):
    save(address, ((value + _MAGIC).as_("i32", 16) - 0x4B400000).narrow("u8"), 1)
