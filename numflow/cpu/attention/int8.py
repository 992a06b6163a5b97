"""Attention on codes as they are: dot products of bytes with keys and values of few bits, no float of them anywhere.

What codes are multiplied with becomes integers of 16 bits, each of two signed bytes: 256 * high + low. Queries do so by
blocks of 32 columns, once for all keys; for values, the probability of a key times the scale of its block, by chunks of
64 keys. Both are some 2^-16 of the largest of their block off, where activations of int8 are 2^-8 off in all matrices:
it is for programs with these. Sums of products are exact, so a row's bits are the same beside any other rows.

A thread's memory for this, `region` (slots.int8_bytes):
    x       u8 [8 rows][2 bytes][64 keys]     weights of values; then per row {f32 scale, f32 sum with minima}
    table   f32 [2][64 keys]                  scales and minima of a block of values
    operand [blocks]{u8 [8 rows][2 bytes][32 columns], [8 rows]{f32 scale, f32 scale * sum}}
    codes   of a chunk, unpacked (coded.py)
"""

from numba import types
from numba.extending import intrinsic

from numflow.cpu.attention.coded import PART, part_bytes, unpack_keys, unpack_values
from numflow.cpu.attention.slots import INT8_OPERAND as _OPERAND
from numflow.cpu.attention.slots import INT8_OPERAND_BLOCK as _OPERAND_BLOCK
from numflow.cpu.attention.slots import INT8_ROWS as _ROWS
from numflow.cpu.attention.slots import INT8_TABLE as _TABLE
from numflow.cpu.attention.slots import INT8_WEIGHTS as _WEIGHTS
from numflow.cpu.attention.slots import WIDTHS
from numflow.cpu.simd.dot import Dot
from numflow.cpu.simd.tile import repeat
from numflow.cpu.simd.value import Value, constant, fma, llvm_type, load, load_bf16, save, staged
from numflow.cpu.simd.vector import inline, store_f32, zero_f32
from numflow.cpu.state.cache import CHUNK, GROUP
from numflow.quant.kv import BLOCK, SMALLEST

_LARGEST = 32639.0     # 127 * 256 + 127: the upper byte is at most 127, the lower one -128 .. 127
_MAGIC = 12582912.0    # 1.5 * 2^23: added to a number, it leaves its integer in the low bits, rounded half to even
_i64 = types.int64


