"""Arithmetic of kernels on f32x16: + - * / and unary minus, fma, selection, loads and stores, lane sums.

Either operand of + - * / and any operand of fma may be a float, which is broadcast to all lanes. Partial loads and
stores handle the last columns of a row with the same instructions as all others, so the bits of an element do not
depend on its column.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin

from numflow.cpu.simd.fma import fma_ir
from numflow.cpu.simd.isa import has_half, isa
from numflow.cpu.simd.vector import call, f32x16, first_lanes, masked_store, op
from numflow.cpu.simd.vector import splat as splat_ir

_I32, _F32, _F32X16 = ir.IntType(32), ir.FloatType(), ir.VectorType(ir.FloatType(), 16)
_FLOATS = (f32x16, types.float32, types.float64)


# Arithmetic.

def _vector(builder: ir.IRBuilder, numba_type: types.Type, value: ir.Value) -> ir.Value:
    """A value of one of _FLOATS as f32x16."""
    if numba_type == f32x16:
        return value
    return splat_ir(builder, builder.fptrunc(value, _F32) if numba_type == types.float64 else value, 16)


def _register(function: Any, name: str, *signatures: Any) -> None:
    """Register the operator `function` for these signatures with Numba, as the LLVM instruction `name`."""
    infer_global(function)(type(f"F32x16_{name}", (ConcreteTemplate,), {"cases": list(signatures)}))

    def lower(context, builder, signature, args):
        return getattr(builder, name)(*(_vector(builder, t, v) for t, v in zip(signature.args, args, strict=True)))

    for signature in signatures:
        lower_builtin(function, *signature.args)(lower)


_PAIRS = [f32x16(a, b) for a in _FLOATS for b in _FLOATS if f32x16 in (a, b)]
_register(operator.add, "fadd", *_PAIRS)
_register(operator.sub, "fsub", *_PAIRS)
_register(operator.mul, "fmul", *_PAIRS)
_register(operator.truediv, "fdiv", *_PAIRS)
_register(operator.neg, "fneg", f32x16(f32x16))


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once; any operand may be a float."""
    def codegen(context, builder, signature, args):
        return fma_ir(builder, *(_vector(builder, t, v) for t, v in zip(signature.args, args, strict=True)))
    return f32x16(*map(types.unliteral, (a, b, c))), codegen


@intrinsic
def splat(typingctx, scalar):
    """A float in every lane."""
    def codegen(context, builder, signature, args):
        return _vector(builder, signature.args[0], args[0])
    return f32x16(types.unliteral(scalar)), codegen


# Selection.

