"""One register tile: 16 rows of a packed matrix times M tokens, over all K columns.

Twins in plain Python, a screen each: `numflow/learn/twins/tile.py` (int8), `numflow/learn/twins/packed.py` (3.5-bit
weights).

int8    The codes of a unit are multiplied with a token's int8 activations in exact integer arithmetic. The unit's sum
        is scaled and added to the row's total.
bf16    Pairs of float weights, rounded to bfloat16, are multiplied with pairs of activations (simd/bfloat16.py).
f32     Weights are decoded to float32, multiplied with float32 activations, summed over a unit, and the sum is added
        to the row's total.

Units are added in the order of their columns, so the bits of a result never depend on the number of tokens or threads.
The activations of M tokens are interleaved in memory (activations.py): x is the operand, aux holds the scales and sums
of int8 activations. The scheme is a type, so a kernel contains the code of one scheme only.
"""

from numba import types
from numba.extending import intrinsic

from numflow.cpu.linear.activations import BF16
from numflow.cpu.simd.bfloat16 import add_pair_products, pairs_of_rows
from numflow.cpu.simd.bits import move_bits
from numflow.cpu.simd.dot import Dot, dot4, dot4_signed
from numflow.cpu.simd.isa import isa
from numflow.cpu.simd.llvm_barriers import FEW_TOKENS, Hold, as_it_is, broadcast, in_order
from numflow.cpu.simd.lookup import lookup16
from numflow.cpu.simd.tile import add_products, each_f32, each_i32, each_word, repeat, unpack
from numflow.cpu.simd.value import Value, constant, exact_fma, fma, load, prefetch
from numflow.cpu.weights.decode import (
    base,
    code_values,
    column_group,
    load_floats,
    open_headers,
    scale,
    scale_and_offset,
    weights,
    zero,
)
from numflow.cpu.weights.decode_grid16 import STRIP_HEADERS, Grid16
from numflow.cpu.weights.layout import AUX_BYTES, PIECES, UNIT, Pairs, Panel, Scheme
from numflow.cpu.weights.look_up import UnitCache
from numflow.cpu.weights.panel import unpack as unpack_panel
from numflow.cpu.weights.panel import unpack_pairs
from numflow.cpu.weights.tables import FLOATS8, Floats8, Planes
from numflow.quant.stored import GRID

# Software prefetch of codes: (bytes ahead with one thread, with several, cache level, bytes to the next line). The
# hardware prefetcher alone is 10 to 50 % slower. The best setting depends on the cache lines per unit. With 3 or 3.5
# lines, prefetch into the L2 cache reaches 90 % of the memory bandwidth, into L1 70 %. Two threads share the bandwidth:
# half the distance then reads at 98 %, all of it at 86 %. With 4 to 6 lines L1 is the better one; with 8 lines one line
# of four is enough. For 8 tokens at once the distance is about a tile: 32 sequences decode 4 to 20 % faster. These are
# figures of a Zen 5 and a Zen 4. A Zen 3, with AVX2, wants all lines, at a short distance: 35 % faster with 4 bits.
Distance = tuple[int, int, int, int]
NEAR, FARTHEST = (6144, 6144, 1, 64), (24576, 24576, 2, 64)
AHEAD = {3: (12288, 6144, 2, 64), 3.5: (12288, 6144, 2, 64), 8: (8192, 8192, 2, 256)}
WITH_AVX2 = (2048, 2048, 1, 64)
# Strips of q2 have 48 bytes of headers for 256 of codes: prefetching headers too, at their own distance, saves 5 %.
STRIP_AHEAD, HEADERS_AHEAD = (12288, 12288, 2, 64), 6144
_LARGER = 2.0**100  # factor of activations for 8-bit floats, whose float32 are too small by about as much


