"""Sums of outer products, the inner loops of attention: queries times keys, and probabilities times values."""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.attention.slots import WIDTHS
from numflow.cpu.simd.bfloat16 import FACTOR_BYTES, put_factors, put_shares, times_factors
from numflow.cpu.simd.float32 import load_part
from numflow.cpu.simd.value import Value, fma, load
from numflow.cpu.simd.vector import call, inline, load_at, store_f32, widen_f16_ir

_I32, _F32X16 = ir.IntType(32), ir.VectorType(ir.FloatType(), 16)
_U16X16, _I32X16 = ir.VectorType(ir.IntType(16), 16), ir.VectorType(ir.IntType(32), 16)
PAIRS = 2  # in the place of True for float16: None, True and a number are told apart by their types
# Shapes of the sums, (rows, vectors of columns).
_WIDE = tuple(WIDTHS.items())
_NARROW = tuple((rows, 1) for rows, columns in _WIDE if columns > 1)


def _products(shapes: tuple) -> Any:
    @intrinsic
    def add_outer_products(typingctx, rows, columns, half, n, total, total_row, x, x_row, v, v_column, v_step, ahead):
        """total[r][c] += sum over i < n, in this order, of x[r][i] * v[i][c], for r < rows and c < columns.

        total[r][c] is 16 float32 at total + r * total_row + 64 * c, x[r][i] a float32 at x + r * x_row + 4 * i,
        v[i][c] 16 elements at v + c * v_column + i * v_step: float32 if `half` is None, float16 if it is True. n is at
        least 1. If `half` is PAIRS, v[i][c] is 16 pairs of bfloat16 and x[r][i] the two factors of a pair.
        As many bytes as are read from v are fetched into the cache from `ahead` on, which need not exist.
        """
        element = _F32X16 if isinstance(half, types.NoneType) else _I32X16 if _together(half) == 2 else _U16X16

        def codegen(context, builder, signature, args):
            rows, columns, _, *rest = args
            for shape in shapes:
                right = builder.and_(*(builder.icmp_signed("==", value, value.type(number))
                                       for value, number in zip((rows, columns), shape, strict=True)))
                with builder.if_then(right):
                    _loop(builder, shape, element, *rest)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(i64, i64, half, *[i64] * 9), codegen
    return add_outer_products


@intrinsic
def columns_together(typingctx, half):
    """Numbers of a sum that the loops take at a time."""
    return types.int64(half), lambda context, builder, signature, args: ir.IntType(64)(_together(half))


@intrinsic
def step_bytes(typingctx, half):
    """Bytes of what a lane takes of v at a time."""
    wide = isinstance(half, types.NoneType) or _together(half) == 2
    return types.int64(half), lambda context, builder, signature, args: ir.IntType(64)(4 if wide else 2)


def _together(half: types.Type) -> int:
    return 2 if isinstance(half, types.Integer) else 1


@inline
def make_factors(half, row, count):
    """Make `count` float32 at `row` what the loops take of x, in their place."""
    if columns_together(half) == 2:
        for i in range(0, count, 16):
            put_factors(row + FACTOR_BYTES * i, load_part(row + 4 * i, count - i), count - i)


@inline
def put_shares_of(half, row, i, shares):
    """Numbers i .. i + 15 of a row of x at `row`, 0 .. 1, over what was at their places or before."""
    if columns_together(half) == 2:
        put_shares(row + FACTOR_BYTES * i, shares)
    else:
        store_f32(row + 4 * i, shares)


add_wide_products = _products(_WIDE)  # `columns` is WIDTHS[rows]
add_any_products = _products(_WIDE + _NARROW)  # or 1


def _loop(builder, shape, element, n, total, total_row, x, x_row, v, v_column, v_step, ahead):
    rows, columns = shape
    totals = [builder.add(total, builder.add(builder.mul(total_row, total.type(r)), total.type(64 * c)))
              for r in range(rows) for c in range(columns)]
    sums = [cgutils.alloca_once_value(builder, load_at(builder, address, _F32X16)) for address in totals]
    before, body, after = builder.block, builder.append_basic_block("outer"), builder.append_basic_block("outer.end")
    builder.branch(body)
    builder.position_at_end(body)
    i = builder.phi(n.type)
    at = builder.add(v, builder.mul(i, v_step))
    vectors = [Value(builder, _vector(builder, builder.add(at, builder.mul(v_column, at.type(c))), element))
               for c in range(columns)]
    _prefetch(builder, ahead, i, columns * (0.5 if element == _U16X16 else 1))
    add = times_factors(vectors) if element == _I32X16 else _times_number(vectors)
    at = Value(builder, builder.add(x, builder.mul(i, x.type(2 * FACTOR_BYTES if element == _I32X16 else 4))))
    for r in range(rows):
        places = sums[r * columns:(r + 1) * columns]
        added = add(at + Value(builder, x_row) * r, [Value(builder, builder.load(place)) for place in places])
        for value, place in zip(added, places, strict=True):
            builder.store(value.llvm, place)
    following = builder.add(i, i.type(1))
    i.add_incoming(i.type(0), before)
    i.add_incoming(following, body)
    _keep_rolled(builder, builder.cbranch(builder.icmp_signed("<", following, n), body, after))
    builder.position_at_end(after)
    for address, place in zip(totals, sums, strict=True):
        builder.store(builder.load(place), builder.inttoptr(address, _F32X16.as_pointer())).align = 4


def _times_number(vectors: list[Value]) -> Callable[[Value, list[Value]], list[Value]]:
    """f(address, sums): sums + the vectors times the float32 at an address."""
    def add(address, sums):
        factor = load(address, "f32").splat(16)
        return [fma(factor, vector, total) for vector, total in zip(vectors, sums, strict=True)]
    return add


def _prefetch(builder, ahead, i, lines):
    """Line i * lines of what begins at `ahead`, and the next ones; every other time where `lines` is a half."""
    at = builder.add(ahead, builder.mul(i, ahead.type(int(64 * lines))))
    for line in range(math.ceil(lines)):
        pointer = builder.inttoptr(builder.add(at, at.type(64 * line)), ir.IntType(8).as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _I32(0), _I32(2), _I32(1))


def _vector(builder, address, element):
    value = load_at(builder, address, element)
    return widen_f16_ir(builder, value) if element == _U16X16 else value


def _keep_rolled(builder, branch):
    """Unrolling this loop gains nothing and costs seconds of compilation. The node must refer to itself."""
    module = builder.module
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = ir.MDValue(module, (disable,), name=str(len(module.metadata)))
    node.operands = (node, disable)
    branch.set_metadata("llvm.loop", node)
