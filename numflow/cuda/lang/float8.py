"""8-bit floats, four in a word, which tensor cores of compute capability 8.9, 9.0, 10.x and 12.x multiply.
"""

import numpy as np

from numflow.cuda.lang.arithmetic import _MMA, _mma
from numflow.cuda.lang.intrinsic import asm
from numflow.cuda.lang.scalar import f32, u16, u32
from numflow.quant.hub_types import TABLES

LARGEST_E4M3 = 448.0
_NOT_A_NUMBER = 127
_POSITIVE = TABLES["e4m3"][:_NOT_A_NUMBER].astype(np.float64)  # of codes 0 .. 126, ascending
_BETWEEN = (_POSITIVE[:-1] + _POSITIVE[1:]) / 2


@asm((u16,), (f32, f32), "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;")
def pack_e4m3(low, high) -> int:
    """Two floats, rounded to E4M3 (ties to even), in 16 bits. Larger values become 448."""
    return int(e4m3_code(low)) | int(e4m3_code(high)) << 8


def e4m3_code(number):
    """The nearest E4M3 codes of floats, ties to even; NaN becomes 127."""
    number = np.asarray(number, np.float64)
    code = nearest_code(np.abs(number), _BETWEEN)
    return np.where(np.isnan(number), _NOT_A_NUMBER, code | np.signbit(number) * 128).astype(np.uint32)


def nearest_code(size, between):
    """The nearest code of non-negative values, ties to even. between: midpoints of adjacent values, in rising order."""
    below, upto = np.searchsorted(between, size, "left"), np.searchsorted(between, size, "right")
    return np.where(below % 2, upto, below)  # these differ for ties


def e4m3_values(words):
    """The float32 values of the E4M3 bytes in words."""
    return TABLES["e4m3"][words.view(np.uint8)]


def e5m2_values(words):
    """The float32 values of the E5M2 bytes in words."""
    return TABLES["e5m2"][words.view(np.uint8)]


# ---- matrix products of a warp (mma.sync): A is 16 x 32, B is 32 x 8, and fragments are as in arithmetic.py


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4, _MMA.format("m16n8k32.row.col.f32.e4m3.e4m3.f32"), "convergent")
def mma_e4m3(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C + A B of E4M3 floats, accumulated in f32."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), e4m3_values)


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4, _MMA.format("m16n8k32.row.col.f32.e5m2.e4m3.f32"), "convergent")
def mma_e5m2(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C + A B of E5M2 floats in A and E4M3 floats in B, accumulated in f32."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), e5m2_values, e4m3_values)
