"""Arithmetic intrinsics beyond Python's operators: packed words, conversions, mathematics, matrix products of a warp.

Each function is the Python twin of an intrinsic, as in intrinsics.py.
"""

import math
import struct

import numpy as np

from numflow.cuda.lang.intrinsic import asm, builtin
from numflow.cuda.lang.intrinsics import aligned
from numflow.cuda.lang.kernel import device
from numflow.cuda.lang.scalar import f32, i32, u16, u32
from numflow.cuda.lang.simulator import NOW, exchange, together

_WORD, _TWO_WORDS, _SIGNED = struct.Struct("<I").pack, struct.Struct("<II").pack, struct.Struct("4b").unpack
_HALVES, _AS_WORD = struct.Struct("<ee").pack, struct.Struct("<I").unpack
_FLOATS = list(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))  # by the bits of a float16

# ---- bits


@asm((i32,), (u32, u32, i32), "dp4a.s32.s32 $0, $1, $2, $3;")
def dp4a(a: int, b: int, c: int) -> int:
    """c + the dot product of 4 signed bytes of a and of b."""
    (p, q, r, s), (t, u, v, w) = _SIGNED(_WORD(a)), _SIGNED(_WORD(b))
    return i32(c + p * t + q * u + r * v + s * w)


@asm((i32,), (u32, u32, i32), "dp4a.u32.s32 $0, $1, $2, $3;")
def dp4a_us(a: int, b: int, c: int) -> int:
    """c + the dot product of 4 unsigned bytes of a and signed bytes of b."""
    (p, q, r, s), (t, u, v, w) = _WORD(a), _SIGNED(_WORD(b))
    return i32(c + p * t + q * u + r * v + s * w)


@asm((u32,), (u32, u32, u32), "prmt.b32 $0, $1, $2, $3;")
def prmt(a: int, b: int, selector: int) -> int:
    """4 of the 8 bytes of (a, b). Nibble i of the selector is the index of byte i; its bit 3 replicates the sign."""
    both, result = _TWO_WORDS(a, b), 0
    for i in (0, 4, 8, 12):
        nibble = selector >> i & 15
        byte = both[nibble & 7]
        result |= (byte if nibble < 8 else 255 * (byte >> 7)) << 2 * i
    return result


@asm((u32,), (f32,), "mov.b32 $0, $1;")
def bits_of(value) -> int:
    """The bit pattern of a float."""
    return int(np.float32(value).view(np.uint32))


@asm((f32,), (u32,), "mov.b32 $0, $1;")
def float_of(bits: int):
    """The float of a bit pattern."""
    return np.uint32(bits).view(np.float32)


@asm((u32,), (u32,), "popc.b32 $0, $1;")
def count_bits(word: int) -> int:
    """Number of bits that are 1."""
    return int(word).bit_count()


# ---- conversions


@asm((f32,), (u16,), "cvt.f32.f16 $0, $1;")
def half_to_float(half: int):
    """f32 of a float16's bits."""
    return _FLOATS[half]


@asm((f32,), (u32,), "{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l;}")
def low_half(word: int):
    """f32 of the lower float16 of a word."""
    return _FLOATS[word & 0xFFFF]


@asm((f32,), (u32,), "{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h;}")
def high_half(word: int):
    """f32 of the upper float16 of a word."""
    return _FLOATS[word >> 16]


@asm((u16,), (f32,), "cvt.rn.f16.f32 $0, $1;")
def float_to_half(value) -> int:
    """The bits of a float rounded to float16."""
    return int(np.float16(value).view(np.uint16))


@asm((u32,), (f32, f32), "cvt.rn.f16x2.f32 $0, $2, $1;")
def pack_halves(low, high) -> int:
    """Two floats as float16 in a word."""
    return _rounded(low, high)


def _rounded(low, high) -> int:
    """Two float16 in a word."""
    try:
        return _AS_WORD(_HALVES(low, high))[0]
    except OverflowError:  # infinite as a float16
        return int(np.float16(low).view(np.uint16)) | int(np.float16(high).view(np.uint16)) << 16


@asm((u32,), (f32, f32), "cvt.rn.bf16x2.f32 $0, $2, $1;")
def pack_bfloats(low, high) -> int:
    """Two floats as bfloat16 in a word."""
    return _bfloat(low) | _bfloat(high) << 16


