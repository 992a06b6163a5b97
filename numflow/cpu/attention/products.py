"""Accumulated outer products, the inner loops of attention: queries times keys, and probabilities times values."""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.attention.slots import WIDTHS
from numflow.cpu.simd.bfloat16 import FACTOR_BYTES, pair_multiplier, store_factors, store_probabilities
from numflow.cpu.simd.float32 import load_part
from numflow.cpu.simd.value import Value, fma, load
from numflow.cpu.simd.vector import call, inline, load_at, store_f32, widen_f16_ir

_I32, _F32X16 = ir.IntType(32), ir.VectorType(ir.FloatType(), 16)
_U16X16, _I32X16 = ir.VectorType(ir.IntType(16), 16), ir.VectorType(ir.IntType(32), 16)
PAIRS = 2  # value of `half` for pairs of bfloat16: None, True and an integer have different Numba types
# Shapes of the accumulators, (rows, vectors of columns).
_WIDE = tuple(WIDTHS.items())
_NARROW = tuple((rows, 1) for rows, columns in _WIDE if columns > 1)


def _products(shapes: tuple, begin: Callable[[ir.IRBuilder, ir.Value, ir.Value, int], ir.Value]) -> Any:
    @intrinsic
    def outer_products(typingctx, rows, columns, half, n, total, total_row, x, x_row, v, v_column, v_step, ahead,
                       factors):
        """total[r][c] = begin + sum over i < n, in this order, of x[r][i] * v[i][c], for r < rows and c < columns.

        begin: initial value, from the address of total[r][c], `factors` and r, by one of the functions below.
        total[r][c]: 16 float32 at total + r * total_row + 64 * c.
        x[r][i]: a float32 at x + r * x_row + 4 * i; the two factors of a pair if `half` is PAIRS.
        v[i][c]: 16 elements at v + c * v_column + i * v_step: float32 if `half` is None, float16 if True, pairs of
        bfloat16 if PAIRS.
        n is at least 1. As many bytes as are read from v are prefetched from `ahead` on, which need not be mapped.
        """
        element = _F32X16 if isinstance(half, types.NoneType) else _I32X16 if _per_step(half) == 2 else _U16X16

        def codegen(context, builder, signature, args):
            rows, columns, _, *rest = args
            for shape in shapes:
                matches = builder.and_(*(builder.icmp_signed("==", value, value.type(expected))
                                         for value, expected in zip((rows, columns), shape, strict=True)))
                with builder.if_then(matches):
                    _loop(builder, shape, element, begin, *rest)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(i64, i64, half, *[i64] * 10), codegen
    return outer_products


@intrinsic
def columns_per_step(typingctx, half):
    """Columns of keys (or keys, for values) that an iteration of the loops handles."""
    return types.int64(half), lambda context, builder, signature, args: ir.IntType(64)(_per_step(half))


@intrinsic
def step_bytes(typingctx, half):
    """Bytes per lane that an iteration loads from v."""
    wide = isinstance(half, types.NoneType) or _per_step(half) == 2
    return types.int64(half), lambda context, builder, signature, args: ir.IntType(64)(4 if wide else 2)


def _per_step(half: types.Type) -> int:
    return 2 if isinstance(half, types.Integer) else 1


@inline
def make_factors(half, row, count):
    """Convert `count` float32 at `row` in place to the factors x that the loops take."""
    if columns_per_step(half) == 2:
        for i in range(0, count, 16):
            store_factors(row + FACTOR_BYTES * i, load_part(row + 4 * i, count - i), count - i)


@inline
def store_probabilities_as(half, row, i, probabilities):
    """Store probabilities i .. i + 15 as factors x of the row at `row`; they overwrite scores at or before i."""
    if columns_per_step(half) == 2:
        store_probabilities(row + FACTOR_BYTES * i, probabilities)
    else:
        store_f32(row + 4 * i, probabilities)


def _zero(builder, address, factors, r):
    return ir.Constant(_F32X16, None)


def _stored(builder, address, factors, r):
    return load_at(builder, address, _F32X16)


