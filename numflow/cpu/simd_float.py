"""More operations on f32x16, the register of simd.py: arithmetic, selection, partial loads and stores, lane sums.

Partial loads and stores take the same instructions for the last columns of a row as for all others, so an element's
bits do not depend on where in a vector it stands.
"""

from llvmlite import ir
from numba import types

from numflow.cpu.simd import call, constant, f32x16, first_lanes, i32x16, inline, load_f16, load_f32, masked_store, op

_I1, _I32 = ir.IntType(1), ir.IntType(32)
_F32X16 = f32x16.llvm
_UNDEF = ir.Constant(_F32X16, ir.Undefined)


def _pick(lanes):
    return ir.Constant(ir.VectorType(_I32, len(lanes)), [ir.Constant(_I32, lane) for lane in lanes])


@op(f32x16, f32x16, f32x16)
def add(builder, a, b):
    """a + b."""
    return builder.fadd(a, b)


@op(f32x16, f32x16, f32x16)
def sub(builder, a, b):
    """a - b."""
    return builder.fsub(a, b)


@op(f32x16, f32x16, f32x16)
def div(builder, a, b):
    """a / b."""
    return builder.fdiv(a, b)


@op(f32x16, f32x16, f32x16)
def larger(builder, a, b):
    """The larger of each pair; b where a is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@op(f32x16, f32x16, f32x16)
def smaller(builder, a, b):
    """The smaller of each pair; b where a is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@op(f32x16, f32x16)
def magnitude(builder, a):
    """|a|."""
    return call(builder, "llvm.fabs.v16f32", _F32X16, a)


@op(f32x16, f32x16, f32x16)
def with_sign(builder, a, sign):
    """|a| with the sign of `sign`."""
    return call(builder, "llvm.copysign.v16f32", _F32X16, a, sign)


@op(f32x16, f32x16, f32x16, f32x16, f32x16)
def where_less(builder, a, b, then, otherwise):
    """`then` in lanes where a < b, `otherwise` in the others."""
    return builder.select(builder.fcmp_ordered("<", a, b), then, otherwise)


@op(f32x16, f32x16)
def two_to(builder, n):
    """2^n for whole n in -126 .. 127."""
    biased = builder.add(builder.fptosi(n, i32x16.llvm), constant(i32x16.llvm, 127))
    return builder.bitcast(builder.shl(biased, constant(i32x16.llvm, 23)), _F32X16)


@op(f32x16, f32x16, types.int64, types.int64, types.float32)
def keep_lanes(builder, a, first, last, other):
    """`a` in lanes first .. last, `other` outside; first and last may lie far outside 0 .. 15."""
    low, high = (builder.trunc(_clamped(builder, v), _I32) for v in (first, last))
    after = builder.icmp_signed(">=", _lane_numbers(), _splat(builder, low, _I32))
    before = builder.icmp_signed("<=", _lane_numbers(), _splat(builder, high, _I32))
    return builder.select(builder.and_(after, before), a, _splat(builder, other, ir.FloatType()))


def _clamped(builder, value):
    low, high = ir.Constant(value.type, -1), ir.Constant(value.type, 16)
    value = builder.select(builder.icmp_signed("<", value, low), low, value)
    return builder.select(builder.icmp_signed(">", value, high), high, value)


def _lane_numbers():
    return _pick(range(16))


def _splat(builder, scalar, llvm):
    undef = ir.Constant(ir.VectorType(llvm, 16), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undef, scalar, _I32(0)), undef, _pick([0] * 16))


@op(f32x16)
def lane_numbers(builder):
    """0, 1, ... 15."""
    return ir.Constant(_F32X16, [ir.Constant(ir.FloatType(), float(i)) for i in range(16)])


@op(f32x16, types.int64, types.int64)
def load_part(builder, address, count):
    """The first `count` of 16 float32, zeros in the other lanes, whose memory is not touched."""
    pointer = builder.inttoptr(address, _F32X16.as_pointer())
    return call(builder, "llvm.masked.load.v16f32.p0", _F32X16, pointer, _I32(4), first_lanes(builder, count),
                ir.Constant(_F32X16, None))


