"""a * b + c of float32, rounded once, on every processor.

x86 without the instruction would call the C library for each lane, which takes 30 ns where it has to do the same in
software. The product of two float32 is exact in double. Its sum with c is then rounded twice, to double and to float32,
which differs from once only if the double lies right between two float32. Below the normal numbers, where these are
further apart, all are taken for doubtful. Doubtful sums are rounded to odd instead: of the two doubles around the exact
sum the one whose last bit is 1, which lies between no two float32 (Boldo and Melquiond, 2008).
"""

from collections.abc import Callable, Sequence

from llvmlite import ir

from numflow.cpu.simd import call, constant
from numflow.cpu.simd_isa import has_fma

_I16X8, _I32X4, _I64X2 = (ir.VectorType(ir.IntType(128 // lanes), lanes) for lanes in (8, 4, 2))
_F32X2, _F64X2 = ir.VectorType(ir.FloatType(), 2), ir.VectorType(ir.DoubleType(), 2)


def fma_ir(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c of float32 vectors of 4, 8 or 16 lanes, rounded once."""
    lanes = a.type.count
    return call(builder, f"llvm.fma.v{lanes}f32", a.type, a, b, c) if has_fma() else emulated(builder, a, b, c)


def emulated(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """The same bits without the instruction (a NaN may be another one), a hundred instructions of SSE2."""
    return _called(builder, "numflow_fma", _rounded_once, a, b, c)


def _called(builder: ir.IRBuilder, name: str, emit: Callable, *args: ir.Value) -> ir.Value:
    """What `emit` makes of vectors, as a function: kernels with a hundred of them would not fit the first cache."""
    kind = args[0].type
    name = f"{name}_{kind.count}"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(args)), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        function.attributes.add("nounwind")
        emit(ir.IRBuilder(function.append_basic_block()), *function.args)
    return builder.call(function, args)


def _rounded_once(builder, a, b, c):
    sums = [builder.fadd(builder.fmul(x, y), z) for x, y, z in zip(*(_doubles(builder, v) for v in (a, b, c)))]
    results = _floats(builder, sums)
    with builder.if_then(_any_doubtful(builder, sums, results), likely=False):
        builder.ret(_called(builder, "numflow_fma_to_odd", _rounded_to_odd, a, b, c))
    builder.ret(_joined(builder, results))


def _any_doubtful(builder, sums, results):
    """Whether any of these doubles lies right between two float32, or any result is 0, denormal or just above."""
    marks = _small(builder, results)
    for low, high in zip(sums[::2], sums[1::2]):
        words = _shuffled(builder, builder.bitcast(low, _I32X4), builder.bitcast(high, _I32X4), (0, 2, 4, 6))
        below = builder.shl(words, constant(_I32X4, 3))  # the 29 bits that a float32 lacks
        between = builder.icmp_signed("==", below, constant(_I32X4, -(1 << 31)))
        marks = builder.or_(marks, builder.sext(between, _I32X4))
    lanes = builder.bitcast(builder.icmp_signed("<", marks, constant(_I32X4, 0)), ir.IntType(4))
    return builder.icmp_unsigned("!=", lanes, lanes.type(0))


def _small(builder, results):
    """i32x4, negative where one of the four results is at most 2^-126, which a sum just below may have become."""
    smallest = None
    for result in results:
        size = builder.and_(builder.bitcast(result, _I32X4), constant(_I32X4, 0x7FFFFFFF))
        size = builder.bitcast(size, _I16X8)  # the minimum that SSE2 has; only upper halves count
        less = builder.icmp_signed("<", size, smallest) if smallest else None
        smallest = builder.select(less, size, smallest) if smallest else size
    limits = ir.Constant(_I16X8, [-(1 << 15), (0x00800000 >> 16) + 1] * 4)
    return builder.bitcast(builder.sext(builder.icmp_signed("<", smallest, limits), _I16X8), _I32X4)


def _rounded_to_odd(builder, a, b, c):
    sums, zero = [], constant(_F64X2, 0.0)
    for x, y, z in zip(*(_doubles(builder, v) for v in (a, b, c))):
        product = builder.fmul(x, y)
        total = builder.fadd(product, z)
        # What rounding the total has lost, exactly (Knuth's two-sum); NaN where anything is infinite.
        added = builder.fsub(total, product)
        lost = builder.fadd(builder.fsub(product, builder.fsub(total, added)), builder.fsub(z, added))
        # Truncate: where the loss has the other sign, the total is too large and its bits, an integer, are 1 too many.
        # Then set the last bit if anything was lost at all.
        sign = builder.fmul(lost, total)
        less, more = (builder.sext(builder.fcmp_ordered(r, sign, zero), _I64X2) for r in ("<", ">"))
        bits = builder.add(builder.bitcast(total, _I64X2), less)
        bits = builder.or_(bits, builder.lshr(builder.or_(less, more), constant(_I64X2, 63)))
        sums.append(builder.bitcast(bits, _F64X2))
    builder.ret(_joined(builder, _floats(builder, sums)))


# Pieces as wide as the registers: LLVM splits wider vectors of doubles into poor code.

def _doubles(builder, vector):
    """float32 -> pairs of doubles."""
    pairs = [_shuffled(builder, vector, vector, (i, i + 1)) for i in range(0, vector.type.count, 2)]
    return [builder.fpext(pair, _F64X2) for pair in pairs]


def _floats(builder, pairs):
    """Pairs of doubles -> half as many times 4 floats."""
    halves = [builder.fptrunc(pair, _F32X2) for pair in pairs]
    return [_shuffled(builder, low, high, range(4)) for low, high in zip(halves[::2], halves[1::2])]


def _joined(builder, vectors):
    while len(vectors) > 1:
        lanes = range(2 * vectors[0].type.count)
        vectors = [_shuffled(builder, low, high, lanes) for low, high in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


def _shuffled(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    numbers = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), [ir.Constant(ir.IntType(32), i) for i in lanes])
    return builder.shuffle_vector(a, b, numbers)
