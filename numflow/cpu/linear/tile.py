"""One register tile: 16 rows of a packed matrix times M tokens, over all K columns.

Plain twins, a screen each: `numflow/learn/twins/tile.py` (int8), `numflow/learn/twins/packed.py` (weights of 3.5 bits).

int8    a unit's codes meet a token's int8 in exact integers; the unit's sum is scaled and added to the row's total.
bf16    pairs of plain numbers, rounded to bfloat16, meet pairs of activations (simd/bfloat16.py).
f32     weights are decoded to float32 and multiplied with float32 activations, summed by unit, then added to the total.

Units are added in order, and that order is all there is to a result: it is the same bits for any number of tokens and
threads. What M tokens need lies interleaved in memory (activations.py): x is their operand, aux the scales and sums
that go with int8. The scheme is a type, so a kernel contains the code of one scheme only.
"""

from numba import types
from numba.extending import intrinsic

from numflow.cpu.linear.activations import BF16
from numflow.cpu.simd.bfloat16 import add_pair_products, pairs_of_rows
from numflow.cpu.simd.bits import moved
from numflow.cpu.simd.dot import Dot, dot4, dot4_signed
from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import FEW_TOKENS, Hold, as_it_is, broadcast, in_order
from numflow.cpu.simd.lookup import lookup16
from numflow.cpu.simd.tile import add_products, each_f32, each_i32, each_word, repeat, unpack
from numflow.cpu.simd.value import Value, constant, exact_fma, fma, load, prefetch
from numflow.cpu.weights.decode import (
    base,
    code_numbers,
    column_group,
    numbers,
    open_heads,
    scale,
    scale_and_offset,
    weights,
    zero,
)
from numflow.cpu.weights.decode_grid16 import STRIP_HEADERS, Grid16
from numflow.cpu.weights.layout import AUX_BYTES, PIECES, UNIT, Pairs, Panel, Scheme
from numflow.cpu.weights.look_up import Known
from numflow.cpu.weights.panel import unpack as unpack_panel
from numflow.cpu.weights.panel import unpack_pairs
from numflow.cpu.weights.tables import FLOATS8, Floats8, Planes
from numflow.quant.stored import GRID

# How far ahead of their use codes are fetched, in bytes, into which cache, and from line to line. Decoding leaves the
# hardware's own prefetching behind, by 10 to 50 %. What is best depends on how many lines a unit has: with 3 or 3 1/2,
# the second cache brings 90 % of the memory's speed and the first 70 %; with 4 to 6 it is the other way round; with 8
# one line of four is enough, and the hardware sees to the others. For 8 tokens at once, a tile beyond: 32 sequences
# decode 4 to 20 % faster, long prompts neither faster nor slower. That is a Zen 5; a Zen 3, with AVX2, wants every line
# of all widths, and near: whole models of 4 bits decode 1.35 times as fast, of 8 bits 1.65 times.
NEAR, FARTHEST = (6144, 1, 64), (24576, 2, 64)
AHEAD = {3: (12288, 2, 64), 3.5: (12288, 2, 64), 8: (8192, 2, 256)}
WITH_AVX2 = (2048, 1, 64)
# Of q2's strips, whose headers are 48 bytes for 256 of codes: these too, with a distance of their own, 5 % faster.
STRIP_AHEAD, HEADERS_AHEAD = (12288, 2, 64), 6144
_LARGER = 2.0**100  # of activations that meet 8-bit floats, which are too small by about as much


def _fetched(scheme: Scheme, m: int) -> tuple[int, int, int] | None:
    """Distance, cache and step by which codes are fetched ahead for m tokens. Few of them meet plain numbers faster
    without, but those of 16 bits with AVX2, where a thread alone is 10 % faster, and two are not slower."""
    if isinstance(scheme, Panel):
        return None
    if m == 8:
        return FARTHEST
    if isa() == "avx2" and scheme.bits < 32:
        return WITH_AVX2
    return None if scheme.is_float else AHEAD.get(scheme.bits, NEAR)


@intrinsic
def row_tile(typingctx, total, x, aux, codes, heads, columns, kind):
    """`total` (a tile of zeros for M tokens) + 16 rows times M tokens."""
    def codegen(context, builder, signature, args):
        vectors = _sums(kind, unpack(builder, args[0]), *(Value(builder, a) for a in args[1:6]))
        return context.make_tuple(builder, signature.return_type, [v.llvm for v in vectors])

    i64 = types.int64
    return total(total, i64, i64, i64, i64, i64, kind), codegen


