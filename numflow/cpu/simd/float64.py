"""Sums of f32x16 in double precision: 16 accumulators of float64, reduced at the end."""

from llvmlite import ir
from numba import types

from numflow.cpu.simd.vector import Vec, op

f64x16 = Vec("f64", 16)
_I32 = ir.IntType(32)


@op(f64x16)
def zero_f64(builder):
    """Zeros."""
    return ir.Constant(f64x16.llvm, None)


@op(f64x16, f64x16, Vec("f32", 16))
def add_wide(builder, sums, a):
    """sums + a."""
    return builder.fadd(sums, builder.fpext(a, f64x16.llvm))


@op(types.float64, f64x16)
def sum_wide(builder, sums):
    """The sum of all lanes, in the order of a balanced tree."""
    for width in (8, 4, 2, 1):
        lanes = [ir.Constant(_I32, (lane + width) % 16) for lane in range(16)]
        other = builder.shuffle_vector(sums, sums, ir.Constant(ir.VectorType(_I32, 16), lanes))
        sums = builder.fadd(sums, other)
    return builder.extract_element(sums, _I32(0))