def _bfloat(value) -> int:
    bits = int(np.float32(value).view(np.uint32))
    return 0x7FFF if value != value else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


@asm((i32,), (f32,), "cvt.rni.s32.f32 $0, $1;")
def round_to_int(value) -> int:
    """Nearest integer, ties to even; clamped, NaN is 0."""
    return 0 if value != value else int(min(max(np.rint(value), -2147483648.0), 2147483647.0))


@asm((i32,), (f32,), "cvt.rmi.s32.f32 $0, $1;")
def floor_to_int(value) -> int:
    """Largest integer that is not above value; clamped, NaN is 0."""
    return 0 if value != value else int(min(max(np.floor(value), -2147483648.0), 2147483647.0))


# ---- mathematics on f32


@builtin("math.exp")
def exp(x):
    return np.exp(f32(x))


@asm((f32,), (f32,), "ex2.approx.ftz.f32 $0, $1;")
def exp2(x):
    """2 to the power x, with an error of about 2 ulp; subnormal results are 0."""
    return np.exp2(f32(x))


@builtin("math.log")
def log(x):
    return np.log(f32(x))


@builtin("math.cos")
def cos(x):
    return np.cos(f32(x))


@builtin("math.sin")
def sin(x):
    return np.sin(f32(x))


@builtin("math.erf")
def erf(x):
    return f32(math.erf(x))


@builtin("math.sqrt")
def sqrt(x):
    return np.sqrt(f32(x))


@asm((f32,), (f32, f32), "max.f32 $0, $1, $2;")
def fmax(a, b):
    """The larger of two values; if one is NaN, the other."""
    a, b = f32(a), f32(b)
    return b if a < b or a != a else a


@asm((f32,), (f32, f32), "min.f32 $0, $1, $2;")
def fmin(a, b):
    a, b = f32(a), f32(b)
    return b if b < a or a != a else a


@asm((f32,), (f32,), "abs.f32 $0, $1;")
def fabs(x):
    return abs(f32(x))


@device
def tanh(x):
    """Hyperbolic tangent, with a relative error of 4e-7: the series near 0, and 1 - 2 / (e^2|x| + 1) elsewhere, which
    is 1 in float32 from 10 on. The compiler's would become tanh.approx, which has only 11 correct bits."""
    size = fabs(x)
    if size < f32(0.25):
        square = x * x
        return x * (f32(1) + square * (f32(-1 / 3) + square * (f32(2 / 15) + square * (f32(-17 / 315)
                                                                                       + square * f32(62 / 2835)))))
    size = f32(10) if size > f32(10) else size  # a NaN stays one
    far = f32(1) - f32(2) / (exp2(size * f32(2.8853900817779268)) + f32(1))
    return far if x > f32(0) else -far


@asm((f32,), (f32, f32, f32), "fma.rn.f32 $0, $1, $2, $3;")
def fma(a, b, c):
    """a * b + c, rounded once."""
    return f32(float(a) * float(b) + float(c))


@asm((f32,), (f32, f32), "add.rn.f32 $0, $1, $2;")
def add_exactly(a, b):
    """a + b, never fused with a product to an FMA."""
    return f32(a) + f32(b)


@asm((f32,), (f32, f32), "mul.rn.f32 $0, $1, $2;")
def multiply_exactly(a, b):
    """a * b, never fused with a sum to an FMA."""
    return f32(a) * f32(b)


@asm((f32,), (f32, f32), "div.rn.f32 $0, $1, $2;")
def divide_exactly(a, b):
    """a / b, correctly rounded."""
    return f32(a) / f32(b)


@asm((f32,), (f32,), "{.reg .f32 above; fma.rm.f32 above, $1, 0f3F800000, 0f4B000000; "
                     "sub.rn.f32 $0, above, 0f4B000000;}")
def floor_exactly(x):
    """Largest integer that is not above x, for x from 0 to 2^22: x + 2^23, rounded down, has no fractional bits. Two
    additions are faster than a conversion, which has a quarter of their throughput."""
    return f32(np.floor(f32(x)))


