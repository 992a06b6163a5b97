"""Rows of a packed table for `embed` and `embed_ids`, decoded to the same weights as by float32 `linear`.

Rows that are not in the table are -0.0. Nothing outside of the table is read, and the sum over devices
that hold a part of the table each has the bits of the stored row, also of its zeros: -0.0 + v = v for all v.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic

from numflow.cpu.linear.activations import F32
from numflow.cpu.linear.kinds import code_bytes, scheme
from numflow.cpu.linear.slots import EMBED
from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import TOKENS
from numflow.cpu.simd.value import Value, save
from numflow.cpu.simd.vector import inline, merged
from numflow.cpu.weights.decode import code_values, column_group, load_floats, open_headers, scale_and_offset, weights


def embed(name):
    """Make the kernel for tables of a scheme."""
    def kernel(args, thread, n_threads):
        embed_rows(args, thread, n_threads, scheme(name, F32, False))
    return kernel


@merged
def embed_rows(args, thread, n_threads, kind):
    """Threads share the rows; `kind` as from kinds.scheme."""
    columns, factor = i64(args, EMBED.columns), np.float32(f64(args, EMBED.scale))
    begin, end = share_of_rows(args, thread, n_threads)
    for item in range(begin, end):
        row, y = row_and_address(args, item)
        if row < 0 or row >= i64(args, EMBED.rows):
            for k in range(columns):
                f32_ptr(y)[k] = np.float32(-0.0)
        else:
            codes = i64(args, EMBED.codes) + row // 16 * i64(args, EMBED.code_bytes)
            headers = i64(args, EMBED.headers) + row // 16 * i64(args, EMBED.header_bytes)
            for unit in range(0, columns >> 5, units_of_strip(kind)):
                _row_strip(codes + unit * code_bytes(32, kind), headers, columns, unit, row % 16, y + 128 * unit, kind)
            if columns & 16:
                _row_half(codes + (columns >> 5) // units_of_strip(kind) * code_bytes(32 * units_of_strip(kind), kind),
                          headers, columns >> 5, row % 16, y + 4 * (columns & -32), kind)
            for k in range(columns & -32, columns):
                _row_value(codes + k * code_bytes(1, kind), row % 16, y + 4 * k, kind)
            if factor != 1:
                for k in range(columns):
                    f32_ptr(y)[k] *= factor


@inline
def share_of_rows(args, thread, n_threads):
    """Begin and end of a thread's items: `count` rows for each token."""
    return share(i64(i64(args, EMBED.header), i64(args, EMBED.rows_field)) * i64(args, EMBED.count), thread, n_threads)


@inline
def row_and_address(args, item):
    """The row of the table that an item reads, which may be outside of it, and the address of the row in y."""
    count = i64(args, EMBED.count)
    t, n = item // count, item % count
    ids = i64(args, EMBED.ids)
    if ids == 0:
        ids = i64(i64(args, EMBED.header), TOKENS)
    row = np.int64(i32_ptr(ids)[t * i64(args, EMBED.ids_stride) + n]) - i64(args, EMBED.first)
    return row, i64(args, EMBED.y) + 4 * (t * i64(args, EMBED.y_stride) + n * i64(args, EMBED.columns))


@intrinsic
def units_of_strip(typingctx, kind):
    """Units per strip."""
    def codegen(context, builder, signature, args):
        return context.get_constant(types.int64, kind.scheme.strip)
    return types.int64(kind), codegen


@intrinsic
def _row_strip(typingctx, codes, headers, columns, unit, row, y, kind):
    """Write the weights of one row in the strip that begins with `unit` to y, as many as there are."""
    def codegen(context, builder, signature, args):
        codes, headers, columns, unit, row, y = (Value(builder, a) for a in args[:6])
        if kind.scheme.is_float:
            _decode_floats(kind.scheme, codes, row, y)
            return context.get_dummy_value()
        headers = open_headers(headers, kind.scheme)
        _decode(kind.scheme, codes, 0, headers, unit, row, y)
        if kind.scheme.strip == 2:
            with builder.if_then((unit + 1).compare("<", columns >> 5).llvm):
                _decode(kind.scheme, codes, 8, headers, unit + 1, row, y + 128)
        return context.get_dummy_value()
    i64_ = types.int64
    return types.void(i64_, i64_, i64_, i64_, i64_, i64_, kind), codegen


@intrinsic
def _row_half(typingctx, codes, headers, unit, row, y, kind):
    """Write the weights of the half unit that ends a row to y. codes: address of the codes of its strip."""
    def codegen(context, builder, signature, args):
        codes, headers, unit, row, y = (Value(builder, a) for a in args[:5])
        scheme = kind.scheme
        if scheme.ends_in_halves:
            headers = open_headers(headers, scheme)
            for part in range(scheme.strip):
                with builder.if_then((unit & scheme.strip - 1).compare("==", part).llvm):
                    _decode(scheme, codes, 8 * part, headers, unit, row, y, 1)
        return context.get_dummy_value()
    i64_ = types.int64
    return types.void(i64_, i64_, i64_, i64_, i64_, kind), codegen


def _decode(scheme, codes, first, headers, unit, row, y, halves=2):
    for half in range(halves):
        scales, offsets = (_of_row(v, row).splat(4) for v in scale_and_offset(headers, unit, half, scheme))
        for group in range(4 * half, 4 * half + 4):
            four = code_values(column_group(codes, scheme, first + group, row), scheme, Value.widen)
            save(y + 16 * group, weights(four, scales, offsets, scheme))


def _decode_floats(scheme, codes, row, y):
    for k in range(32):
        save(y + 4 * k, _of_row(load_floats(codes + scheme.unit_bytes // 32 * k, scheme.header), row))


def _of_row(vector: Value, row: Value) -> Value:
    return Value(row.builder, row.builder.extract_element(vector.llvm, row.llvm))


@intrinsic
def _row_value(typingctx, codes, row, y, kind):
    """Write one float weight of a row to y."""
    def codegen(context, builder, signature, args):
        codes, row, y = (Value(builder, a) for a in args[:3])
        if kind.scheme.is_float:
            save(y, _of_row(load_floats(codes, kind.scheme.header), row))
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64, kind), codegen
