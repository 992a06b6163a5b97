"""Arithmetic of kernels beyond Python's operators: packed words, conversions, mathematics, matrices of a warp.

Twins in Python, as in intrinsics.py.
"""

import math

import numpy as np

from numflow.cuda.intrinsic import asm, builtin
from numflow.cuda.intrinsics import aligned
from numflow.cuda.scalar import f32, i32, u16, u32
from numflow.cuda.simulator import NOW, exchange, together

# ---- bits


@asm((i32,), (u32, u32, i32), "dp4a.s32.s32 $0, $1, $2, $3;")
def dp4a(a: int, b: int, c: int) -> int:
    """c + sum of the products of 4 signed bytes of a and of b."""
    return i32(c + sum(_signed_byte(a >> s) * _signed_byte(b >> s) for s in (0, 8, 16, 24)))


@asm((i32,), (u32, u32, i32), "dp4a.u32.s32 $0, $1, $2, $3;")
def dp4a_us(a: int, b: int, c: int) -> int:
    """c + sum of the products of 4 unsigned bytes of a and signed bytes of b."""
    return i32(c + sum((a >> s & 255) * _signed_byte(b >> s) for s in (0, 8, 16, 24)))


def _signed_byte(word: int) -> int:
    return ((word & 255) ^ 128) - 128


@asm((u32,), (u32, u32, u32), "prmt.b32 $0, $1, $2, $3;")
def prmt(a: int, b: int, selector: int) -> int:
    """4 of the 8 bytes of (a, b): nibble i of the selector says which becomes byte i; its bit 3 takes the sign."""
    both, result = a | b << 32, 0
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = both >> (8 * (nibble & 7)) & 255
        result |= (byte if nibble < 8 else 255 * (byte >> 7)) << (8 * i)
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
    """How many bits are set."""
    return int(word).bit_count()


# ---- conversions


@asm((f32,), (u16,), "cvt.f32.f16 $0, $1;")
def half_to_float(half: int):
    """f32 of a float16's bits."""
    return f32(np.uint16(half).view(np.float16))


@asm((f32,), (u32,), "{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l;}")
def low_half(word: int):
    """f32 of the lower float16 of a word."""
    return f32(np.uint16(word & 0xFFFF).view(np.float16))


@asm((f32,), (u32,), "{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h;}")
def high_half(word: int):
    """f32 of the upper float16 of a word."""
    return f32(np.uint16(word >> 16).view(np.float16))


@asm((u16,), (f32,), "cvt.rn.f16.f32 $0, $1;")
def float_to_half(value) -> int:
    """The bits of a float rounded to float16."""
    return int(np.float16(value).view(np.uint16))


@asm((u32,), (f32, f32), "cvt.rn.f16x2.f32 $0, $2, $1;")
def pack_halves(low, high) -> int:
    """Two floats as float16 in a word."""
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


# ---- mathematics on f32


@builtin("math.exp")
def exp(x):
    return np.exp(f32(x))


@asm((f32,), (f32,), "ex2.approx.ftz.f32 $0, $1;")
def exp2(x):
    """2 to the power x, to some 2 units in the last place; numbers below the smallest normal one are 0."""
    return np.exp2(f32(x))


@builtin("math.tanh")
def tanh(x):
    return np.tanh(f32(x))


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
    """The larger; of a NaN and a number the number."""
    return np.fmax(f32(a), f32(b))


@asm((f32,), (f32, f32), "min.f32 $0, $1, $2;")
def fmin(a, b):
    return np.fmin(f32(a), f32(b))


@asm((f32,), (f32,), "abs.f32 $0, $1;")
def fabs(x):
    return abs(f32(x))


@asm((f32,), (f32, f32, f32), "fma.rn.f32 $0, $1, $2, $3;")
def fma(a, b, c):
    """a * b + c, rounded once."""
    return f32(float(a) * float(b) + float(c))


@asm((f32,), (f32, f32), "add.rn.f32 $0, $1, $2;")
def add_exactly(a, b):
    """a + b, rounded once and never fused with a product."""
    return f32(a) + f32(b)


@asm((f32,), (f32, f32), "mul.rn.f32 $0, $1, $2;")
def multiply_exactly(a, b):
    """a * b, rounded once and never fused with a sum."""
    return f32(a) * f32(b)


@asm((f32,), (f32, f32), "div.rn.f32 $0, $1, $2;")
def divide_exactly(a, b):
    """a / b, rounded once."""
    return f32(a) / f32(b)


# ---- matrices of a warp (mma.sync). Lane l holds, with g = l // 4 and t = l % 4:
#   A 16 x 16 halves / 16 x 32 bytes: words (row g, k 2t..), (row g + 8, k 2t..), (row g, k 2t + 8..), (row g + 8, ..)
#   B 16 x 8 / 32 x 8:                words (k 2t .., column g), (k 2t + 8 .., column g)
#   C 16 x 8 numbers:                 (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
# for bytes a word is 4 of them: k 4t .. 4t + 3, then k 4t + 16 ...

