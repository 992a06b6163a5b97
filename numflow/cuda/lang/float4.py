"""4-bit floats (E2M1), eight in a word, and matrix products with a scale for each block of columns.

GPUs of compute capability 12.x multiply them by mma.sync. A is 16 x 64 and B is 64 x 8. Fragments are as in
arithmetic.py, with k 8t .. 8t + 7 in a word. A scale word has the scales of the 64 columns of a row of A, or of a
column of B. NVFP4: four E4M3 scales without sign, for 16 columns each. MXFP4: two scales in the lower half, for 32
columns each; e stands for 2^(e - 127). Operands p and q of the instruction select the lanes that supply the scales:
lane 4g + 2p those of row g of A, the next lane those of row g + 8, and lane 4g + q those of column g of B.
"""

import numpy as np

from numflow.cuda.lang.float8 import e4m3_values, nearest_code
from numflow.cuda.lang.intrinsic import asm
from numflow.cuda.lang.scalar import f32, u16, u32
from numflow.cuda.lang.simulator import NOW, together

LARGEST_E2M1 = 6.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)  # values of codes 0 .. 7; bit 3 is the sign
_BETWEEN = (E2M1[:-1] + E2M1[1:]) / 2
_VALUES = np.concatenate([E2M1, -E2M1]).astype(np.float32)
_PACK = "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(4))
_MMA = ("mma.sync.aligned.{} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}}, "
        "{{$14}}, {{0, $15}}, {{$16}}, {{0, $17}};")


@asm((u32,), (f32,) * 8, f"{{.reg .b8 b0, b1, b2, b3; {_PACK} mov.b32 $0, {{b0, b1, b2, b3}};}}")
def pack_e2m1(a, b, c, d, e, f, g, h) -> int:
    """Eight floats, rounded to 4-bit floats (ties to even). Larger values, and NaN, become 6."""
    return sum(int(e2m1_code(number)) << 4 * place for place, number in enumerate((a, b, c, d, e, f, g, h)))


def e2m1_code(number):
    """The nearest codes of floats, ties to even; NaN becomes 6."""
    number = np.asarray(number, np.float64)
    code = nearest_code(np.abs(number), _BETWEEN)
    return np.where(np.isnan(number), 7, code | np.signbit(number) * 8).astype(np.uint32)


def e2m1_values(words):
    """The float32 values of the codes in words."""
    return _VALUES[words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15]


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4 + (u32, u16, u32, u16),
     _MMA.format("kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"), "convergent")
def mma_nvfp4(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, left, pair, right, lane):
    """C + A B, with values multiplied by their scales. left: scale words of A; pair: the p of the lanes that supply
    them. right, lane: scale words of B, and their q."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), (left, right), pair, lane, nvfp4_scales)


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4 + (u32, u16, u32, u16),
     _MMA.format("kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0"), "convergent")
def mma_mxfp4(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, left, pair, right, lane):
    """mma_nvfp4 with MXFP4 scales."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), (left, right), pair, lane, mxfp4_scales)


def nvfp4_scales(words):
    """NVFP4 scale words as float32 [..., 4]."""
    return e4m3_values((words & np.uint32(0x7F7F7F7F)).reshape(-1)).reshape(*words.shape, 4)


def mxfp4_scales(words):
    """MXFP4 scale words as float32 [..., 2]."""
    return np.ldexp(np.float32(1), words.view(np.uint8).reshape(*words.shape, 4)[..., :2].astype(np.int32) - 127)


def _mma(a, b, c, scales, pair, lane_of, values):
    def product(slots):
        def matrix(words, rows, order):
            return e2m1_values(np.ascontiguousarray(words.transpose(order))).reshape(rows, 64)

        words = np.array([slot[2] for slot in slots], np.uint32).reshape(8, 4, 2)
        left_scales = values(np.ascontiguousarray(words[:, 2 * pair:2 * pair + 2, 0]))
        right_scales = values(np.ascontiguousarray(words[:, lane_of, 1]))
        left = matrix(np.array([slot[0] for slot in slots], np.uint32).reshape(8, 4, 2, 2), 16, (3, 0, 2, 1))
        right = matrix(np.array([slot[1] for slot in slots], np.uint32).reshape(8, 4, 2), 8, (0, 2, 1))
        columns = 64 // left_scales.shape[-1]
        left = left * np.repeat(np.concatenate([left_scales[:, 0], left_scales[:, 1]]), columns, axis=1)
        return list((left @ (right * np.repeat(right_scales, columns, axis=1)).T).ravel())

    result, lane, (c0, c1, c2, c3) = together((a, b, scales), product), NOW.thread.lane, c
    at = lane // 4 * 8 + lane % 4 * 2
    r0, r1, r2, r3 = result[at], result[at + 1], result[at + 64], result[at + 65]
    return f32(r0 + c0), f32(r1 + c1), f32(r2 + c2), f32(r3 + c3)
