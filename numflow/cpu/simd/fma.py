"""a * b + c of float32, rounded once, on every processor.

x86 without the instruction would call the C library for each lane, which takes 30 ns where it has to do the same in
software. The product of two float32 is exact in double. Its sum with c is then rounded twice, to double and to float32,
which differs from once only if the double lies right between two float32. Below the normal numbers, where these are
further apart, all are taken for doubtful. Doubtful sums are rounded to odd instead: of the two doubles around the exact
sum the one whose last bit is 1, which lies between no two float32 (Boldo and Melquiond, 2008). Exact sums stay as they
are, and with weights of few bits many of them are ties: that way has to be quick as well.
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
    """The same bits without the instruction (a NaN may be another one), 30 instructions of SSE2 for 4 lanes.

    It is a function, as kernels that contain it a hundred times would not fit the first cache.
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
    """In two pairs: registers have room for so many, and LLVM splits wider vectors of doubles into poor code."""
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
    """Flag (i1): one of 4 doubles lies right between two float32, or is too small."""
    low, high = (builder.bitcast(pair, _I32X4) for pair in sums)
    below = builder.shl(_shuffled(builder, low, high, (0, 2, 4, 6)), constant(_I32X4, 3))  # bits that a float32 lacks
    between = builder.icmp_signed("==", below, constant(_I32X4, -(1 << 31)))
    size = builder.and_(builder.bitcast(result, _I32X4), constant(_I32X4, 0x7FFFFFFF))
    small = builder.icmp_signed("<=", size, constant(_I32X4, 0x00800000))  # what is 2^-126 now may have been less
    lanes = builder.bitcast(builder.or_(between, small), ir.IntType(4))
    return builder.icmp_unsigned("!=", lanes, lanes.type(0))


def _rounded_to_odd(builder, product, c, total):
    """`total` is product + c rounded to nearest, doubles."""
    # What rounding has lost, exactly (Knuth's two-sum); NaN where anything is infinite.
    added = builder.fsub(total, product)
    lost = builder.fadd(builder.fsub(product, builder.fsub(total, added)), builder.fsub(c, added))
    # Truncate: where the loss has the other sign, the total is too large and its bits, an integer, are 1 too many.
    # Then set the last bit if anything was lost at all.
    side, zero = builder.fmul(lost, total), constant(_F64X2, 0.0)
    less, more = (builder.sext(builder.fcmp_ordered(r, side, zero), _I64X2) for r in ("<", ">"))
    bits = builder.add(builder.bitcast(total, _I64X2), less)
    bits = builder.or_(bits, builder.lshr(builder.or_(less, more), constant(_I64X2, 63)))
    return builder.bitcast(bits, _F64X2)


def _float32(builder, pairs):
    return _joined(builder, *(builder.fptrunc(pair, _F32X2) for pair in pairs))


def _joined(builder, low, high):
    return _shuffled(builder, low, high, range(2 * low.type.count))


def _shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    numbers = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), [ir.Constant(ir.IntType(32), i) for i in lanes])
    return builder.shuffle_vector(a, b, numbers)