@inline
def _codes(region, k_width):
    return region + _OPERAND + _OPERAND_BLOCK * (k_width // BLOCK + 1)


@inline
def quantize_query(q, width, region, row):
    """Row number `row` of the operand, from a (rotated) query f32 [width] at q."""
    for b in range(width // BLOCK):
        block = region + _OPERAND + _OPERAND_BLOCK * b
        _query_block(q + 4 * BLOCK * b, block + 2 * BLOCK * row, block + _ROWS * 2 * BLOCK + 8 * row)


@inline
def coded_scores(rows, kind, width, size, keys, k, ahead, region, scores):
    """scores f32 [rows][64] = queries times the chunk's keys at k; 0 for groups of 16 behind the first `keys`."""
    for at in range(scores, scores + 4 * CHUNK * rows, 64):
        store_f32(at, zero_f32())
    y = _codes(region, width)
    unpack_keys(kind, width, keys, k, size, y, ahead)
    blocks, part = width // BLOCK, part_bytes(size, width)
    for group in range((keys + GROUP - 1) // GROUP):
        first = group * blocks
        _key_scores(rows, blocks, k + first * part, part, y + first * PART, PART, region + _OPERAND,
                    scores + 64 * group)


@inline
def add_coded_values(rows, kind, width, k_width, size, keys, v, ahead, region, probabilities, factors, y):
    """y f32 [rows][width] = y * factors + probabilities [rows][64] @ the chunk's first `keys` values at v."""
    buffer = _codes(region, k_width)
    unpack_values(kind, width, keys, v, size, buffer, ahead)
    blocks, part = width // BLOCK, part_bytes(size, width)
    for b in range(blocks):
        for group in range(CHUNK // GROUP):
            _open_headers(v + (group * blocks + b) * part, keys - GROUP * group, region + _TABLE + 64 * group)
        for r in range(rows):
            _weigh(probabilities + 4 * CHUNK * r, region + _TABLE, region + 2 * CHUNK * r, region + _WEIGHTS + 8 * r)
        _add_values(rows, (keys + GROUP - 1) // GROUP, buffer + b * PART, blocks * PART, region, factors,
                    y + 4 * BLOCK * b, 4 * width)


@staged(types.void, _i64, _i64, _i64)
def _query_block(q, x, aux):
    """32 columns as integers: their high bytes, then their low ones, to x; {scale, scale * sum} to aux."""
    halves = [load(q + 64 * half, "f32", 16) for half in range(2)]
    low, high = (half.as_("i32", 16) & 0x7FFFFFFF for half in halves)
    scale, inverse = _scale(low.compare(">", high).choose(low, high))
    integers = [fma(half, inverse.splat(), constant(half, "f32", _MAGIC)).as_("i32", 16) - 0x4B400000
                for half in halves]
    for half, integer in enumerate(integers):
        save(x + 16 * half, (integer + 128).sar(8).narrow("u8"))
        save(x + BLOCK + 16 * half, integer.narrow("u8"))
    total = (integers[0] + integers[1]).call("llvm.vector.reduce.add.v16i32", llvm_type("i32"))
    save(aux, scale)
    save(aux + 4, scale * total.to_f32())


def _scale(bits: Value) -> tuple[Value, Value]:
    """Scale of the integers and its inverse, so that the number whose bits are the largest of `bits` fits."""
    largest = bits.call("llvm.vector.reduce.smax.v16i32", llvm_type("i32"))  # in the order of numbers, and NaN wins
    enough = largest.compare(">", constant(largest, "f32", SMALLEST, 1).as_("i32", 1))
    largest = largest.as_("f32", 1)
    inverse = Value(largest.builder, largest.builder.fdiv(constant(largest, "f32", _LARGEST, 1).llvm, largest.llvm))
    return largest * (1 / _LARGEST), enough.choose(inverse, 0.0)


@staged(types.void, _i64, _i64, _i64)
def _open_headers(block, tokens, table):
    """Scales and minima of 16 values as float32, 64 apart; zeros behind the first `tokens`."""
    known = tokens.narrow("i32").splat().compare(">", list(range(GROUP)))
    for i in range(2):
        save(table + 4 * CHUNK * i, known.choose(load_bf16(block + 2 * GROUP * i), 0.0))


@staged(types.void, _i64, _i64, _i64, _i64)
def _weigh(probabilities, table, x, aux):
    """Probabilities f32 [64] times scales as integers: high bytes, then low ones; {scale, sum with minima} to aux."""
    parts = [load(probabilities + 64 * g, "f32", 16) for g in range(CHUNK // GROUP)]
    weights = [p * load(table + 64 * g, "f32", 16) for g, p in enumerate(parts)]
    bits = [w.as_("i32", 16) & 0x7FFFFFFF for w in weights]
    while len(bits) > 1:
        bits = [a.compare(">", b).choose(a, b) for a, b in zip(bits[::2], bits[1::2], strict=True)]
    scale, inverse = _scale(bits[0])
    total = None
    for g, (p, w) in enumerate(zip(parts, weights, strict=True)):
        integer = fma(w, inverse.splat(), constant(w, "f32", _MAGIC + 128)).as_("i32", 16)
        save(x + 16 * g, (integer >> 8).narrow("u8"))
        save(x + CHUNK + 16 * g, (integer + 128).narrow("u8"))
        minimum = load(table + 4 * CHUNK + 64 * g, "f32", 16)
        total = p * minimum if total is None else fma(p, minimum, total)
    for half in (8, 4, 2, 1):
        total = total.part(0, half) + total.part(half, half) if half > 1 else total.lane(0) + total.lane(1)
    save(aux, scale)
    save(aux + 4, total)


# The loops, for each number of rows.

@intrinsic
def _key_scores(typingctx, rows, blocks, block, part, codes, step, operand, y):
    """y f32 [rows][16], rows 256 bytes apart = the operand times 16 keys: parts at `block`, their codes at `codes`."""
    def emit(rows, blocks, block, part, codes, step, operand, y):
        def add(b, totals):
            x, heads = operand + b * _OPERAND_BLOCK, block + b * part
            aux, words = x + _ROWS * 2 * BLOCK, codes + b * step
            sums = _add_products(_nothing(y, rows), [(words + 64 * i, x + 4 * i) for i in range(8)], 2 * BLOCK, BLOCK)
            scale, minimum = load_bf16(heads), load_bf16(heads + 2 * GROUP)
            totals = [fma(s * scale, _splat(aux + 8 * r), t) for r, (s, t) in enumerate(zip(_floats(sums), totals))]
            return [fma(minimum, _splat(aux + 8 * r + 4), t) for r, t in enumerate(totals)]

        for r, total in enumerate(repeat(blocks, [constant(y, "f32", 0.0)] * rows, add)):
            save(y + 4 * CHUNK * r, total)
    return types.void(_i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64), _for_rows(emit)


@intrinsic
def _add_values(typingctx, rows, groups, codes, step, region, factors, y, row):
    """y f32 [rows][32], rows `row` bytes apart = y * factors + the weights times groups of 16 values."""
    def emit(rows, groups, codes, step, region, factors, y, row):
        for half in range(2):
            def add(g, sums):
                at, x = codes + g * step + 64 * half, region + (g << 4)  # noqa: B023
                return _add_products(sums, [(at + 128 * i, x + 4 * i) for i in range(4)], 2 * CHUNK, CHUNK)

            for r, total in enumerate(_floats(repeat(groups, _nothing(y, rows), add))):
                at, aux = y + row * r + 64 * half, region + _WEIGHTS + 8 * r
                ours = fma(total, _splat(aux), _splat(aux + 4))
                save(at, fma(load(at, "f32", 16), _splat(factors + 4 * r), ours))
    return types.void(_i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64), _for_rows(emit)


def _for_rows(emit):
    """Code that does what `emit` says for the number of rows that comes first, one of WIDTHS."""
    def codegen(context, builder, signature, args):
        rows, *rest = (Value(builder, a) for a in args)
        for count in WIDTHS:
            with builder.if_then(rows.compare("==", count).llvm):
                emit(count, *rest)
        return context.get_dummy_value()
    return codegen


def _nothing(like: Value, rows: int) -> list[Value]:
    """Sums of the high and the low bytes of each row."""
    return [constant(like, "i32", 0) for _ in range(2 * rows)]


def _add_products(sums: list[Value], places: list[tuple[Value, Value]], row: int, low: int) -> list[Value]:
    """Sums with one dot product for each (address of codes u8x64, address of a word of the first row's high bytes)."""
    dot = Dot(sums)
    for codes, x in places:
        dot.add(load(codes, "u8", 64), [load(x + row * (i // 2) + low * (i % 2), "i32") for i in range(len(sums))], 255)
    return dot.sums()


def _floats(sums: list[Value]) -> list[Value]:
    """256 * high + low of each row."""
    return [((high << 8) + low).to_f32() for high, low in zip(sums[::2], sums[1::2], strict=True)]


def _splat(address: Value) -> Value:
    return load(address, "f32").splat()
