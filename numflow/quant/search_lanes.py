"""The inner loop of the search: sums of errors for 16 tries at once, in vector registers.

LLVM's own vectors of such a loop keep the sums in memory, and leave what is no multiple of 32 or 64 to scalar code. A
lane is a try and adds its weights in order, so every sum has the bits that NumPy's has.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.kernel_cache import has_floor

LANES = 16
_F32, _I32 = ir.FloatType(), ir.IntType(32)
_VECTOR, _BITS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


@intrinsic
def add_errors(typingctx, w, c, first, size, inverses, zeros, at, top, errors):
    """errors[at:at + 16] = sum of c * (code - weight in codes)^2 over the weights first:first + size, for the tries
    at:at + 16, each a scale (its inverse) and a zero.

    All arrays are contiguous float32; there are 16 elements from `at` on.
    """
    def codegen(context, builder, signature, args):
        def element(number, index):
            data = context.make_array(signature.args[number])(context, builder, args[number]).data
            return builder.gep(data, [index])

        def tries(number):
            return builder.bitcast(element(number, args[6]), _VECTOR.as_pointer())

        def load(number):
            vector = builder.load(tries(number))
            vector.align = 4
            return vector

        inverse, zero, top = load(4), load(5), _splat(builder, args[7])
        sums = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * LANES))
        weights, importances = element(0, args[2]), element(1, args[2])
        with cgutils.for_range(builder, args[3]) as loop:
            weight, importance = (_splat(builder, builder.load(builder.gep(pointer, [loop.index])))
                                  for pointer in (weights, importances))
            value = builder.fadd(builder.fmul(weight, inverse), zero)
            distance = builder.fsub(_nearest(builder, value, top), value)
            error = builder.fmul(importance, builder.fmul(distance, distance))
            builder.store(builder.fadd(builder.load(sums), error), sums)
        builder.store(builder.load(sums), tries(8)).align = 4
        return context.get_dummy_value()

    f32s, i64 = types.Array(types.float32, 1, "C"), types.int64
    return types.void(f32s, f32s, i64, i64, f32s, f32s, i64, types.float32, f32s), codegen


@intrinsic
def least_of(typingctx, errors, at, count):
    """The least of errors[at:at + count], contiguous float32, for a count of 8 or 16; NaN counts as infinite."""
    def codegen(context, builder, signature, args):
        array, at, count = args
        data = context.make_array(signature.args[0])(context, builder, array).data

        def eight(first):
            vector = builder.load(builder.bitcast(builder.gep(data, [first]), ir.VectorType(_F32, 8).as_pointer()))
            vector.align = 4
            return _less(builder, vector, ir.Constant(vector.type, [float("inf")] * 8))

        least = cgutils.alloca_once_value(builder, eight(at))
        with builder.if_then(builder.icmp_signed(">", count, ir.Constant(count.type, 8))):
            more = eight(builder.add(at, ir.Constant(at.type, 8)))
            builder.store(_less(builder, builder.load(least), more), least)
        found = builder.load(least)
        for half in (4, 2, 1):
            low, high = (builder.shuffle_vector(found, found, ir.Constant(ir.VectorType(_I32, half), [
                ir.Constant(_I32, first + i) for i in range(half)])) for first in (0, half))
            found = _less(builder, low, high)
        return builder.extract_element(found, ir.Constant(_I32, 0))

    return types.float32(types.Array(types.float32, 1, "C"), types.int64, types.int64), codegen


def _less(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _nearest(builder, value, top):
    """As `search_kernels.nearest`."""
    above = builder.fadd(value, _constant(0.5))
    if has_floor():
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
        return _clipped_bits(builder, builder.call(floor, [above]), top)
    whole = builder.fptosi(_clipped(builder, above, top), _BITS)
    return builder.sitofp(whole, _VECTOR)


def _clipped(builder, value, top):
    """`value`, but at least 0 and at most `top`."""
    return _less(builder, builder.select(builder.fcmp_ordered(">", value, _constant(0.0)), value, _constant(0.0)), top)


def _clipped_bits(builder, value, top):
    """The same by comparing bits, whose order is that of numbers from 0 on: units for additions have enough to do."""
    bits, most = builder.bitcast(value, _BITS), builder.bitcast(top, _BITS)
    zero = ir.Constant(_BITS, [0] * LANES)
    bits = builder.select(builder.icmp_signed(">", bits, zero), bits, zero)
    return builder.bitcast(builder.select(builder.icmp_signed("<", bits, most), bits, most), _VECTOR)


def _constant(value):
    return ir.Constant(_VECTOR, [value] * LANES)


def _splat(builder, scalar):
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined),
                                  ir.Constant(ir.VectorType(_I32, LANES), None))
