"""`embed`: rows of a packed table, so that tied embeddings are stored once.

y[t] = table[tokens[t]] * scale, with the numbers that float32 `linear` has for the same matrix. A token outside the
table is taken as its first or last row: what is read stays inside its memory.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic

from numflow.cpu.decode import column_group, numbers, scale_and_base
from numflow.cpu.kernel import TOKENS, Call, f32_ptr, f64, i32_ptr, i64, kernel, share
from numflow.cpu.linear_tile import code_bytes, scheme
from numflow.cpu.simd import merged
from numflow.cpu.simd_value import Value, fma, save
from numflow.ops import Step, param

# Arguments after header and rows field: the table, its rows and columns, its bytes per tile, y, and the scale.
CODES, HEADS, ROWS, COLUMNS, CODE_BYTES, HEAD_BYTES, Y, STRIDE, SCALE = range(2, 11)


def embed(step: Step, ctx) -> list[Call]:
    """table packed [V, D] -> y f32 [T, D]."""
    y, table = step.outputs[0], ctx.packed(step.weights["table"])
    return [Call.of(step, KERNELS[table.kind], ctx.header, ctx.rows(y), table.codes, table.headers, *table.shape,
                    *table.scheme.tile_bytes(y.width), *ctx.view(y), float(param(step, "scale")))]


@merged
def _embed(args, thread, n_threads, kind):
    """Items: tokens."""
    header = i64(args, 0)
    tokens, columns = i32_ptr(i64(header, TOKENS)), i64(args, COLUMNS)
    factor = np.float32(f64(args, SCALE))
    begin, end = share(i64(header, i64(args, 1)), thread, n_threads)
    for t in range(begin, end):
        row = min(max(np.int64(tokens[t]), 0), i64(args, ROWS) - 1)
        codes = i64(args, CODES) + row // 16 * i64(args, CODE_BYTES)
        heads = i64(args, HEADS) + row // 16 * i64(args, HEAD_BYTES)
        y = i64(args, Y) + 4 * t * i64(args, STRIDE)
        for unit in range(columns >> 5):
            _row_unit(codes + unit * code_bytes(32, kind), heads, unit, row % 16, y + 128 * unit, kind)
        for k in range(columns & -32, columns):
            _row_number(codes + k * code_bytes(1, kind), row % 16, y + 4 * k, kind)
        if factor != 1:
            for k in range(columns):
                f32_ptr(y)[k] *= factor


@intrinsic
def _row_unit(typingctx, codes, heads, unit, row, y, kind):
    """The 32 weights of one row in a unit, to y."""
    def codegen(context, builder, signature, args):
        emit = _floats if kind.scheme.is_float else _decoded
        emit(kind.scheme, *(Value(builder, a) for a in args[:5]))
        return context.get_dummy_value()
    i64_ = types.int64
    return types.void(i64_, i64_, i64_, i64_, i64_, kind), codegen


def _decoded(kind, codes, heads, unit, row, y):
    for half in range(2):
        scales, bases = (_of_row(v, row).splat(4) for v in scale_and_base(heads, unit, half, kind))
        for group in range(4 * half, 4 * half + 4):
            four = column_group(codes + (row << 2), kind, group, lanes=4).widen()
            save(y + 16 * group, fma(four.to_f32(), scales, bases))


def _floats(kind, codes, heads, unit, row, y):
    for k in range(32):
        save(y + 4 * k, _of_row(numbers(codes + 2 * kind.bits * k, kind.header), row))


def _of_row(vector: Value, row: Value) -> Value:
    return Value(row.builder, row.builder.extract_element(vector.llvm, row.llvm))


@intrinsic
def _row_number(typingctx, codes, row, y, kind):
    """One plain number of a row, to y."""
    def codegen(context, builder, signature, args):
        codes, row, y = (Value(builder, a) for a in args[:3])
        if kind.scheme.is_float:
            save(y, _of_row(numbers(codes, kind.scheme.header), row))
        return context.get_dummy_value()
    return types.void(types.int64, types.int64, types.int64, kind), codegen


@kernel
def _embed_b4_scale(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b4_scale", False))


@kernel
def _embed_b5_scale(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b5_scale", False))


@kernel
def _embed_b8_scale(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b8_scale", False))


@kernel
def _embed_b4_base(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b4_base", False))


@kernel
def _embed_b5_base(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b5_base", False))


@kernel
def _embed_b4_super(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b4_super", False))


@kernel
def _embed_b5_super(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b5_super", False))


@kernel
def _embed_b2_super16(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b2_super16", False))


@kernel
def _embed_b3_signed16(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b3_signed16", False))


@kernel
def _embed_b6_signed16(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("b6_signed16", False))


@kernel
def _embed_iq4_scale(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("iq4_scale", False))


@kernel
def _embed_iq4_signed(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("iq4_signed", False))


@kernel
def _embed_e2m1_power(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("e2m1_power", False))


@kernel
def _embed_e2m1_scale16(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("e2m1_scale16", False))


@kernel
def _embed_f32(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("f32", False))


@kernel
def _embed_f16(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("f16", False))


@kernel
def _embed_bf16(args, thread, n_threads):
    _embed(args, thread, n_threads, scheme("bf16", False))


# The kernel by scheme of the table.
KERNELS = {
    "b4_scale": _embed_b4_scale,
    "b5_scale": _embed_b5_scale,
    "b8_scale": _embed_b8_scale,
    "b4_base": _embed_b4_base,
    "b5_base": _embed_b5_base,
    "b4_super": _embed_b4_super,
    "b5_super": _embed_b5_super,
    "b2_super16": _embed_b2_super16,
    "b3_signed16": _embed_b3_signed16,
    "b6_signed16": _embed_b6_signed16,
    "iq4_scale": _embed_iq4_scale,
    "iq4_signed": _embed_iq4_signed,
    "e2m1_power": _embed_e2m1_power,
    "e2m1_scale16": _embed_e2m1_scale16,
    "f32": _embed_f32,
    "f16": _embed_f16,
    "bf16": _embed_bf16,
}