def _less(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.fcmp_ordered("<", a, b)


@op(f32x16, f32x16, f32x16)
def maximum(builder, a, b):
    """The larger of a and b by lane; b where a is NaN."""
    return builder.select(_less(builder, b, a), a, b)


@op(f32x16, f32x16, f32x16)
def minimum(builder, a, b):
    """The smaller of a and b by lane; b where a is NaN."""
    return builder.select(_less(builder, a, b), a, b)


@op(f32x16, f32x16, f32x16, f32x16, f32x16)
def where_less(builder, a, b, then, otherwise):
    """Blend: `then` in lanes where a < b, `otherwise` in the others."""
    return builder.select(_less(builder, a, b), then, otherwise)


@op(f32x16, f32x16)
def magnitude(builder, a):
    """|a|."""
    return call(builder, "llvm.fabs.v16f32", _F32X16, a)


@op(f32x16, f32x16)
def sqrt(builder, a):
    """The square root."""
    return call(builder, "llvm.sqrt.v16f32", _F32X16, a)


@op(f32x16, f32x16, f32x16)
def copysign(builder, a, sign):
    """|a| with the sign of `sign`."""
    return call(builder, "llvm.copysign.v16f32", _F32X16, a, sign)


@op(f32x16, f32x16)
def two_to(builder, rounded):
    """2^n for integers n in -126 .. 127, given as n + 1.5 * 2^23, whose low bits are n."""
    bits = builder.bitcast(rounded, ir.VectorType(_I32, 16))
    biased = builder.add(builder.shl(bits, _vector_of(_I32, [23] * 16)), _vector_of(_I32, [127 << 23] * 16))
    return builder.bitcast(biased, _F32X16)


@op(f32x16, f32x16, types.int64, types.int64, types.float32)
def keep_lanes(builder, a, first, last, other):
    """`a` in lanes first .. last, `other` outside; first and last may lie far outside 0 .. 15."""
    lanes = _vector_of(_I32, range(16))
    first, last = (splat_ir(builder, builder.trunc(_clamped(builder, v), _I32), 16) for v in (first, last))
    inside = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<=", lanes, last))
    return builder.select(inside, a, splat_ir(builder, other, 16))


@op(f32x16, f32x16, types.int64, types.float32)
def keep_bits(builder, a, bits, other):
    """`a` in lanes i whose bit i is set, `other` in the others."""
    word = splat_ir(builder, builder.trunc(bits, _I32), 16)
    bit = builder.and_(word, _vector_of(_I32, [1 << lane for lane in range(16)]))
    is_set = builder.icmp_signed("!=", bit, _vector_of(_I32, [0] * 16))
    return builder.select(is_set, a, splat_ir(builder, other, 16))


def _clamped(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A scalar integer, clamped to -1 .. 16."""
    for sign, bound in (("<", value.type(-1)), (">", value.type(16))):
        value = builder.select(builder.icmp_signed(sign, value, bound), bound, value)
    return value


def _vector_of(element: ir.Type, values: Iterable) -> ir.Constant:
    constants = [ir.Constant(element, value) for value in values]
    return ir.Constant(ir.VectorType(element, len(constants)), constants)


@intrinsic
def lane_indices(typingctx):
    """0, 1, ... 15."""
    return f32x16(), lambda context, builder, signature, args: _vector_of(_F32, map(float, range(16)))


# Memory.

@op(f32x16, types.int64, types.int64)
def load_part(builder, address, count):
    """The first `count` of 16 float32; the other lanes are 0, and their memory is not read."""
    pointer = builder.inttoptr(address, _F32X16.as_pointer())
    return call(builder, "llvm.masked.load.v16f32.p0", _F32X16, pointer, _I32(4), first_lanes(builder, count),
                ir.Constant(_F32X16, None))


@op(types.void, types.int64, f32x16, types.int64)
def store_part(builder, address, value, count):
    """Store the first `count` lanes; the memory of the others is not written."""
    pointer = builder.inttoptr(address, _F32X16.as_pointer())
    if isa() == "avx512":
        masked_store(builder, value, pointer, first_lanes(builder, count))
        return
    # Without mask registers a partial store takes many instructions.
    with builder.if_else(builder.icmp_signed(">=", count, count.type(16))) as (all_lanes, some_lanes):
        with all_lanes:
            builder.store(value, pointer).align = 4
        with some_lanes:
            masked_store(builder, value, pointer, first_lanes(builder, count))


@op(types.void, types.int64, types.float32)
def store_as_f16(builder, address, value):
    """Store one float32 as float16, rounded to nearest even; values out of range become infinities."""
    pointer = builder.inttoptr(address, ir.IntType(16).as_pointer())
    if has_half():
        builder.store(builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16)), pointer)
    else:
        builder.store(_narrowed(builder, value), pointer)


def _narrowed(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float32 -> float16 bits in integer arithmetic, for processors without the conversion."""
    bits = builder.bitcast(value, _I32)
    sign, size = builder.and_(builder.lshr(bits, _I32(16)), _I32(0x8000)), builder.and_(bits, _I32(0x7FFFFFFF))
    # Normal values: rebias the exponent; round half to even by adding just under half a unit plus the last bit.
    odd = builder.and_(builder.lshr(size, _I32(13)), _I32(1))
    normal = builder.lshr(builder.add(builder.sub(size, _I32(112 << 23)), builder.add(odd, _I32(0xFFF))), _I32(13))
    # Subnormal values: adding 0.5 makes the float unit round.
    shifted = builder.fadd(builder.bitcast(size, _F32), _F32(0.5))
    small = builder.sub(builder.bitcast(shifted, _I32), _I32(126 << 23))
    half = builder.select(builder.icmp_unsigned("<", size, _I32(113 << 23)), small, normal)
    half = builder.select(builder.icmp_unsigned(">=", size, _I32(0x477FF000)), _I32(0x7C00), half)
    half = builder.select(builder.icmp_unsigned(">", size, _I32(0x7F800000)), _I32(0x7E00), half)
    return builder.trunc(builder.or_(half, sign), ir.IntType(16))


# Lanes.

def _shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Iterable) -> ir.Value:
    return builder.shuffle_vector(a, b, _vector_of(_I32, lanes))


def _tree(builder: ir.IRBuilder, value: ir.Value, combine: Callable) -> ir.Value:
    """Reduce 16 lanes to a scalar, in the order of a balanced tree."""
    for width in (8, 4, 2, 1):
        value = combine(value, _shuffled(builder, value, value, [(i + width) % 16 for i in range(16)]))
    return builder.extract_element(value, _I32(0))


@op(types.float32, f32x16)
def sum_lanes(builder, a):
    """The sum of all lanes."""
    return _tree(builder, a, builder.fadd)


@op(types.float32, f32x16)
def max_lanes(builder, a):
    """The largest lane."""
    return _tree(builder, a, lambda x, y: builder.select(_less(builder, y, x), x, y))


@op(f32x16, f32x16, f32x16)
def evens(builder, a, b):
    """Elements 0, 2, ... 30 of the 32 in (a, b)."""
    return _shuffled(builder, a, b, range(0, 32, 2))


@op(f32x16, f32x16, f32x16)
def odds(builder, a, b):
    """Elements 1, 3, ... 31 of the 32 in (a, b)."""
    return _shuffled(builder, a, b, range(1, 32, 2))


@op(f32x16, f32x16, f32x16)
def zipped_low(builder, a, b):
    """a0, b0, a1, b1, ... a7, b7."""
    return _shuffled(builder, a, b, [i // 2 + 16 * (i % 2) for i in range(16)])


@op(f32x16, f32x16, f32x16)
def zipped_high(builder, a, b):
    """a8, b8, ... a15, b15."""
    return _shuffled(builder, a, b, [8 + i // 2 + 16 * (i % 2) for i in range(16)])