def _prefetch_distance(scheme: Scheme, m: int) -> Distance | None:
    """The prefetch of codes for m tokens, or None for no prefetch.

    Float weights with few tokens are faster without. 16-bit floats with AVX2 are the exception: one thread is 10 %
    faster with prefetch, and two threads are not slower.
    """
    if isinstance(scheme, Panel):
        return None
    if m == 8:
        return FARTHEST
    if isa() == "avx2" and scheme.bits < 32:
        return WITH_AVX2
    return None if scheme.is_float else AHEAD.get(scheme.bits, NEAR)


@intrinsic
def row_tile(typingctx, total, x, aux, codes, headers, columns, threads, kind):
    """`total` (a tile of zeros for M tokens) + 16 rows times M tokens. threads: how many read the matrix."""
    def codegen(context, builder, signature, args):
        vectors = _sums(kind, unpack(builder, args[0]), *(Value(builder, a) for a in args[1:7]))
        return context.make_tuple(builder, signature.return_type, [v.llvm for v in vectors])

    i64 = types.int64
    return total(total, i64, i64, i64, i64, i64, i64, kind), codegen


@intrinsic
def panel_tile(typingctx, total, x, aux, panel, columns, kind):
    """The same from the panel of the rows; `total` unchanged where `has_panel` is false."""
    def codegen(context, builder, signature, args):
        vectors = unpack(builder, args[0])
        if kind.panel:
            x, aux, panel, columns = (Value(builder, a) for a in args[1:5])
            headers = panel + (columns >> 5) * kind.panel.scheme.unit_bytes
            vectors = _sums(kind.panel, vectors, x, aux, panel, headers, columns, None)
        return context.make_tuple(builder, signature.return_type, [v.llvm for v in vectors])

    i64 = types.int64
    return total(total, i64, i64, i64, i64, kind), codegen


@intrinsic
def fill_panel(typingctx, panel, codes, headers, columns, kind):
    """Write the panel of a tile; no code where `has_panel` is false."""
    def codegen(context, builder, signature, args):
        if kind.panel:
            panel, codes, headers, columns = (Value(builder, a) for a in args[:4])
            distance = _prefetch_distance(kind.scheme, 4)
            how = kind.scheme, repeat, lambda address, nbytes: _prefetch(address, nbytes, distance, None)
            if isinstance(kind.panel.scheme, Pairs):
                unpack_pairs(panel, codes, columns, *how)
            else:
                unpack_panel(panel, codes, headers, columns, *how)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, kind), codegen


