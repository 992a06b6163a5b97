"""Sums of outer products, the inner loops of attention: queries times keys, and probabilities times values."""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from numflow.cpu.attention.slots import WIDTHS
from numflow.cpu.simd.fma import fma_ir
from numflow.cpu.simd.vector import call, load_at, splat, widen_f16_ir

_I32, _F32, _F32X16 = ir.IntType(32), ir.FloatType(), ir.VectorType(ir.FloatType(), 16)
_U16X16 = ir.VectorType(ir.IntType(16), 16)
# Shapes of the sums, (rows, vectors of columns).
_WIDE = tuple(WIDTHS.items())
_NARROW = tuple((rows, 1) for rows, columns in _WIDE if columns > 1)


def _products(shapes: tuple) -> Any:
    @intrinsic
    def add_outer_products(typingctx, rows, columns, half, n, total, total_row, x, x_row, v, v_column, v_step, ahead):
        """total[r][c] += sum over i < n, in this order, of x[r][i] * v[i][c], for r < rows and c < columns.

        total[r][c] is 16 float32 at total + r * total_row + 64 * c, x[r][i] a float32 at x + r * x_row + 4 * i,
        v[i][c] 16 elements at v + c * v_column + i * v_step: float32 if `half` is None, else float16. n is at least 1.
        As many bytes as are read from v are fetched into the cache from `ahead` on, which need not exist.
        """
        element = _F32X16 if isinstance(half, types.NoneType) else _U16X16

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
    vectors = [_vector(builder, builder.add(at, builder.mul(v_column, at.type(c))), element) for c in range(columns)]
    _prefetch(builder, ahead, i, columns * (1 if element == _F32X16 else 0.5))
    at = builder.add(x, builder.mul(i, x.type(4)))
    for r in range(rows):
        factor = splat(builder, load_at(builder, builder.add(at, builder.mul(x_row, at.type(r))), _F32), 16)
        for c, vector in enumerate(vectors):
            place = sums[r * columns + c]
            builder.store(fma_ir(builder, factor, vector, builder.load(place)), place)
    following = builder.add(i, i.type(1))
    i.add_incoming(i.type(0), before)
    i.add_incoming(following, body)
    _keep_rolled(builder, builder.cbranch(builder.icmp_signed("<", following, n), body, after))
    builder.position_at_end(after)
    for address, place in zip(totals, sums, strict=True):
        builder.store(builder.load(place), builder.inttoptr(address, _F32X16.as_pointer())).align = 4


def _prefetch(builder, ahead, i, lines):
    """Line i * lines of what begins at `ahead`, and the next ones; every other time where `lines` is a half."""
    at = builder.add(ahead, builder.mul(i, ahead.type(int(64 * lines))))
    for line in range(math.ceil(lines)):
        pointer = builder.inttoptr(builder.add(at, at.type(64 * line)), ir.IntType(8).as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _I32(0), _I32(2), _I32(1))


def _vector(builder, address, element):
    value = load_at(builder, address, element)
    return value if element == _F32X16 else widen_f16_ir(builder, value)


def _keep_rolled(builder, branch):
    """Unrolling this loop gains nothing and costs seconds of compilation. The node must refer to itself."""
    module = builder.module
    disable = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    node = ir.MDValue(module, (disable,), name=str(len(module.metadata)))
    node.operands = (node, disable)
    branch.set_metadata("llvm.loop", node)