@intrinsic
def panel_tile(typingctx, total, x, aux, panel, columns, kind):
    """The same with the panel of the rows; nothing where `has_panel` is false."""
    def codegen(context, builder, signature, args):
        vectors = unpack(builder, args[0])
        if kind.panel:
            x, aux, panel, columns = (Value(builder, a) for a in args[1:5])
            heads = panel + (columns >> 5) * kind.panel.scheme.unit_bytes
            vectors = _sums(kind.panel, vectors, x, aux, panel, heads, columns)
        return context.make_tuple(builder, signature.return_type, [v.llvm for v in vectors])

    i64 = types.int64
    return total(total, i64, i64, i64, i64, kind), codegen


@intrinsic
def fill_panel(typingctx, panel, codes, heads, columns, kind):
    """Write the panel of a tile; nothing where `has_panel` is false."""
    def codegen(context, builder, signature, args):
        if kind.panel:
            panel, codes, heads, columns = (Value(builder, a) for a in args[:4])
            place = _fetched(kind.scheme, 4)
            how = kind.scheme, repeat, lambda at, nbytes: _fetch(at, nbytes, place)
            if isinstance(kind.panel.scheme, Pairs):
                unpack_pairs(panel, codes, columns, *how)
            else:
                unpack_panel(panel, codes, heads, columns, *how)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, kind), codegen


