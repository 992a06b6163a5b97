"""Keys and values in few bits, as code to build kernels of: the numbers and bits of numflow/quant/kv.py.

A row of one head is blocks of 32 columns. In memory, with P bytes of planes to a block,
    value  [blocks]{scale bf16, minimum bf16, planes u8 [P]}
    keys   [blocks]{scales bf16 [16], minima bf16 [16], planes u8 [P][16]}, 16 tokens side by side
The type is one of a list (kv_rows.KINDS), found at run time: what kernels read and write differs, the kernel is one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from numflow.cpu.simd import f32x16
from numflow.cpu.simd_value import Value, constant, fma, llvm_type, load, load_bf16, prefetch, save, staged
from numflow.quant.bits import Plane
from numflow.quant.kv import BLOCK, CODED, HEADER_BYTES, NORM, PAIR_LEVELS, SMALLEST, KVType

_MAGIC = 12582912.0  # 1.5 * 2^23: added to a number, it leaves its integer in the low bits, rounded half to even
_SMALLEST_BITS = int(np.float32(SMALLEST).view(np.int32))
_i64 = types.int64


@staged(types.void, _i64)
def rotate(address):
    """The Hadamard transform of 32 float32 in their place."""
    for half, vector in enumerate(_rotated(load(address, "f32", 16), load(address + 64, "f32", 16))):
        save(address + 64 * half, vector)


def _rotated(low: Value, high: Value) -> tuple[Value, Value]:
    low, high = low + high, low - high
    for step in (8, 4, 2, 1):
        signs = [-1.0 if lane & step else 1.0 for lane in range(16)]
        low, high = (x.pick([lane ^ step for lane in range(16)]) + x * signs for x in (low, high))
    return low * NORM, high * NORM


# Writing.

def _encoder(kind: KVType) -> Callable[..., Any]:
    @staged(types.void, f32x16, f32x16, _i64, _i64, _i64, _i64)
    def encode(low, high, scale, minimum, planes, step):
        """32 columns to addresses of their scale and minimum, and of planes `step` bytes apart."""
        low, high = _rotated(low, high)
        ends = [_reduced(low, high, name) for name in ("minimum", "maximum")]
        best = None
        for inset in kind.insets:
            cut = _cut(kind, low, high, *ends, inset)
            best = cut if best is None else _better(best, cut)
        codes, scale_bits, floor_bits, _ = best
        save(scale, (scale_bits >> 16).narrow("u16"), 2)
        save(minimum, (floor_bits >> 16).narrow("u16"), 2)
        codes = [code.narrow("u8") for code in codes]
        packed = codes[0] + codes[1] * PAIR_LEVELS if kind.levels == PAIR_LEVELS else codes[0].join(codes[1])
        at = planes
        for plane in kind.planes:
            fields = _packed(packed, plane)
            for byte in range(fields.lanes):
                save(at, fields.lane(byte), 1)
                at = at + step
    return encode


def _cut(kind, low, high, smallest, largest, inset):
    """Codes i32x16 of both halves, the float32 bits of scale and minimum, and the sum of squared errors."""
    margin = (largest - smallest) * float(np.float32(inset))
    floor_bits = (smallest + margin).as_("i32", 1)
    floor_bits = floor_bits.compare("<", 0).choose(floor_bits + 0xFFFF, floor_bits) & -65536
    floor = floor_bits.as_("f32", 1)
    scale_bits = (((largest - margin) - floor) * (1 / (kind.levels - 1))).as_("i32", 1) + 0xFFFF & -65536
    scale, one = scale_bits.as_("f32", 1), constant(floor, "f32", 1.0, 1)
    inverse = Value(floor.builder, floor.builder.fdiv(one.llvm, scale.llvm))
    inverse = scale_bits.compare(">", _SMALLEST_BITS).choose(inverse, 0.0)
    codes = [_code(x, floor, inverse, kind.levels) for x in (low, high)]
    errors = [x - (code.to_f32() * scale.splat() + floor.splat()) for x, code in zip((low, high), codes, strict=True)]
    squares = errors[0] * errors[0] + errors[1] * errors[1]
    for half in (8, 4, 2, 1):
        squares = squares.part(0, half) + squares.part(half, half) if half > 1 else squares.lane(0) + squares.lane(1)
    return codes, scale_bits, floor_bits, squares


def _better(first, second):
    """Of two cuts the one of smaller error; the first of equals."""
    smaller = second[3].builder.fcmp_ordered("<", second[3].llvm, first[3].llvm)
    pick = Value(second[3].builder, smaller).choose
    return [pick(b, a) for a, b in zip(first[0], second[0], strict=True)], *(
        pick(b, a) for a, b in zip(first[1:], second[1:], strict=True))


def _reduced(low: Value, high: Value, name: str) -> Value:
    """The least or largest of 32 lanes; NaN wins."""
    both = low.call(f"llvm.{name}.v16f32", low.llvm.type, high)
    return both.call(f"llvm.vector.reduce.f{name}.v16f32", llvm_type("f32"))


def _code(x: Value, floor: Value, inverse: Value, levels: int) -> Value:
    """i32x16"""
    codes = ((x - floor.splat()) * inverse.splat() + _MAGIC).as_("i32", 16) - 0x4B400000
    codes = codes.compare(">", 0).choose(codes, 0)
    return codes.compare("<", levels - 1).choose(codes, levels - 1)


def _packed(codes: Value, plane: Plane) -> Value:
    """The bytes of a plane."""
    count = plane.bytes(codes.lanes)
    parts = [((codes.part(count * i, count) >> plane.shift) & ((1 << plane.width) - 1)) << (plane.width * i)
             for i in range(8 // plane.width)]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined | part
    return joined


# Reading.

def _value_decoder(kind: KVType) -> Callable[..., Any]:
    @staged(types.void, _i64, _i64, _i64)
    def decode(block, y, ahead):
        """A block of one value -> 32 float32 at y. What lies at `ahead` is fetched into the cache."""
        prefetch(ahead, 2)
        scale, minimum = ((load(block + at, "u16").widen() << 16).as_("f32", 1).splat() for at in (0, 2))
        lanes = kind.codes // 16
        codes = [None] * lanes
        at = block + HEADER_BYTES
        for plane in kind.planes:
            count = plane.bytes(kind.codes)
            stored = load(at, "u8", count)
            for half in range(lanes):
                places = [divmod(16 * half + lane, count) for lane in range(16)]
                fields = stored.pick([byte for _, byte in places]).widen() >> [plane.width * i for i, _ in places]
                codes[half] = _merged(codes[half], fields, plane)
            at = at + count
        for half, code in enumerate(_pairs(codes[0]) if lanes == 1 else codes):
            save(y + 64 * half, fma(code.to_f32(), scale, minimum))
    return decode


def _key_decoder(kind: KVType) -> Callable[..., Any]:
    @staged(types.void, _i64, _i64, _i64)
    def decode(block, y, ahead):
        """A block of 16 keys -> float32 [32][16] at y. What lies at `ahead` is fetched into the cache."""
        for line in range(0, 16 * kind.block_bytes, 64):
            prefetch(ahead + line, 2)
        scale, minimum = load_bf16(block), load_bf16(block + 32)
        first = block + 16 * HEADER_BYTES
        stored = [load(first + 16 * byte, "u8", 16) for byte in range(kind.block_bytes - HEADER_BYTES)]
        for i in range(kind.codes):
            code, begin = None, 0
            for plane in kind.planes:
                count = plane.bytes(kind.codes)
                fields = stored[begin + i % count].widen() >> (plane.width * (i // count))
                code, begin = _merged(code, fields, plane), begin + count
            for half, x in enumerate(_pairs(code) if kind.codes < BLOCK else (code,)):
                save(y + 64 * (i + 16 * half), fma(x.to_f32(), scale, minimum))
    return decode


def _merged(code: Value | None, fields: Value, plane: Plane) -> Value:
    """Codes so far, with the bits of one more plane."""
    bits = (fields & ((1 << plane.width) - 1)) << plane.shift
    return bits if code is None else code | bits


def _pairs(code: Value) -> tuple[Value, Value]:
    """First and second of pairs of 7 bits."""
    second = code * 187 >> 11  # code // 11
    return code - second * PAIR_LEVELS, second


_encoders, _values, _keys = ({name: make(kind) for name, kind in CODED.items()}
                             for make in (_encoder, _value_decoder, _key_decoder))
encode_q8, encode_q6, encode_q5, encode_q4, encode_q3h, encode_q3, encode_q2 = _encoders.values()
value_q8, value_q6, value_q5, value_q4, value_q3h, value_q3, value_q2 = _values.values()
key_q8, key_q6, key_q5, key_q4, key_q3h, key_q3, key_q2 = _keys.values()
