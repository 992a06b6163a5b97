"""Floats of 4 bits (E2M1), eight of them in a word, and products with a scale for each block of columns.

Cards of compute capability 12.x multiply them by `mma.sync`. A is 16 x 64 and B 64 x 8; words lie as those of
arithmetic.py, a word is k 8t .. 8t + 7. A word of scales has those of the 64 columns of one row of A, or column of B:
of NVFP4 four of 16 columns each, floats of 4 + 3 bits without a sign; of MXFP4 two of 32 columns in its lower half, e
for 2^(e - 127). Lane 4g + 2p has the scales of row g of A, the next lane those of row g + 8, for the p that the product
is told; lane 4g + q, for its q, has those of column g of B.
"""

import numpy as np

from numflow.cuda.lang.float8 import e4m3_values, nearest_code
from numflow.cuda.lang.intrinsic import asm
from numflow.cuda.lang.scalar import f32, u16, u32
from numflow.cuda.lang.simulator import NOW, together

LARGEST_E2M1 = 6.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)  # numbers of codes 0 .. 7; 8 more changes the sign
_BETWEEN = (E2M1[:-1] + E2M1[1:]) / 2
_VALUES = np.concatenate([E2M1, -E2M1]).astype(np.float32)
_PACK = "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(4))
_MMA = ("mma.sync.aligned.{} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}}, "
        "{{$14}}, {{0, $15}}, {{$16}}, {{0, $17}};")


@asm((u32,), (f32,) * 8, f"{{.reg .b8 b0, b1, b2, b3; {_PACK} mov.b32 $0, {{b0, b1, b2, b3}};}}")
def pack_e2m1(a, b, c, d, e, f, g, h) -> int:
    """Eight floats as floats of 4 bits, to the nearest, even where two are; larger ones, and NaN, become 6."""
    return sum(int(e2m1_code(number)) << 4 * place for place, number in enumerate((a, b, c, d, e, f, g, h)))


def e2m1_code(number):
    """The codes of floats, to the nearest, even where two are; NaN is 6."""
    number = np.asarray(number, np.float64)
    code = nearest_code(np.abs(number), _BETWEEN)
    return np.where(np.isnan(number), 7, code | np.signbit(number) * 8).astype(np.uint32)


def e2m1_values(words):
    """float32 of the codes of words."""
    return _VALUES[words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15]


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4 + (u32, u16, u32, u16),
     _MMA.format("kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3"), "convergent")
def mma_nvfp4(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, left, pair, right, lane):
    """C + A B, each number times its scale: `left` those of A, of the lanes of this pair, `right` those of B."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), (left, right), pair, lane, nvfp4_scales)


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4 + (u32, u16, u32, u16),
     _MMA.format("kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0"), "convergent")
def mma_mxfp4(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, left, pair, right, lane):
    """mma_nvfp4 with the scales of MXFP4."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), (left, right), pair, lane, mxfp4_scales)


def nvfp4_scales(words):
    """float32 [..., 4] of words of scales."""
    return e4m3_values((words & np.uint32(0x7F7F7F7F)).reshape(-1)).reshape(*words.shape, 4)


def mxfp4_scales(words):
    """float32 [..., 2] of words of scales."""
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