def _sums(kind, vectors: list[Value], x: Value, aux: Value, codes: Value, headers: Value, columns: Value,
          threads: Value | None) -> list[Value]:
    """vectors + 16 rows times the tokens, unit by unit."""
    floats = _unit_bf16 if kind.operand == BF16 else _unit_floats
    emit = floats if kind.scheme.is_float else _unit_int8 if kind.int8 else _unit_f32
    x_bytes, unit_bytes, m = kind.x_bytes, kind.scheme.unit_bytes, len(vectors)
    step = 2 if kind.operand == BF16 else 1  # columns of float weights at a time
    hold, size, units = Hold(columns.builder, m), kind.scheme.strip, columns >> 5
    opened = open_headers(headers, kind.scheme, hold)

    def strip(i, vectors, count=size):
        strip_codes = codes + i * (size * unit_bytes)
        by_strip = kind.int8 and count == 2 and isinstance(opened, Grid16) and m <= opened.STRIP_TOKENS
        distance = STRIP_AHEAD if by_strip else _prefetch_distance(kind.scheme, m)
        _prefetch(strip_codes, count * unit_bytes, distance, threads)
        xs, auxs = x + i * (size * UNIT * m * x_bytes), aux + i * (size * AUX_BYTES * m)
        if by_strip:
            return _strip_int8(vectors, xs, auxs, strip_codes, opened, i, hold)
        for u in range(count):
            vectors = emit(kind, vectors, xs + u * (UNIT * m * x_bytes), auxs + u * (AUX_BYTES * m), strip_codes, 8 * u,
                           opened, i * size + u, hold)
        return vectors

    def column(i, vectors):
        k = (columns & -UNIT) + i * step
        if step == 2:
            return _pair(kind, vectors, x + k * (2 * m), codes + k * (unit_bytes // UNIT))
        return add_products(vectors, load_floats(codes + k * (unit_bytes // UNIT), kind.scheme.header), x + k * (4 * m))

    vectors = repeat(units >> (size - 1), vectors, strip)
    if size == 2:
        vectors = repeat(units & 1, vectors, lambda i, vectors: strip((units >> 1) + i, vectors, 1))
    if kind.scheme.is_float:
        vectors = repeat((columns & (UNIT - 1)) >> (step - 1), vectors, column)
    for part in range(size if kind.ragged else 0):  # index within the strip of the unit that is only half there
        def half(_, vectors, part=part):
            last = codes + (units >> (size - 1)) * (size * unit_bytes)
            return _unit_f32(kind, vectors, x + units * (UNIT * 4 * m), aux, last, 8 * part, opened, units, hold, 1)

        vectors = repeat((columns >> 4) & (units + part + 1 if size == 2 else 1) & 1, vectors, half)
    return vectors


def _prefetch(codes: Value, nbytes: int, distance: Distance | None, threads: Value | None) -> None:
    """Prefetch `nbytes` of codes; `threads` is None for one."""
    if distance:
        ahead, of_several, level, step = distance
        if threads and of_several != ahead:
            codes = codes - threads.compare(">", 1).choose(Value(codes.builder, codes.like(ahead - of_several)), 0)
        for line in range(0, nbytes, step):
            prefetch(codes + ahead + line, level)


def _zeros(total: list[Value], kind: str) -> list[Value]:
    return [constant(t, kind, 0) for t in total]


# int8 activations.

def _unit_int8(kind, total, x, aux, codes, first, headers, unit, hold):
    m = len(total)
    if kind.scheme.is_own:
        return _grid_int8(kind, total, x, aux, codes, first, headers, unit, hold)
    if kind.scheme.table:
        return _table_int8(kind, total, x, aux, codes, first, headers, unit)
    if kind.scheme.by_16:
        return _halves_int8(kind, total, x, aux, codes, first, headers, unit, hold)
    words = each_word(aux + 8 * m, m)
    minus_sums = [broadcast(word) for word in words] if m > FEW_TOKENS else [word.splat(16) for word in words]
    acc = _dot(kind.scheme, hold, x, codes, first, range(8), minus_sums, {})
    scales = scale(headers, unit, 0, kind.scheme)
    total = [fma(a.to_f32(), scales * s, t) for t, a, s in zip(total, acc, each_f32(aux, m))]
    return add_products(total, base(headers, unit, 0, kind.scheme), aux + 4 * m) if kind.scheme.with_base else total


def _halves_int8(kind, total, x, aux, codes, first, headers, unit, hold):
    """Scales by 16 columns: total + x_scale * (scale0 * dot0 + scale1 * dot1 + base0 * sum0 + base1 * sum1)."""
    m = len(total)
    minus_all, minus_low = each_i32(aux + 8 * m, m), each_i32(aux + 12 * m, m)
    parts, cache = None, {}
    for half, minus_sums in enumerate((minus_low, [a - b for a, b in zip(minus_all, minus_low)])):
        acc = _dot(kind.scheme, hold, x, codes, first, range(4 * half, 4 * half + 4), minus_sums, cache)
        scales = scale(headers, unit, half, kind.scheme)
        parts = [a.to_f32() * scales if parts is None else fma(a.to_f32(), scales, parts[t]) for t, a in enumerate(acc)]
        if kind.scheme.with_base:
            minus_base = -base(headers, unit, half, kind.scheme)
            parts = [fma(s, minus_base, p) for p, s in zip(parts, each_f32(aux + (16 + 4 * half) * m, m))]
    return [fma(p, s, t) for t, p, s in zip(total, parts, each_f32(aux, m))]


def _table_int8(kind, total, x, aux, codes, first, headers, unit):
    """Codes of a table of 16 floats, as 14-bit integers (tables.Planes): total + x_scale * scale * (dot - 8192 * sum)
    / 8191."""
    m, planes = len(total), Planes.of(kind.scheme.table)
    minus_all, minus_low = each_i32(aux + 8 * m, m), each_i32(aux + 12 * m, m)
    parts = ((minus_low, range(4)), ([a - b for a, b in zip(minus_all, minus_low)], range(4, 8)))
    for half, (minus_sums, groups) in enumerate(parts if kind.scheme.by_16 else ((minus_all, range(8)),)):
        products = Dot(_zeros(total, "i32")), Dot([s << 13 for s in minus_sums])
        both = list(zip(products, (planes.high, planes.low)))
        for at_once in ([each] for each in both) if _two_passes(m) else [both]:
            for group in groups:
                code, words = column_group(codes, kind.scheme, first + group), each_word(x + 4 * m * group, m)
                for product, plane in at_once:
                    product.add(lookup16(code, plane), words, 127)
                    codes = product.before(codes)
        scales = scale(headers, unit, half, kind.scheme) * (1 / 8191)
        sums = [((a << 7) + b).to_f32() for a, b in zip(*(product.sums() for product in products))]
        total = [fma(a, scales * s, t) for a, s, t in zip(sums, each_f32(aux, m), total)]
    return total


def _grid_int8(kind, total, x, aux, codes, first, headers, unit, hold):
    """total + scale * (x_scale * dot - zero * x_sum); by 16 columns, total + x_scale * the sum over both halves of
    scale * (dot - zero * sum)."""
    m = len(total)
    minus_all, minus_low = each_i32(aux + 8 * m, m), each_i32(aux + 12 * m, m)
    if kind.scheme.header == GRID:
        scales, minus_zeros = scale(headers, unit, 0, kind.scheme), -zero(headers, unit, 0, kind.scheme)
        acc = _dot(kind.scheme, hold, x, codes, first, range(8), minus_all, {})
        parts = add_products([a.to_f32() * s for a, s in zip(acc, each_f32(aux, m))], minus_zeros, aux + 4 * m)
        return [fma(p, scales, t) for t, p in zip(total, parts)]
    sums = None
    for half, minus_sums in enumerate((minus_low, [a - b for a, b in zip(minus_all, minus_low)])):
        acc = _dot(kind.scheme, hold, x, codes, first, range(4 * half, 4 * half + 4), minus_sums, {})
        scales, zeros = (read(headers, unit, half, kind.scheme) for read in (scale, zero))
        parts = [exact_fma(s, zeros, a.to_f32()) for a, s in zip(acc, each_f32(aux + (16 + 4 * half) * m, m))]
        sums = [p * scales if sums is None else fma(p, scales, sums[t]) for t, p in enumerate(parts)]
    return [fma(s, x_scale, t) for t, s, x_scale in zip(total, sums, each_f32(aux, m))]


def _dot(scheme: Scheme, hold: Hold, x: Value, codes: Value, first: int, groups: range,
         minus_sums: list[Value], cache: UnitCache) -> list[Value]:
    """Dot products of code - zero and x over some column groups, or of code and x where the scheme has a base.

    minus_sums: negated sums of x over these columns: an accumulator that starts at zero * minus_sums ends as the dot
    product of code - zero. cache: as column_group takes it.
    """
    in_place = scheme.bits == 2 and scheme.with_base
    if in_place and len(minus_sums) <= FEW_TOKENS and isa() in ("avx512", "avxvnni"):
        return _dot_in_place(scheme, hold, x, codes, first, groups, _zeros(minus_sums, "i32"))
    m, with_base = len(minus_sums), scheme.with_base
    zeros, offsets = _zeros(minus_sums, "i32"), [s << (scheme.zero.bit_length() - 1) for s in minus_sums]
    if scheme.code_bits == 8 and isa() in ("avx2", "neon"):  # signed: sums of pairs fit 16 bits; sdot takes no other
        acc = [-offset for offset in offsets] if with_base else zeros
        for group in groups:
            words = each_word(x + 4 * m * group, m)
            vector = column_group(codes, scheme, first + group, hold=hold, cache=cache)
            acc = [dot4_signed(a, vector - scheme.zero, word) for a, word in zip(acc, words)]
            if m > FEW_TOKENS:
                codes, acc = in_order(codes, acc)
        return acc
    dot = Dot(zeros if with_base else offsets)
    for group in groups:
        vector = column_group(codes, scheme, first + group, hold=hold, cache=cache)
        dot.add(vector, each_word(x + 4 * m * group, m), scheme.largest)
        if group % 4 == 3 or isinstance(scheme, Panel) or scheme.grid_width == 4:
            codes = dot.before(codes)
    return dot.sums()


def _dot_in_place(scheme: Scheme, hold: Hold, x: Value, codes: Value, first: int, groups: range,
                  acc: list[Value]) -> list[Value]:
    """The same for codes with a base, multiplied at their bit position within the bytes, highest bits first.

    One shift of the accumulator brings the products of one bit position down to the next position, instead of one shift
    for every vector of codes.
    """
    by_shift: dict[int, list[tuple[int, int]]] = {}
    for group in groups:
        (vector, shift, _, _), = PIECES[scheme.bits][first + group]
        by_shift.setdefault(shift, []).append((vector, group))
    shifts = sorted(by_shift)
    while shifts:
        shift = shifts.pop()
        for vector, group in by_shift[shift]:
            field = load(codes + 64 * vector, "u8", 64)
            field = field & hold(Value(field.builder, field.like((1 << scheme.code_bits) - 1 << shift)))
            acc = [dot4(a, field, word, 255) for a, word in zip(acc, each_word(x + 4 * len(acc) * group, len(acc)))]
        down = shift - (shifts[-1] if shifts else 0)
        acc = [a.sar(down) for a in acc] if down else acc
    return acc


def _strip_int8(total, x, aux, codes, headers, strip, hold):
    """_grid_int8 of both units of a strip of 2-bit codes, bit for bit, with fewer instructions.

    The codes of block b (16 columns) are multiplied at their bit position within the bytes, or 4 bits below, so the dot
    product is 2^shift times as large. The block's zero is multiplied by 2^shift too, and its scale is divided by
    2^shift, so no sum has to be shifted.
    """
    m, sums = len(total), total
    prefetch(headers.blocks_at + strip * STRIP_HEADERS + HEADERS_AHEAD, STRIP_AHEAD[2])
    vectors, blocks = [load(codes + 64 * j, "u8", 64) for j in range(4)], headers.blocks_of_strip(strip)
    for b, (scales, zeros) in enumerate(blocks):
        shift, dot = headers.SHIFTS[b], Dot(_zeros(total, "i32"))
        keep = hold if isa() == "avx512" else as_it_is  # codes occupy half of the registers of the others
        for j, vector in enumerate(vectors):
            field = move_bits(vector, 2 * b, shift, 2, keep)
            dot.add(field, each_word(x + 4 * m * (4 * b + j), m), 3 << shift)
        unit, half = aux + b // 2 * (AUX_BYTES * m), b % 2
        parts = [exact_fma(s, zeros, headers.dot(a, shift))
                 for a, s in zip(dot.sums(), each_f32(unit + (16 + 4 * half) * m, m))]
        if not half:
            sums = [p * scales for p in parts]
        else:
            sums = [fma(p, scales, s) for p, s in zip(parts, sums)]
            total = [fma(s, x_scale, t) for t, s, x_scale in zip(total, sums, each_f32(unit, m))]
    return total


# float32 activations.

def _unit_f32(kind, total, x, aux, codes, first, headers, unit, hold, halves=2):
    if kind.scheme.table in FLOATS8:
        return _unit_floats8(kind, total, x, codes, first, headers, unit, halves)
    acc, cache = _zeros(total, "f32"), {}
    for half in range(halves):
        scales, offsets = scale_and_offset(headers, unit, half, kind.scheme)
        for group in range(4 * half, 4 * half + 4):
            vector = column_group(codes, kind.scheme, first + group, cache=cache)
            for column in range(4):
                values = code_values(vector, kind.scheme, lambda lanes, column=column: lanes.byte_of_4(column))
                row = weights(values, scales, offsets, kind.scheme)
                acc = add_products(acc, row, x + (4 * group + column) * 4 * len(total))
    return [t + a for t, a in zip(total, acc)]


def _unit_floats8(kind, total, x, codes, first, headers, unit, halves):
    """8-bit floats: separate sums of even and odd columns, as of float weights, before they are scaled.

    The float32 weights are too small by a power of two (Floats8). With few tokens their activations are enlarged, with
    more tokens the weights, whichever are fewer. A power of two changes no bit of a mantissa.
    """
    m, few, floats = len(total), len(total) <= FEW_TOKENS, Floats8(kind.scheme.table)
    for half in range(halves):
        accs = [_zeros(total, "f32"), _zeros(total, "f32")]
        for parity in (0, 1) if _two_passes(m) else (None,):
            if parity:
                codes, accs[0] = in_order(codes, accs[0])
            for group in range(4 * half, 4 * half + 4):
                columns = floats.columns(column_group(codes, kind.scheme, first + group))
                for column in range(4) if parity is None else range(parity, 4, 2):
                    row, xs = columns[column], x + (4 * group + column) * 4 * m
                    words = [broadcast(load(xs + 4 * t, "f32")) * _LARGER for t in range(m)] if few else each_f32(xs, m)
                    row = row if few else row * floats.unit
                    accs[column % 2] = [fma(row, word, acc) for word, acc in zip(words, accs[column % 2])]
        scales, sums = scale(headers, unit, half, kind.scheme), [even + odd for even, odd in zip(*accs)]
        total = [fma(s * (floats.unit / _LARGER) if few else s, scales, t) for t, s in zip(total, sums)]
    return total


def _two_passes(tokens: int) -> bool:
    """Whether even and odd columns are summed in two passes: 16 registers do not hold both sums of many tokens."""
    return tokens > FEW_TOKENS and isa() in ("avx2", "avxvnni")


def _unit_floats(kind, total, x, aux, codes, first, headers, unit, hold):
    # Two accumulators, of even and of odd columns, so that with few tokens their dependency chains overlap.
    accs, bytes_ = [_zeros(total, "f32"), _zeros(total, "f32")], kind.scheme.unit_bytes // UNIT
    for k in [*range(0, UNIT, 2), *range(1, UNIT, 2)] if _two_passes(len(total)) else range(UNIT):
        if k == 1 and _two_passes(len(total)):
            codes, accs[0] = in_order(codes, accs[0])
        row = load_floats(codes + k * bytes_, kind.scheme.header)
        accs[k % 2] = add_products(accs[k % 2], row, x + k * 4 * len(total))
    return [t + (even + odd) for t, even, odd in zip(total, *accs)]


def _unit_bf16(kind, total, x, aux, codes, first, headers, unit, hold):
    accs, bytes_ = [_zeros(total, "f32"), _zeros(total, "f32")], kind.scheme.unit_bytes // UNIT
    for pair in range(UNIT // 2):
        accs[pair % 2] = _pair(kind, accs[pair % 2], x + pair * 4 * len(total), codes + 2 * pair * bytes_)
    return [t + (even + odd) for t, even, odd in zip(total, *accs)]


def _pair(kind, total, x, codes):
    """total + two columns of 16 rows times the pair of each token at x."""
    ready = isinstance(kind.scheme, Pairs)
    pairs = load(codes, "i32", 16) if ready else pairs_of_rows(codes, kind.scheme.header)
    return [add_pair_products(t, pairs, word) for t, word in zip(total, each_word(x, len(total)))]