def _sums(kind, vectors: list[Value], x: Value, aux: Value, codes: Value, heads: Value, columns: Value) -> list[Value]:
    """vectors + 16 rows times the tokens, by unit."""
    floats = _unit_bf16 if kind.operand == BF16 else _unit_floats
    emit = floats if kind.scheme.is_float else _unit_int8 if kind.int8 else _unit_f32
    x_bytes, unit_bytes, m = kind.x_bytes, kind.scheme.unit_bytes, len(vectors)
    step = 2 if kind.operand == BF16 else 1  # columns of plain numbers at a time
    hold, size, units = Hold(columns.builder, m), kind.scheme.strip, columns >> 5
    opened = open_heads(heads, kind.scheme, hold)

    def strip(i, vectors, count=size):
        at = codes + i * (size * unit_bytes)
        at_once = kind.int8 and count == 2 and isinstance(opened, Grid16) and m <= opened.STRIP_TOKENS
        _fetch(at, count * unit_bytes, STRIP_AHEAD if at_once else _fetched(kind.scheme, m))
        xs, auxs = x + i * (size * UNIT * m * x_bytes), aux + i * (size * AUX_BYTES * m)
        if at_once:
            return _strip_int8(vectors, xs, auxs, at, opened, i, hold)
        for u in range(count):
            vectors = emit(kind, vectors, xs + u * (UNIT * m * x_bytes), auxs + u * (AUX_BYTES * m), at, 8 * u,
                           opened, i * size + u, hold)
        return vectors

    def column(i, vectors):
        k = (columns & -UNIT) + i * step
        if step == 2:
            return _pair(kind, vectors, x + k * (2 * m), codes + k * (unit_bytes // UNIT))
        return add_products(vectors, numbers(codes + k * (unit_bytes // UNIT), kind.scheme.header), x + k * (4 * m))

    vectors = repeat(units >> (size - 1), vectors, strip)
    if size == 2:
        vectors = repeat(units & 1, vectors, lambda i, vectors: strip((units >> 1) + i, vectors, 1))
    if kind.scheme.is_float:
        vectors = repeat((columns & (UNIT - 1)) >> (step - 1), vectors, column)
    for place in range(size if kind.ragged else 0):  # of the half of a unit in its strip
        def half(_, vectors, place=place):
            at = codes + (units >> (size - 1)) * (size * unit_bytes)
            return _unit_f32(kind, vectors, x + units * (UNIT * 4 * m), aux, at, 8 * place, opened, units, hold, 1)

        vectors = repeat((columns >> 4) & (units + place + 1 if size == 2 else 1) & 1, vectors, half)
    return vectors


def _fetch(at: Value, nbytes: int, place: tuple[int, int, int] | None) -> None:
    """Begin to fetch what lies as far beyond these codes as `_fetched` says."""
    if place:
        ahead, cache, step = place
        for line in range(0, nbytes, step):
            prefetch(at + ahead + line, cache)


def _zeros(total: list[Value], kind: str) -> list[Value]:
    return [constant(t, kind, 0) for t in total]


# int8 activations.

def _unit_int8(kind, total, x, aux, codes, first, heads, unit, hold):
    m = len(total)
    if kind.scheme.is_own:
        return _grid_int8(kind, total, x, aux, codes, first, heads, unit, hold)
    if kind.scheme.table:
        return _table_int8(kind, total, x, aux, codes, first, heads, unit)
    if kind.scheme.by_16:
        return _halves_int8(kind, total, x, aux, codes, first, heads, unit, hold)
    words = each_word(aux + 8 * m, m)
    minus = [broadcast(word) for word in words] if m > FEW_TOKENS else [word.splat(16) for word in words]
    acc = _dot(kind.scheme, hold, x, codes, first, range(8), minus, {})
    scales = scale(heads, unit, 0, kind.scheme)
    total = [fma(a.to_f32(), scales * s, t) for t, a, s in zip(total, acc, each_f32(aux, m))]
    return add_products(total, base(heads, unit, 0, kind.scheme), aux + 4 * m) if kind.scheme.with_base else total


def _halves_int8(kind, total, x, aux, codes, first, heads, unit, hold):
    """Scales by 16 columns: total + x_scale * (scale0 * dot0 + scale1 * dot1 + base0 * sum0 + base1 * sum1)."""
    m = len(total)
    minus_all, minus_low = each_i32(aux + 8 * m, m), each_i32(aux + 12 * m, m)
    parts, known = None, {}
    for half, minus in enumerate((minus_low, [a - b for a, b in zip(minus_all, minus_low)])):
        acc = _dot(kind.scheme, hold, x, codes, first, range(4 * half, 4 * half + 4), minus, known)
        scales = scale(heads, unit, half, kind.scheme)
        parts = [a.to_f32() * scales if parts is None else fma(a.to_f32(), scales, parts[t]) for t, a in enumerate(acc)]
        if kind.scheme.with_base:
            minus_base = -base(heads, unit, half, kind.scheme)
            parts = [fma(s, minus_base, p) for p, s in zip(parts, each_f32(aux + (16 + 4 * half) * m, m))]
    return [fma(p, s, t) for t, p, s in zip(total, parts, each_f32(aux, m))]


def _table_int8(kind, total, x, aux, codes, first, heads, unit):
    """Numbers of a table of 16: total + x_scale * scale * (dot of their numbers of 14 bits - 8192 * sum) / 8191."""
    m, planes = len(total), Planes.of(kind.scheme.table)
    minus_all, minus_low = each_i32(aux + 8 * m, m), each_i32(aux + 12 * m, m)
    parts = ((minus_low, range(4)), ([a - b for a, b in zip(minus_all, minus_low)], range(4, 8)))
    for half, (minus, groups) in enumerate(parts if kind.scheme.by_16 else ((minus_all, range(8)),)):
        products = Dot(_zeros(total, "i32")), Dot([s << 13 for s in minus])
        both = list(zip(products, (planes.high, planes.low)))
        for together in ([each] for each in both) if _apart(m) else [both]:
            for group in groups:
                code, words = column_group(codes, kind.scheme, first + group), each_word(x + 4 * m * group, m)
                for product, plane in together:
                    product.add(lookup16(code, plane), words, 127)
                    codes = product.before(codes)
        scales = scale(heads, unit, half, kind.scheme) * (1 / 8191)
        sums = [((a << 7) + b).to_f32() for a, b in zip(*(product.sums() for product in products))]
        total = [fma(a, scales * s, t) for a, s, t in zip(sums, each_f32(aux, m), total)]
    return total


def _grid_int8(kind, total, x, aux, codes, first, heads, unit, hold):
    """total + scale * (x_scale * dot - zero * x_sum), by 16 columns total + x_scale * (the same of both halves)."""
    m = len(total)
    minus_all, minus_low = each_i32(aux + 8 * m, m), each_i32(aux + 12 * m, m)
    if kind.scheme.header == GRID:
        scales, minus_zeros = scale(heads, unit, 0, kind.scheme), -zero(heads, unit, 0, kind.scheme)
        acc = _dot(kind.scheme, hold, x, codes, first, range(8), minus_all, {})
        parts = add_products([a.to_f32() * s for a, s in zip(acc, each_f32(aux, m))], minus_zeros, aux + 4 * m)
        return [fma(p, scales, t) for t, p in zip(total, parts)]
    sums = None
    for half, minus in enumerate((minus_low, [a - b for a, b in zip(minus_all, minus_low)])):
        acc = _dot(kind.scheme, hold, x, codes, first, range(4 * half, 4 * half + 4), minus, {})
        scales, zeros = (read(heads, unit, half, kind.scheme) for read in (scale, zero))
        parts = [exact_fma(s, zeros, a.to_f32()) for a, s in zip(acc, each_f32(aux + (16 + 4 * half) * m, m))]
        sums = [p * scales if sums is None else fma(p, scales, sums[t]) for t, p in enumerate(parts)]
    return [fma(s, x_scale, t) for t, s, x_scale in zip(total, sums, each_f32(aux, m))]


def _dot(scheme: Scheme, hold: Hold, x: Value, codes: Value, first: int, groups: range,
         minus: list[Value], known: Known) -> list[Value]:
    """The sums of (code - zero) * x over some column groups, or of code * x where a base follows.

    minus: minus the sums of x over those columns; a dot that starts from zero * minus ends as that of code - zero.
    known: as column_group takes it.
    """
    in_place = scheme.bits == 2 and scheme.with_base
    if in_place and len(minus) <= FEW_TOKENS and isa() in ("avx512", "avxvnni"):
        return _dot_in_place(scheme, hold, x, codes, first, groups, _zeros(minus, "i32"))
    m, with_base = len(minus), scheme.with_base
    zeros, offsets = _zeros(minus, "i32"), [s << (scheme.zero.bit_length() - 1) for s in minus]
    if scheme.code_bits == 8 and isa() in ("avx2", "neon"):  # bytes with a sign: pairs' sums fit 16 bits, sdot wants it
        acc = [-offset for offset in offsets] if with_base else zeros
        for group in groups:
            words = each_word(x + 4 * m * group, m)
            vector = column_group(codes, scheme, first + group, hold=hold, known=known)
            acc = [dot4_signed(a, vector - scheme.zero, word) for a, word in zip(acc, words)]
            if m > FEW_TOKENS:
                codes, acc = in_order(codes, acc)
        return acc
    dot = Dot(zeros if with_base else offsets)
    for group in groups:
        vector = column_group(codes, scheme, first + group, hold=hold, known=known)
        dot.add(vector, each_word(x + 4 * m * group, m), scheme.largest)
        if group % 4 == 3 or isinstance(scheme, Panel) or (scheme.grid and scheme.grid.width == 4):
            codes = dot.before(codes)
    return dot.sums()


def _dot_in_place(scheme: Scheme, hold: Hold, x: Value, codes: Value, first: int, groups: range,
                  acc: list[Value]) -> list[Value]:
    """The same for codes with a base, multiplied where they stand in their bytes, highest bits first.

    One shift of the sums brings all products of a place down to the next, instead of one shift for every vector.
    """
    places: dict[int, list[tuple[int, int]]] = {}
    for group in groups:
        (vector, place, _, _), = PIECES[scheme.bits][first + group]
        places.setdefault(place, []).append((vector, group))
    below = sorted(places)
    while below:
        place = below.pop()
        for vector, group in places[place]:
            field = load(codes + 64 * vector, "u8", 64)
            field = field & hold(Value(field.builder, field.like((1 << scheme.code_bits) - 1 << place)))
            acc = [dot4(a, field, word, 255) for a, word in zip(acc, each_word(x + 4 * len(acc) * group, len(acc)))]
        down = place - (below[-1] if below else 0)
        acc = [a.sar(down) for a in acc] if down else acc
    return acc


def _strip_int8(total, x, aux, codes, heads, strip, hold):
    """_grid_int8 of both units of a strip of 2-bit codes, bit for bit, with fewer instructions.

    The codes of block b (16 columns) are multiplied where they stand in their bytes, or 4 bits below, so that its dot
    product is 2^place times as large. So are the block's zero and, the other way round, its scale: no sum is shifted.
    """
    m, sums = len(total), total
    prefetch(heads.blocks_at + strip * STRIP_HEADERS + HEADERS_AHEAD, STRIP_AHEAD[1])
    vectors, blocks = [load(codes + 64 * j, "u8", 64) for j in range(4)], heads.blocks_of_strip(strip)
    for b, (scales, zeros) in enumerate(blocks):
        place, dot = heads.PLACES[b], Dot(_zeros(total, "i32"))
        keep = hold if isa() == "avx512" else as_it_is  # others have half of their registers full of codes
        for j, vector in enumerate(vectors):
            field = moved(vector, 2 * b, place, 2, keep)
            dot.add(field, each_word(x + 4 * m * (4 * b + j), m), 3 << place)
        unit, half = aux + b // 2 * (AUX_BYTES * m), b % 2
        parts = [exact_fma(s, zeros, heads.dot(a, place))
                 for a, s in zip(dot.sums(), each_f32(unit + (16 + 4 * half) * m, m))]
        if not half:
            sums = [p * scales for p in parts]
        else:
            sums = [fma(p, scales, s) for p, s in zip(parts, sums)]
            total = [fma(s, x_scale, t) for t, s, x_scale in zip(total, sums, each_f32(unit, m))]
    return total


# float32 activations.

def _unit_f32(kind, total, x, aux, codes, first, heads, unit, hold, halves=2):
    if kind.scheme.table in FLOATS8:
        return _unit_floats8(kind, total, x, codes, first, heads, unit, halves)
    acc, known = _zeros(total, "f32"), {}
    for half in range(halves):
        scales, offsets = scale_and_offset(heads, unit, half, kind.scheme)
        for group in range(4 * half, 4 * half + 4):
            vector = column_group(codes, kind.scheme, first + group, known=known)
            for column in range(4):
                numbers_ = code_numbers(vector, kind.scheme, lambda lanes, column=column: lanes.byte_of_4(column))
                row = weights(numbers_, scales, offsets, kind.scheme)
                acc = add_products(acc, row, x + (4 * group + column) * 4 * len(total))
    return [t + a for t, a in zip(total, acc)]


def _unit_floats8(kind, total, x, codes, first, heads, unit, halves):
    """8-bit floats: sums of even and of odd columns, as of plain numbers, before they are scaled.

    Of few tokens activations are made larger, of more of them weights: what is more work. Powers of two change no bit.
    """
    m, few, floats = len(total), len(total) <= FEW_TOKENS, Floats8(kind.scheme.table)
    for half in range(halves):
        accs = [_zeros(total, "f32"), _zeros(total, "f32")]
        for parity in (0, 1) if _apart(m) else (None,):
            if parity:
                codes, accs[0] = in_order(codes, accs[0])
            for group in range(4 * half, 4 * half + 4):
                columns = floats.columns(column_group(codes, kind.scheme, first + group))
                for column in range(4) if parity is None else range(parity, 4, 2):
                    row, at = columns[column], x + (4 * group + column) * 4 * m
                    words = [broadcast(load(at + 4 * t, "f32")) * _LARGER for t in range(m)] if few else each_f32(at, m)
                    row = row if few else row * floats.unit
                    accs[column % 2] = [fma(row, word, acc) for word, acc in zip(words, accs[column % 2])]
        scales, sums = scale(heads, unit, half, kind.scheme), [even + odd for even, odd in zip(*accs)]
        total = [fma(s * (floats.unit / _LARGER) if few else s, scales, t) for t, s in zip(total, sums)]
    return total


def _apart(tokens: int) -> bool:
    """Whether sums of even and of odd columns come one after the other: 16 registers do not hold both of many."""
    return tokens > FEW_TOKENS and isa() in ("avx2", "avxvnni")


def _unit_floats(kind, total, x, aux, codes, first, heads, unit, hold):
    # Two sums, of even and of odd columns, so that with few tokens their chains of additions overlap.
    accs, bytes_ = [_zeros(total, "f32"), _zeros(total, "f32")], kind.scheme.unit_bytes // UNIT
    for k in [*range(0, UNIT, 2), *range(1, UNIT, 2)] if _apart(len(total)) else range(UNIT):
        if k == 1 and _apart(len(total)):
            codes, accs[0] = in_order(codes, accs[0])
        row = numbers(codes + k * bytes_, kind.scheme.header)
        accs[k % 2] = add_products(accs[k % 2], row, x + k * 4 * len(total))
    return [t + (even + odd) for t, even, odd in zip(total, *accs)]


def _unit_bf16(kind, total, x, aux, codes, first, heads, unit, hold):
    accs, bytes_ = [_zeros(total, "f32"), _zeros(total, "f32")], kind.scheme.unit_bytes // UNIT
    for pair in range(UNIT // 2):
        accs[pair % 2] = _pair(kind, accs[pair % 2], x + pair * 4 * len(total), codes + 2 * pair * bytes_)
    return [t + (even + odd) for t, even, odd in zip(total, *accs)]


def _pair(kind, total, x, codes):
    """total + two columns of 16 rows times the tokens' pairs at x."""
    ready = isinstance(kind.scheme, Pairs)
    pairs = load(codes, "i32", 16) if ready else pairs_of_rows(codes, kind.scheme.header)
    return [add_pair_products(t, pairs, word) for t, word in zip(total, each_word(x, len(total)))]