def _scaled(builder, address, factors, r):
    """total[r][c] times the float32 factors[r]."""
    factor = load(Value(builder, factors) + 4 * r, "f32").splat(16)
    return builder.fmul(load_at(builder, address, _F32X16), factor.llvm)


wide_products = _products(_WIDE, _zero)  # `columns` is WIDTHS[rows]
scaled_products = _products(_WIDE + _NARROW, _scaled)  # `columns` is WIDTHS[rows] or 1
_add_products = _products(_WIDE + _NARROW, _stored)


@inline
def add_products(rows, columns, n, total, total_row, x, x_row, v, v_column, v_step, ahead):
    """total[r][c] += the products, all float32."""
    _add_products(rows, columns, None, n, total, total_row, x, x_row, v, v_column, v_step, ahead, 0)


def _loop(builder, shape, element, begin, n, total, total_row, x, x_row, v, v_column, v_step, ahead, factors):
    rows, columns = shape
    totals = [builder.add(total, builder.add(builder.mul(total_row, total.type(r)), total.type(64 * c)))
              for r in range(rows) for c in range(columns)]
    sums = [cgutils.alloca_once_value(builder, begin(builder, address, factors, index // columns))
            for index, address in enumerate(totals)]
    before, body, after = builder.block, builder.append_basic_block("outer"), builder.append_basic_block("outer.end")
    builder.branch(body)
    builder.position_at_end(body)
    i = builder.phi(n.type)
    v_row = builder.add(v, builder.mul(i, v_step))
    vectors = [Value(builder, _vector(builder, builder.add(v_row, builder.mul(v_column, v_row.type(c))), element))
               for c in range(columns)]
    _prefetch(builder, ahead, i, columns * (0.5 if element == _U16X16 else 1))
    add = pair_multiplier(vectors) if element == _I32X16 else _scalar_multiplier(vectors)
    factor = Value(builder, builder.add(x, builder.mul(i, x.type(2 * FACTOR_BYTES if element == _I32X16 else 4))))
    for r in range(rows):
        row_sums = sums[r * columns:(r + 1) * columns]
        added = add(factor + Value(builder, x_row) * r, [Value(builder, builder.load(slot)) for slot in row_sums])
        for value, slot in zip(added, row_sums, strict=True):
            builder.store(value.llvm, slot)
    following = builder.add(i, i.type(1))
    i.add_incoming(i.type(0), before)
    i.add_incoming(following, body)
    _keep_rolled(builder, builder.cbranch(builder.icmp_signed("<", following, n), body, after))
    builder.position_at_end(after)
    for address, slot in zip(totals, sums, strict=True):
        builder.store(builder.load(slot), builder.inttoptr(address, _F32X16.as_pointer())).align = 4


def _scalar_multiplier(vectors: list[Value]) -> Callable[[Value, list[Value]], list[Value]]:
    """f(address, sums): sums + the vectors times the float32 at the address."""
    def add(address, sums):
        factor = load(address, "f32").splat(16)
        return [fma(factor, vector, total) for vector, total in zip(vectors, sums, strict=True)]
    return add


def _prefetch(builder, ahead, i, lines):
    """Prefetch the cache lines from line i * lines behind `ahead` on; `lines` is 0.5 for half a line per iteration."""
    address = builder.add(ahead, builder.mul(i, ahead.type(int(64 * lines))))
    for line in range(math.ceil(lines)):
        pointer = builder.inttoptr(builder.add(address, address.type(64 * line)), ir.IntType(8).as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _I32(0), _I32(2), _I32(1))


def _vector(builder, address, element):
    value = load_at(builder, address, element)
    return widen_f16_ir(builder, value) if element == _U16X16 else value


def _keep_rolled(builder, branch):
    """Disable unrolling of the loop: it gains nothing and costs seconds of compilation.

    LLVM requires the metadata node to refer to itself.
    """
    module = builder.module
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = ir.MDValue(module, (disable,), name=str(len(module.metadata)))
    node.operands = (node, disable)
    branch.set_metadata("llvm.loop", node)
