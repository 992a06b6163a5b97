"""What one register tile computes: 16 rows of a packed matrix times M tokens, over all K columns.

int8    a unit's codes meet a token's int8 in exact integers; the unit's sum is scaled and added to the row's total.
f32     weights are decoded to float32 and multiplied with float32 activations, summed by unit, then added to the total.

Units are added in order, and that order is all there is to a result: it is the same bits for any number of tokens and
threads. What M tokens need lies interleaved in memory (activations.py): x is their operand, aux the scales and sums
that go with int8. The scheme is a type, so a kernel contains the code of one scheme only.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from numflow.cpu.decode import base, column_group, has_base, numbers, scale, weights
from numflow.cpu.layout import SCALE, SCHEMES, SIGNED, SUPER16, UNIT
from numflow.cpu.simd import inline
from numflow.cpu.simd_dot import dot4
from numflow.cpu.simd_tile import add_products, each_f32, each_i32, each_word, unpack
from numflow.cpu.simd_value import Value, constant, fma


class SchemeType(types.Type):
    """A scheme of layout.py, and whether activations are int8, as the type of a value without content."""

    def __init__(self, name: str, int8: bool):
        self.scheme, self.int8 = SCHEMES[name], int8
        super().__init__(name=f"Scheme({name}, int8={int8})")


register_model(SchemeType)(models.OpaqueModel)


@intrinsic(prefer_literal=True)
def scheme(typingctx, name, int8):
    """The scheme of that name, for the functions below; both arguments are constants."""
    def codegen(context, builder, signature, args):
        return context.get_dummy_value()
    return SchemeType(name.literal_value, bool(int8.literal_value))(name, int8), codegen


@inline
def row_tile(total, x, aux, codes, heads, columns, kind):
    """`total` (a tile of zeros for M tokens) + 16 rows times M tokens."""
    m = len(total)
    for unit in range(columns >> 5):
        total = _unit(total, x + unit * x_bytes(32 * m, kind), aux + unit * 16 * m, codes + unit * code_bytes(32, kind),
                      heads, unit, kind)
    for k in range(columns & -32, columns):
        total = _column(total, x + k * 4 * m, codes + k * code_bytes(1, kind), kind)
    return total


def _sized(size: Callable[[SchemeType], int]):
    """A function (count, kind) -> count * size(kind) of compiled code."""
    @intrinsic
    def sized(typingctx, count, kind):
        def codegen(context, builder, signature, args):
            return builder.mul(args[0], ir.Constant(args[0].type, size(kind)))
        return types.int64(types.int64, kind), codegen
    return sized


x_bytes = _sized(lambda kind: 1 if kind.int8 else 4)           # bytes of `count` elements of x
code_bytes = _sized(lambda kind: 2 * kind.scheme.bits)         # bytes of the codes of `count` columns of a tile


def _on_tile(emit: Callable) -> Callable:
    """An intrinsic (tile, int64 ..., kind) -> tile from emit(kind, vectors, *Values) -> vectors."""
    def typing(typingctx, total, *args):
        def codegen(context, builder, signature, values):
            vectors = emit(args[-1], unpack(builder, values[0]), *(Value(builder, v) for v in values[1:-1]))
            return context.make_tuple(builder, signature.return_type, [v.llvm for v in vectors])
        return total(total, *[types.int64] * (len(args) - 1), args[-1]), codegen
    return typing


@intrinsic
def _unit(typingctx, total, x, aux, codes, heads, unit, kind):
    """total + the products of 32 columns."""
    emit = _unit_floats if kind.scheme.is_float else _unit_int8 if kind.int8 else _unit_f32
    return _on_tile(emit)(typingctx, total, x, aux, codes, heads, unit, kind)


@intrinsic
def _column(typingctx, total, x, codes, kind):
    """total + the products of one column; only matrices of plain numbers have columns left over."""
    def emit(kind, total, x, codes):
        if not kind.scheme.is_float:
            return total
        return add_products(total, numbers(codes, kind.scheme.header), x)
    return _on_tile(emit)(typingctx, total, x, codes, kind)


def _zeros(total: list[Value], kind: str) -> list[Value]:
    return [constant(t, kind, 0) for t in total]


# int8 activations.

def _unit_int8(kind, total, x, aux, codes, heads, unit):
    bits, header, m = kind.scheme.bits, kind.scheme.header, len(total)
    if header in (SIGNED, SUPER16):
        return _halves_int8(kind, total, x, aux, codes, heads, unit)
    # A dot of codes that starts from minus the zero point times the sum of x ends as that of code - zero point.
    acc = [s << (bits - 1) for s in each_i32(aux + 8 * m, m)] if header == SCALE else _zeros(total, "i32")
    acc = _dot(acc, x, codes, bits, range(8))
    scales = scale(heads, unit, 0, header)
    total = [fma(a.to_f32(), scales * s, t) for t, a, s in zip(total, acc, each_f32(aux, m))]
    return total if header == SCALE else add_products(total, base(heads, unit, 0, header), aux + 4 * m)


def _halves_int8(kind, total, x, aux, codes, heads, unit):
    """Scales by 16 columns: total + x_scale * (scale0 * dot0 + scale1 * dot1 + base0 * sum0 + base1 * sum1)."""
    bits, header, m = kind.scheme.bits, kind.scheme.header, len(total)
    minus_all, minus_low = each_i32(aux + 8 * m, m), each_i32(aux + 12 * m, m)
    parts = None
    for half, minus in enumerate((minus_low, [a - b for a, b in zip(minus_all, minus_low)])):
        acc = _zeros(total, "i32") if header == SUPER16 else [s << (bits - 1) for s in minus]
        acc = _dot(acc, x, codes, bits, range(4 * half, 4 * half + 4))
        scales = scale(heads, unit, half, header)
        parts = [a.to_f32() * scales if parts is None else fma(a.to_f32(), scales, parts[t]) for t, a in enumerate(acc)]
        if header == SUPER16:
            minus_base = -base(heads, unit, half, header)
            parts = [fma(s.to_f32(), minus_base, p) for p, s in zip(parts, minus)]
    return [fma(p, s, t) for t, p, s in zip(total, parts, each_f32(aux, m))]


def _dot(acc, x, codes, bits, groups):
    for group in groups:
        vector = column_group(codes, bits, group)
        acc = [dot4(a, vector, word, bits) for a, word in zip(acc, each_word(x + 4 * len(acc) * group, len(acc)))]
    return acc


# float32 activations.

def _unit_f32(kind, total, x, aux, codes, heads, unit):
    bits, header = kind.scheme.bits, kind.scheme.header
    acc = _zeros(total, "f32")
    for half in range(2):
        scales = scale(heads, unit, half, header)
        bases = base(heads, unit, half, header) if has_base(header) else None
        for group in range(4 * half, 4 * half + 4):
            vector = column_group(codes, bits, group)
            for column in range(4):
                acc = add_products(acc, weights(vector, column, scales, bases, bits),
                                 x + (4 * group + column) * 4 * len(total))
    return [t + a for t, a in zip(total, acc)]


def _unit_floats(kind, total, x, aux, codes, heads, unit):
    acc, bytes_ = _zeros(total, "f32"), 2 * kind.scheme.bits
    for k in range(UNIT):
        acc = add_products(acc, numbers(codes + k * bytes_, kind.scheme.header), x + k * 4 * len(total))
    return [t + a for t, a in zip(total, acc)]

