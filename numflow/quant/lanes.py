"""Inner loops with explicit SIMD vectors: 16 candidates of the search at once, 16 rows of error feedback.

LLVM's automatic vectorisation of these loops keeps sums in memory, checks arrays for overlap, and runs remainders of 32
or 64 in scalar code. Each lane does the same operations in the same order as NumPy, so the bits are the same.
"""

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.kernel_cache import has_floor

LANES = 16
_F32, _I32 = ir.FloatType(), ir.IntType(32)
_F32S, _I64 = types.Array(types.float32, 1, "C"), types.int64
_VECTOR, _BITS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


@intrinsic
def add_errors(typingctx, w, c, first, size, inverses, zeros, at, top, errors):
    """errors[at:at + 16] = sum of c * (code - scaled weight)^2 over the weights first:first + size, for the candidates
    at:at + 16, each an inverse scale and a zero point.

    All arrays are contiguous float32 and have 16 elements from `at` on.
    """
    def codegen(context, builder, signature, args):
        w, c, first, size, inverses, zeros, at, top, errors = args
        data = partial(_element, context, builder, signature.args)
        inverse, zero = (_load(builder, data(4 + i, array, at), LANES) for i, array in enumerate((inverses, zeros)))
        weights, importances, top = data(0, w, first), data(1, c, first), _splat(builder, top)
        sums = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * LANES))
        with cgutils.for_range(builder, size) as loop:
            weight, importance = (_splat(builder, builder.load(builder.gep(pointer, [loop.index])))
                                  for pointer in (weights, importances))
            value = builder.fadd(builder.fmul(weight, inverse), zero)
            distance = builder.fsub(_nearest(builder, value, top), value)
            error = builder.fmul(importance, builder.fmul(distance, distance))
            builder.store(builder.fadd(builder.load(sums), error), sums)
        _store(builder, builder.load(sums), data(8, errors, at))
        return context.get_dummy_value()

    return types.void(_F32S, _F32S, _I64, _I64, _F32S, _F32S, _I64, types.float32, _F32S), codegen


@intrinsic
def least_of(typingctx, errors, at, count):
    """Minimum of errors[at:at + count], contiguous float32, for a count of 8 or 16. NaN counts as infinity."""
    def codegen(context, builder, signature, args):
        errors, at, count = args

        def eight(first):
            vector = _load(builder, _element(context, builder, signature.args, 0, errors, first), 8)
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

    return types.float32(_F32S, _I64, _I64), codegen


@intrinsic(prefer_literal=True)
def subtract_multiples(typingctx, values, begin, end, errors, at, count, factors, first, stride):
    """values[k] -= errors[at + i] * factors[first + i * stride + k] for k in begin:end and i in 0:count, in order of i.

    An element of values and errors is 16 lanes. count is a compile-time constant. Arrays are contiguous float32, 1-d.
    """
    def codegen(context, builder, signature, args):
        values, begin, end, errors, at, _, factors, first, stride = args
        data, sixteen = partial(_element, context, builder, signature.args), ir.Constant(at.type, LANES)
        each = [ir.Constant(at.type, i) for i in range(count.literal_value)]
        loaded = [_load(builder, data(3, errors, builder.mul(builder.add(at, i), sixteen)), LANES) for i in each]
        rows = [data(6, factors, builder.add(first, builder.mul(i, stride))) for i in each]
        with cgutils.for_range_slice(builder, begin, end, ir.Constant(begin.type, 1), begin.type) as (k, _):
            address = data(0, values, builder.mul(k, sixteen))
            value = _load(builder, address, LANES)
            for error, row in zip(loaded, rows):
                factor = _splat(builder, builder.load(builder.gep(row, [k])))
                value = builder.fsub(value, builder.fmul(error, factor))
            _store(builder, value, address)
        return context.get_dummy_value()

    return types.void(_F32S, _I64, _I64, _F32S, _I64, count, _F32S, _I64, _I64), codegen


def _element(context, builder, kinds, argument, array, index):
    """Address of an element of an array argument, given its position in the signature."""
    return builder.gep(context.make_array(kinds[argument])(context, builder, array).data, [index])


def _load(builder, pointer, lanes):
    vector = builder.load(builder.bitcast(pointer, ir.VectorType(_F32, lanes).as_pointer()))
    vector.align = 4
    return vector


def _store(builder, vector, pointer):
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer())).align = 4


def _less(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _nearest(builder, value, top):
    """The code nearest to `value` (search_kernels.nearest)."""
    shifted = builder.fadd(value, _constant(0.5))
    if has_floor():
        kind = ir.FunctionType(_VECTOR, [_VECTOR])
        floor = cgutils.get_or_insert_function(builder.module, kind, f"llvm.floor.v{LANES}f32")
        return _clipped_bits(builder, builder.call(floor, [shifted]), top)
    whole = builder.fptosi(_clipped(builder, shifted, top), _BITS)
    return builder.sitofp(whole, _VECTOR)


def _clipped(builder, value, top):
    """`value` clamped to [0, top]."""
    return _less(builder, builder.select(builder.fcmp_ordered(">", value, _constant(0.0)), value, _constant(0.0)), top)


def _clipped_bits(builder, value, top):
    """`value` clamped to [0, top] by integer comparisons of the bits, because the floating-point units are the
    bottleneck."""
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
