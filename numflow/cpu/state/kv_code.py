"""Quantised keys and values: emitters of kernel code that encode and decode the types of numflow/quant/kv.py.

A row of one head is blocks of 32 columns, and 16 tokens are interleaved. In memory, with B bytes per bit plane:
    [blocks]{scales bf16 [16], minima bf16 [16], planes}
    a plane of keys    u8 [B / 4][16 tokens][4 bytes of the token]; with B = 2, [16 tokens][2]
    a plane of values  u8 [4][B][4 tokens], four tokens at a time
Unpacked to one byte per code, a 32-bit word is then 4 columns of a key, or one column of 4 values: the operand of a dot
product of bytes (attention/int8.py). A byte belongs to one token, so tokens are written independently. Kernels select
the type (kv_rows.KINDS) at run time.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from numflow.cpu.simd.bits import move_bits
from numflow.cpu.simd.value import Value, constant, llvm_type, load, prefetch, save, staged
from numflow.cpu.simd.vector import f32x16
from numflow.cpu.weights.decode_own import unpack_pair
from numflow.quant.bits import Plane
from numflow.quant.kv import CODED, HEADER_BYTES, NORM, PAIR_LEVELS, SMALLEST, KVType

_MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the integer, rounded half to even, in the low bits
_SMALLEST_BITS = int(np.float32(SMALLEST).view(np.int32))
_i64 = types.int64
TOKENS = 16  # interleaved tokens


@staged(types.void, _i64)
def rotate(address):
    """Hadamard transform of 32 float32, in place."""
    for half, vector in enumerate(_rotated(load(address, "f32", 16), load(address + 64, "f32", 16))):
        save(address + 64 * half, vector)


def _rotated(low: Value, high: Value) -> tuple[Value, Value]:
    low, high = low + high, low - high
    for step in (8, 4, 2, 1):
        signs = [-1.0 if lane & step else 1.0 for lane in range(16)]
        low, high = (x.permute([lane ^ step for lane in range(16)]) + x * signs for x in (low, high))
    return low * NORM, high * NORM


# Writing.

def _encoder(kind: KVType) -> Callable[..., Any]:
    @staged(types.void, f32x16, f32x16, _i64, _i64, _i64)
    def encode(low, high, block, token, values):
        """Encode 32 columns into a block of 16 tokens. token: index in the block. values: 1 for values, 0 for keys."""
        low, high = _rotated(low, high)
        bounds = [_reduced(low, high, name) for name in ("minimum", "maximum")]
        best = None
        for inset in kind.insets:
            candidate = _quantized(kind, low, high, *bounds, inset)
            best = candidate if best is None else _better(best, candidate)
        codes, scale_bits, floor_bits, _ = best
        save(block + (token << 1), (scale_bits >> 16).narrow("u16"), 2)
        save(block + (token << 1) + 2 * TOKENS, (floor_bits >> 16).narrow("u16"), 2)
        codes = [code.narrow("u8") for code in codes]
        packed = codes[0] + codes[1] * PAIR_LEVELS if kind.levels == PAIR_LEVELS else codes[0].join(codes[1])
        plane_start, is_value = block + TOKENS * HEADER_BYTES, values.compare("==", 1)
        for plane in kind.planes:
            fields = _packed(packed, plane)
            count = fields.lanes
            first = is_value.choose((token & -4) * count + (token & 3), token * min(4, count))
            # Strides of 4 bytes and of 1 byte of a token's codes.
            fours, ones = (is_value.choose(token * 0 + step, other) for step, other in ((16, 4 * TOKENS), (4, 1)))
            for byte in range(count):
                save(plane_start + first + fours * (byte // 4) + ones * (byte % 4), fields.lane(byte), 1)
            plane_start = plane_start + TOKENS * count
    return encode


def _quantized(kind, low, high, smallest, largest, inset):
    """Quantise with the range narrowed by `inset`: codes i32x16 of both halves, the float32 bits of scale and minimum,
    and the sum of squared errors."""
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
    """Of two results of `_quantized`, the one with the smaller error; the first if equal."""
    is_less = second[3].builder.fcmp_ordered("<", second[3].llvm, first[3].llvm)
    select = Value(second[3].builder, is_less).choose
    return [select(b, a) for a, b in zip(first[0], second[0], strict=True)], *(
        select(b, a) for a, b in zip(first[1:], second[1:], strict=True))


def _reduced(low: Value, high: Value, name: str) -> Value:
    """The minimum or maximum of 32 lanes; NaN if any lane is NaN."""
    both = low.call(f"llvm.{name}.v16f32", low.llvm.type, high)
    return both.call(f"llvm.vector.reduce.f{name}.v16f32", llvm_type("f32"))


def _code(x: Value, floor: Value, inverse: Value, levels: int) -> Value:
    """Codes of f32x16, i32x16, clamped to 0 .. levels - 1."""
    codes = ((x - floor.splat()) * inverse.splat() + _MAGIC).as_("i32", 16) - 0x4B400000
    codes = codes.compare(">", 0).choose(codes, 0)
    return codes.compare("<", levels - 1).choose(codes, levels - 1)


def _packed(codes: Value, plane: Plane) -> Value:
    """The bytes of a bit plane of the codes."""
    count = plane.bytes(codes.lanes)
    parts = [((codes.part(count * i, count) >> plane.shift) & ((1 << plane.width) - 1)) << (plane.width * i)
             for i in range(8 // plane.width)]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined | part
    return joined


# Reading: unpack the 512 codes of a block of 16 tokens to one byte each. The same number of bytes is prefetched from
# `ahead` on.

def _prefetch_block(ahead: Value, kind: KVType) -> None:
    """Prefetch the bytes of a block of 16 tokens."""
    for line in range(0, TOKENS * kind.block_bytes, 64):
        prefetch(ahead + line, 2)


def _key_unpacker(kind: KVType) -> Callable[..., Any]:
    @staged(types.void, _i64, _i64, _i64)
    def unpack(block, y, ahead):
        """Unpack a block of 16 keys to y, u8 [8][16 keys][4 columns]."""
        _prefetch_block(ahead, kind)
        for word in range(kind.codes // 4):
            _save_codes(kind, y + 64 * word, 256, _codes(kind, block, _key_fields, word))
    return unpack


def _value_unpacker(kind: KVType) -> Callable[..., Any]:
    @staged(types.void, _i64, _i64, _i64)
    def unpack(block, y, ahead):
        """Unpack a block of 16 values to y, u8 [4][32 columns][4 values]."""
        _prefetch_block(ahead, kind)
        for part in range(kind.codes // 4):  # 16 columns of 4 values
            quad, half = divmod(part, kind.codes // 16)
            _save_codes(kind, y + 128 * quad + 64 * half, 64, _codes(kind, block, _value_fields, quad, half))
    return unpack


def _save_codes(kind: KVType, y: Value, second: int, codes: Value) -> None:
    """Store codes u8x64 at y; of pairs, the first codes at y and the second codes `second` bytes behind."""
    if kind.levels != PAIR_LEVELS:
        save(y, codes)
        return
    for i in range(2):
        save(y + second * i, unpack_pair(codes, i))


def _codes(kind: KVType, block: Value, fields: Callable[..., Value], *indices: int) -> Value:
    """Codes combined from all bit planes, u8x64. fields: `_key_fields` or `_value_fields`, with its last arguments."""
    parts, address = [], block + TOKENS * HEADER_BYTES
    for plane in kind.planes:
        count = plane.bytes(kind.codes)
        parts.append(fields(address, plane, count, *indices))
        address = address + TOKENS * count
    return functools.reduce(Value.__or__, parts)


def _key_fields(address: Value, plane: Plane, count: int, word: int) -> Value:
    """The plane's bits of codes 4 * word .. 4 * word + 3 of 16 keys, shifted; a key has `count` bytes of the plane."""
    if count == 2:  # codes 2i and 2i + 1 are bits i
        half = load(address, "u16", TOKENS).widen()
        bits = (half | half << 16).as_("u16", 2 * TOKENS) >> [2 * word, 2 * word + 1] * TOKENS
        return (bits.as_("u8", 64) & 1) << plane.shift
    field, byte = divmod(4 * word, count)
    return move_bits(load(address + TOKENS * byte, "u8", 64), plane.width * field, plane.shift, plane.width)


def _value_fields(address: Value, plane: Plane, count: int, quad: int, half: int) -> Value:
    """The plane's bits of codes 16 * half .. 16 * half + 15 of values 4 * quad .. 4 * quad + 3, shifted."""
    positions = [divmod(16 * half + code, count) for code in range(16)]  # field, byte
    words = load(address + 4 * count * quad, "i32", count).permute([byte for _, byte in positions])
    bits = words >> [plane.width * field for field, _ in positions]
    return (bits & ((1 << plane.width) - 1) * 0x01010101).as_("u8", 64) << plane.shift


_encoders, _keys, _values = ({name: make(kind) for name, kind in CODED.items()}
                             for make in (_encoder, _key_unpacker, _value_unpacker))
encode_q8, encode_q6, encode_q5, encode_q4, encode_q3h, encode_q3, encode_q2 = _encoders.values()
key_q8, key_q6, key_q5, key_q4, key_q3h, key_q3, key_q2 = _keys.values()
value_q8, value_q6, value_q5, value_q4, value_q3h, value_q3, value_q2 = _values.values()
