"""Kernels that add the products with a matrix's outliers (outliers.py) to the output of the matrix's kernel."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numflow.cpu.linear.activations import TOKEN_TILE
from numflow.cpu.linear.embed_kernels import row_and_address, share_of_rows
from numflow.cpu.linear.expert_routes_kernels import rows_of_matrix
from numflow.cpu.linear.slots import EMBED_OUTLIERS, EXPERT_OUTLIERS, OUTLIERS
from numflow.cpu.runtime.access import f32_from_bits, f32_ptr, f64, i32_ptr, i64, i64_ptr, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.tile import repeat, store_tile, zeros_1, zeros_2, zeros_4, zeros_8
from numflow.cpu.simd.value import Value, constant, fma_each, llvm_type, load
from numflow.cpu.simd.vector import merged
from numflow.cpu.weights.layout import ROWS as TILE
from numflow.cpu.weights.outliers import SLOT_BYTES

_widest = zeros_8 if TOKEN_TILE == 8 else zeros_4


@intrinsic
def _sums(typingctx, total, x, slots, count):
    """A tile [M tokens][16 rows] like `total`: sums over the `count` outliers of each row of outlier times x [K][M]."""
    m = total.count

    def codegen(context, builder, signature, args):
        x, slots, count = (Value(builder, a) for a in args[1:])
        zeros = [constant(x, "f32", 0.0, m)] * TILE

        def slot(i, sums):
            address = slots + i * SLOT_BYTES
            factors = [_factors(load(address + 4 * row, "i32"), x, m) for row in range(TILE)]
            return fma_each([(*both, total) for both, total in zip(factors, sums)])

        sums = repeat(count, zeros, slot)
        return context.make_tuple(builder, signature.return_type, [v.llvm for v in _transposed(sums, m)])

    return total(total, types.int64, types.int64, types.int64), codegen


def _factors(word: Value, x: Value, m: int) -> tuple[Value, Value]:
    """The outlier in one word of a slot, and its column of x, both f32 [m]."""
    column = Value(word.builder, word.builder.zext((word & 0xFFFF).llvm, x.llvm.type))
    value = (word & -65536).as_("f32", 1)
    return value if m == 1 else value.splat(m), load(x + column * (4 * m), "f32", m)


def _transposed(sums: list[Value], m: int) -> list[Value]:
    """Transpose: 16 vectors of m tokens -> m vectors of 16 rows."""
    builder = sums[0].builder
    if m == 1:
        vector = ir.Constant(llvm_type("f32", TILE), ir.Undefined)
        for row, total in enumerate(sums):
            vector = builder.insert_element(vector, total.llvm, ir.Constant(ir.IntType(32), row))
        return [Value(builder, vector)]
    while len(sums) > 1:  # zip rows that are half of all rows apart first, neighbours last
        half = len(sums) // 2
        sums = [low.zipped(high) for low, high in zip(sums[:half], sums[half:])]
    return [sums[0].part(TILE * token, TILE) for token in range(m)]


@merged
def _tile(args, tile, matrix_tile, column, first, last, operand_row, routes):
    """Add the products with the outliers of one row tile, for tokens first .. last; arguments as walk.rows_of_tile."""
    columns, stride = i64(args, OUTLIERS.columns), 4 * i64(args, OUTLIERS.y_stride)
    starts = i64_ptr(i64(args, OUTLIERS.starts))
    begin, end = starts[matrix_tile], starts[matrix_tile + 1]
    slots, count = i64(args, OUTLIERS.slots) + begin * SLOT_BYTES, end - begin
    lanes, y, one = i64(args, OUTLIERS.rows) - 16 * tile, i64(args, OUTLIERS.y) + 4 * column + 64 * tile, np.float32(1)
    for t in range(first, last, TOKEN_TILE):
        left, x = last - t, i64(args, OUTLIERS.x) + 4 * (operand_row + t - first) * columns
        out, index = (y, routes + 4 * (t - first)) if routes else (y + t * stride, 0)
        if left > 4:
            store_tile(_sums(_widest(), x, slots, count), out, stride, index, left, lanes, 0, out, stride, one)
        elif left > 2:
            store_tile(_sums(zeros_4(), x, slots, count), out, stride, index, left, lanes, 0, out, stride, one)
        elif left == 2:
            store_tile(_sums(zeros_2(), x, slots, count), out, stride, index, left, lanes, 0, out, stride, one)
        else:
            store_tile(_sums(zeros_1(), x, slots, count), out, stride, index, left, lanes, 0, out, stride, one)


@kernel
def _add_outliers(args, thread, n_threads):
    """y [T, ROWS] += S @ x; threads share the tiles as in walk.linear."""
    tokens = i64(i64(args, OUTLIERS.header), i64(args, OUTLIERS.rows_field))
    block = i64(args, OUTLIERS.token_block)
    begin, end = share((i64(args, OUTLIERS.rows) + 15) // 16, thread, n_threads)
    for first in range(0, tokens, block):
        for tile in range(begin, end):
            _tile(args, tile, tile, 0, first, min(first + block, tokens), first, 0)


@kernel
def _add_expert_outliers(args, thread, n_threads):
    """The same for every route, or for every head, as in walk.expert_linear."""
    matrices, tiles = i64(args, EXPERT_OUTLIERS.experts), (i64(args, EXPERT_OUTLIERS.rows) + 15) // 16
    groups, capacity = i64(args, EXPERT_OUTLIERS.groups), i64(args, EXPERT_OUTLIERS.capacity)
    tokens = i64(i64(args, EXPERT_OUTLIERS.header), i64(args, EXPERT_OUTLIERS.rows_field))
    begin, end = share(tiles if groups else tiles * matrices, thread, n_threads)
    for x in range(matrices):
        count, first_row, routes, head = rows_of_matrix(groups, capacity, matrices, tokens, x)
        low, high = (begin, end) if groups else (max(begin - x * tiles, 0), min(end - x * tiles, tiles))
        for tile in range(low, high if count > 0 else low):
            _tile(args, tile, x * tiles + tile, head * i64(args, EXPERT_OUTLIERS.rows), 0, count, first_row, routes)


@kernel
def _add_outliers_of_rows(args, thread, n_threads):
    """y += scale * the rows of S; threads share the rows as in embed_kernels.embed_rows."""
    starts, scale = i64_ptr(i64(args, EMBED_OUTLIERS.starts)), np.float32(f64(args, EMBED_OUTLIERS.scale))
    begin, end = share_of_rows(args, thread, n_threads)
    for item in range(begin, end):
        row, address = row_and_address(args, item)
        y, inside = f32_ptr(address), 0 <= row < i64(args, EMBED_OUTLIERS.rows)
        for slot in range(starts[row // 16] if inside else 0, starts[row // 16 + 1] if inside else 0):
            word = i32_ptr(i64(args, EMBED_OUTLIERS.slots) + slot * SLOT_BYTES)[row % 16]
            y[word & 0xFFFF] += f32_from_bits(word & np.int32(-65536)) * scale