@op(types.void, types.int64, f32x16, types.int64)
def store_part(builder, address, value, count):
    """The first `count` lanes; the others' memory is not touched."""
    masked_store(builder, value, builder.inttoptr(address, _F32X16.as_pointer()), first_lanes(builder, count))


def _tree(builder, value, combine):
    """One lane that combines all 16, in the order of a balanced tree."""
    for width in (8, 4, 2, 1):
        moved = builder.shuffle_vector(value, _UNDEF, _pick([(i + width) % 16 for i in range(16)]))
        value = combine(value, moved)
    return builder.extract_element(value, _I32(0))


@op(types.float32, f32x16)
def sum_lanes(builder, a):
    """The sum of all lanes."""
    return _tree(builder, a, builder.fadd)


@op(types.float32, f32x16)
def max_lanes(builder, a):
    """The largest lane."""
    return _tree(builder, a, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y))


@op(f32x16, f32x16, f32x16)
def evens(builder, a, b):
    """Elements 0, 2, ... 30 of the 32 in (a, b)."""
    return builder.shuffle_vector(a, b, _pick(range(0, 32, 2)))


@op(f32x16, f32x16, f32x16)
def odds(builder, a, b):
    """Elements 1, 3, ... 31 of the 32 in (a, b)."""
    return builder.shuffle_vector(a, b, _pick(range(1, 32, 2)))


@op(f32x16, f32x16, f32x16)
def zipped_low(builder, a, b):
    """a0, b0, a1, b1, ... a7, b7."""
    return builder.shuffle_vector(a, b, _pick([i // 2 + 16 * (i % 2) for i in range(16)]))


@op(f32x16, f32x16, f32x16)
def zipped_high(builder, a, b):
    """a8, b8, ... a15, b15."""
    return builder.shuffle_vector(a, b, _pick([8 + i // 2 + 16 * (i % 2) for i in range(16)]))


@op(types.void, types.int64, types.float32)
def store_as_f16(builder, address, value):
    """One float32 as float16, rounded to nearest even; too large ones become infinities."""
    from numflow.cpu.simd_isa import isa

    pointer = builder.inttoptr(address, ir.IntType(16).as_pointer())
    if isa() == "plain":
        builder.store(_narrowed(builder, value), pointer)
    else:
        builder.store(builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16)), pointer)


def _narrowed(builder, value):
    """float32 -> float16 bits in integer arithmetic, for processors without the conversion."""
    bits = builder.bitcast(value, _I32)
    sign = builder.and_(builder.lshr(bits, _I32(16)), _I32(0x8000))
    size = builder.and_(bits, _I32(0x7FFFFFFF))
    # Normal numbers: rebias the exponent, round half to even by adding just under half a unit plus the last bit.
    odd = builder.and_(builder.lshr(size, _I32(13)), _I32(1))
    normal = builder.lshr(builder.add(builder.sub(size, _I32(112 << 23)), builder.add(odd, _I32(0xFFF))), _I32(13))
    # Subnormal ones: adding 0.5 lets the float unit do the rounding.
    shifted = builder.fadd(builder.bitcast(size, ir.FloatType()), ir.Constant(ir.FloatType(), 0.5))
    small = builder.sub(builder.bitcast(shifted, _I32), _I32(126 << 23))
    half = builder.select(builder.icmp_unsigned("<", size, _I32(113 << 23)), small, normal)
    half = builder.select(builder.icmp_unsigned(">=", size, _I32(0x477FF000)), _I32(0x7C00), half)
    half = builder.select(builder.icmp_unsigned(">", size, _I32(0x7F800000)), _I32(0x7E00), half)
    return builder.trunc(builder.or_(half, sign), ir.IntType(16))


@inline
def load_as_f32(address, half):
    """16 elements as float32: float16 ones where `half`, float32 ones otherwise."""
    if half:
        return load_f16(address)
    return load_f32(address)
