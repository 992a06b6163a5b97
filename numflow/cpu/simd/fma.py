"""a * b + c of float32, rounded once, on every processor.

On x86 without FMA, LLVM would call the C library for each lane: 30 ns if that computes fma in software. Here the
product of two float32 is computed in double, exactly. The sum with c is rounded twice, to double and then to float32,
which differs from one rounding only if the double lies halfway between two float32. All sums at or below the smallest
normal float32 count as doubtful too, because float32 are further apart there. Doubtful sums are rounded to odd instead:
of the two doubles around the exact sum, the one whose last bit is 1, which is never halfway between two float32 (Boldo
and Melquiond, 2008). Exact sums are unchanged. With weights of few bits many sums are exact ties, so the doubtful case
must be fast as well.
"""

from collections.abc import Sequence

from llvmlite import ir

from numflow.cpu.simd.isa import has_fma
from numflow.cpu.simd.vector import call, constant

_I32X4, _I64X2 = ir.VectorType(ir.IntType(32), 4), ir.VectorType(ir.IntType(64), 2)
_F32X2, _F64X2 = ir.VectorType(ir.FloatType(), 2), ir.VectorType(ir.DoubleType(), 2)


def fma_ir(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c of float32 vectors of 4, 8 or 16 lanes, rounded once."""
    lanes = a.type.count
    return call(builder, f"llvm.fma.v{lanes}f32", a.type, a, b, c) if has_fma() else emulated(builder, a, b, c)


def emulated(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """The same bits without the instruction (NaN payloads may differ): 30 SSE2 instructions for 4 lanes.

    The emulation is a function: kernels with a hundred inlined copies would not fit the L1 cache.
    """
    name = f"numflow_fma_{a.type.count}"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        _all_lanes(ir.IRBuilder(function.append_basic_block()), *function.args)
    return builder.call(function, [a, b, c])


def _all_lanes(builder, *vectors):
    results = [_4_lanes(builder, *(_shuffled(builder, v, v, range(i, i + 4)) for v in vectors))
               for i in range(0, vectors[0].type.count, 4)]
    while len(results) > 1:
        results = [_joined(builder, low, high) for low, high in zip(results[::2], results[1::2])]
    builder.ret(results[0])


def _4_lanes(builder, a, b, c):
    """4 lanes as two pairs of doubles: they fit the registers, and LLVM generates poor code for wider vectors."""
    a, b, c = ([builder.fpext(_shuffled(builder, v, v, i), _F64X2) for i in ((0, 1), (2, 3))] for v in (a, b, c))
    products = [builder.fmul(x, y) for x, y in zip(a, b)]
    sums = [builder.fadd(p, z) for p, z in zip(products, c)]
    result, at_once = _float32(builder, sums), builder.block
    with builder.if_then(_any_doubtful(builder, sums, result), likely=False):
        to_odd = _float32(builder, [_rounded_to_odd(builder, *terms) for terms in zip(products, c, sums)])
        repaired = builder.block
    either = builder.phi(result.type)
    either.add_incoming(result, at_once)
    either.add_incoming(to_odd, repaired)
    return either


def _any_doubtful(builder, sums, result):
    """i1: whether one of 4 doubles lies halfway between two float32, or is too small."""
    low, high = (builder.bitcast(pair, _I32X4) for pair in sums)
    low_bits = builder.shl(_shuffled(builder, low, high, (0, 2, 4, 6)), constant(_I32X4, 3))  # bits beyond float32
    between = builder.icmp_signed("==", low_bits, constant(_I32X4, -(1 << 31)))
    size = builder.and_(builder.bitcast(result, _I32X4), constant(_I32X4, 0x7FFFFFFF))
    small = builder.icmp_signed("<=", size, constant(_I32X4, 0x00800000))  # 2^-126 may be a rounded-up smaller value
    lanes = builder.bitcast(builder.or_(between, small), ir.IntType(4))
    return builder.icmp_unsigned("!=", lanes, lanes.type(0))


def _rounded_to_odd(builder, product, c, total):
    """product + c rounded to odd; `total` is product + c rounded to nearest, all doubles."""
    # The exact rounding error (Knuth's two-sum); NaN if an operand is infinite.
    added = builder.fsub(total, product)
    error = builder.fadd(builder.fsub(product, builder.fsub(total, added)), builder.fsub(c, added))
    # Truncate: if the error has the opposite sign, the total's magnitude is too large by 1 in its integer bits.
    # Then set the last bit if the error is not 0.
    side, zero = builder.fmul(error, total), constant(_F64X2, 0.0)
    less, more = (builder.sext(builder.fcmp_ordered(r, side, zero), _I64X2) for r in ("<", ">"))
    bits = builder.add(builder.bitcast(total, _I64X2), less)
    bits = builder.or_(bits, builder.lshr(builder.or_(less, more), constant(_I64X2, 63)))
    return builder.bitcast(bits, _F64X2)


def _float32(builder, pairs):
    return _joined(builder, *(builder.fptrunc(pair, _F32X2) for pair in pairs))


def _joined(builder, low, high):
    return _shuffled(builder, low, high, range(2 * low.type.count))


def _shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    indices = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), [ir.Constant(ir.IntType(32), i) for i in lanes])
    return builder.shuffle_vector(a, b, indices)