# ---- matrix products of a warp (mma.sync). The fragments of lane l, with g = l // 4 and t = l % 4:
#   A 16 x 16 halves / 16 x 32 bytes: words (row g, k 2t..), (row g + 8, k 2t..), (row g, k 2t + 8..), (row g + 8, ..)
#   B 16 x 8 / 32 x 8:                words (k 2t .., column g), (k 2t + 8 .., column g)
#   C 16 x 8 f32:                     (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
# A word of bytes has k 4t .. 4t + 3, or k 4t + 16 ...

_MMA = "mma.sync.aligned.{} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4, _MMA.format("m16n8k16.row.col.f32.f16.f16.f32"), "convergent")
def mma_f16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C + A B of float16, accumulated in f32."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), _halves)


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4, _MMA.format("m16n8k16.row.col.f32.bf16.bf16.f32"), "convergent")
def mma_bf16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C + A B of bfloat16, accumulated in f32."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), _bfloats)


def _halves(words):
    return words.view(np.float16).astype(np.float32)


def _bfloats(words):
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _mma(a, b, c, values, right_values=None):
    def product(slots):
        words = np.array([slot[0] for slot in slots], np.uint32).reshape(8, 4, 2, 2)  # row, word of it; k, row + 8
        left = values(np.ascontiguousarray(words.transpose(3, 0, 2, 1))).reshape(16, -1)
        words = np.array([slot[1] for slot in slots], np.uint32).reshape(8, 4, 2)  # column, word of it; k
        right = (right_values or values)(np.ascontiguousarray(words.transpose(0, 2, 1))).reshape(8, -1)
        return list((left @ right.T).ravel())

    result, lane, (c0, c1, c2, c3) = together((a, b), product), NOW.thread.lane, c
    at = lane // 4 * 8 + lane % 4 * 2
    r0, r1, r2, r3 = result[at], result[at + 1], result[at + 64], result[at + 65]
    return f32(r0 + c0), f32(r1 + c1), f32(r2 + c2), f32(r3 + c3)


@builtin("ldmatrix4")
def load_matrices(shared, index: int) -> tuple:
    """ldmatrix: four 8 x 8 matrices of 16-bit values from shared memory (u32 pointer). Lane l passes the index of row
    l % 8 of matrix l // 8, and gets word l % 4 of row l // 4 of each."""
    at = aligned(shared, index, 4)
    rows = exchange(at)
    lane = NOW.thread.lane
    return tuple(shared.array.item(rows[8 * m + lane // 4] + lane % 4) for m in range(4))


@builtin("ldmatrix4t")
def load_columns(shared, index: int) -> tuple:
    """ldmatrix.trans: load_matrices, transposed. Lane l gets rows 2 (l % 4) and the next of column l // 4 of each."""
    at = aligned(shared, index, 4)
    rows, lane, halves = exchange(at), NOW.thread.lane, shared.array.view(np.uint16)
    result = []
    for m in range(4):
        low, high = (halves.item(2 * rows[8 * m + lane % 4 * 2 + i] + lane // 4) for i in range(2))
        result.append(low | high << 16)
    return tuple(result)


@asm((u32,), (u32,), "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "convergent")
def transpose_matrix(word: int) -> int:
    """Transpose an 8 x 8 matrix of 16-bit values, of which lane l has word l % 4 of row l // 4."""
    words, lane = exchange(word), NOW.thread.lane
    low, high = (words[4 * (lane % 4 * 2 + i) + lane // 8] >> 16 * (lane // 4 % 2) & 0xFFFF for i in range(2))
    return low | high << 16


# ---- arithmetic on two halves at a time


@asm((u32,), (u32, u32), "sub.rn.f16x2 $0, $1, $2;")
def sub_halves(a: int, b: int) -> int:
    """a - b, for two float16 each."""
    return _rounded(float(_FLOATS[a & 0xFFFF]) - float(_FLOATS[b & 0xFFFF]),
                    float(_FLOATS[a >> 16]) - float(_FLOATS[b >> 16]))


@asm((u32,), (u32, u32, u32), "fma.rn.f16x2 $0, $1, $2, $3;")
def fma_halves(a: int, b: int, c: int) -> int:
    """a * b + c, rounded once, for two float16 each."""
    return _rounded(float(_FLOATS[a & 0xFFFF]) * float(_FLOATS[b & 0xFFFF]) + float(_FLOATS[c & 0xFFFF]),
                    float(_FLOATS[a >> 16]) * float(_FLOATS[b >> 16]) + float(_FLOATS[c >> 16]))