_MMA = "mma.sync.aligned.{} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4, _MMA.format("m16n8k16.row.col.f32.f16.f16.f32"), "convergent")
def mma_f16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C + A B of float16, summed in f32."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), _halves)


@asm((f32,) * 4, (u32,) * 6 + (f32,) * 4, _MMA.format("m16n8k16.row.col.f32.bf16.bf16.f32"), "convergent")
def mma_bf16(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C + A B of bfloat16, summed in f32."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), _bfloats)


@asm((i32,) * 4, (u32,) * 6 + (i32,) * 4, _MMA.format("m16n8k32.row.col.s32.s8.s8.s32"), "convergent")
def mma_s8(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """C + A B of signed bytes."""
    return _mma((a0, a1, a2, a3), (b0, b1), (c0, c1, c2, c3), _signed_bytes)


def _halves(words):
    return words.view(np.float16).astype(np.float32)


def _bfloats(words):
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _signed_bytes(words):
    return words.view(np.int8).astype(np.int32)


def _mma(a, b, c, values):
    def product(slots):
        words = np.array([slot[0] for slot in slots], np.uint32)  # [32, 4]
        left = np.concatenate([np.concatenate([_fragment(words[:, 0], values), _fragment(words[:, 2], values)], 1),
                               np.concatenate([_fragment(words[:, 1], values), _fragment(words[:, 3], values)], 1)])
        words = np.array([slot[1] for slot in slots], np.uint32)
        right = np.concatenate([_fragment(words[:, 0], values), _fragment(words[:, 1], values)], 1)
        return left @ right.T

    result, lane = together((a, b), product), NOW.thread.lane
    row, column = lane // 4, lane % 4 * 2
    values_ = (result[row, column], result[row, column + 1], result[row + 8, column], result[row + 8, column + 1])
    if values is _signed_bytes:
        return tuple(i32(int(v) + n) for v, n in zip(values_, c))
    return tuple(f32(v + n) for v, n in zip(values_, c))


def _fragment(words, values):
    """[32] words, 4 lanes to a row -> 8 rows."""
    return values(np.ascontiguousarray(words)).reshape(8, -1)


@builtin("ldmatrix4")
def load_matrices(shared, index: int) -> tuple:
    """Four 8 x 8 matrices of 16-bit values from shared memory (u32 pointer). Lane l gives the start of row l % 8 of
    matrix l // 8; it gets word l % 4 of row l // 4 of each."""
    at = shared.at(index, 4)
    aligned(shared, at, 4)
    rows = exchange(at)
    lane = NOW.thread.lane
    return tuple(shared.array.item(rows[8 * m + lane // 4] + lane % 4) for m in range(4))


@builtin("ldmatrix4t")
def load_columns(shared, index: int) -> tuple:
    """load_matrices of transposed matrices: a lane gets rows 2 (l % 4) and the next, of column l // 4, of each."""
    at = shared.at(index, 4)
    aligned(shared, at, 4)
    rows, lane, halves = exchange(at), NOW.thread.lane, shared.array.view(np.uint16)
    result = []
    for m in range(4):
        low, high = (halves.item(2 * rows[8 * m + lane % 4 * 2 + i] + lane // 4) for i in range(2))
        result.append(low | high << 16)
    return tuple(result)


@asm((u32,), (u32,), "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "convergent")
def transpose_matrix(word: int) -> int:
    """Of an 8 x 8 matrix of 16-bit values, of which lane l has word l % 4 of row l // 4, the same of its transpose."""
    words, lane = exchange(word), NOW.thread.lane
    low, high = (words[4 * (lane % 4 * 2 + i) + lane // 8] >> 16 * (lane // 4 % 2) & 0xFFFF for i in range(2))
    return low | high << 16


# ---- two halves at a time


@asm((u32,), (u32, u32), "sub.rn.f16x2 $0, $1, $2;")
def sub_halves(a: int, b: int) -> int:
    """a - b of two float16 each."""
    return _pair_of_halves(a, b, lambda x, y: x - y)


@asm((u32,), (u32, u32, u32), "fma.rn.f16x2 $0, $1, $2, $3;")
def fma_halves(a: int, b: int, c: int) -> int:
    """a * b + c of two float16 each, rounded once."""
    exact = _doubles(a) * _doubles(b) + _doubles(c)
    return int(exact.astype(np.float16).view(np.uint32)[0])


def _doubles(word):
    return np.array([word], np.uint32).view(np.float16).astype(np.float64)


def _pair_of_halves(a, b, function):
    return int(function(_doubles(a), _doubles(b)).astype(np.float16).view(np.uint32)[0])
