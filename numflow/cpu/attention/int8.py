"""Attention on quantised keys and values without decoding: dot products of bytes with their codes.

The factors of the codes are quantised to 16-bit integers of two signed bytes, 256 * high + low: queries by blocks of 32
columns, once for all keys; for values, the probability of a key times the scale of its block, by chunks of 64 keys. The
error of both is about 2^-16 of the largest in the block. Programs with int8 activations, whose error is 2^-8, use this.
Sums of products are exact, so a row's bits do not depend on the other rows.

Memory of a thread, `memory` (slots.int8_bytes):
    x       u8 [8 rows][2 bytes][64 keys]     quantised probabilities; then per row {f32 scale, f32 sum with minima}
    table   f32 [2][64 keys]                  scales and minima of a block of values
    operand [blocks]{u8 [8 rows][2 bytes][32 columns], [8 rows]{f32 scale, f32 scale * sum}}
    codes   unpacked codes of a chunk (coded.py)
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

_LARGEST = 32639.0     # 127 * 256 + 127: the high byte is at most 127, the low byte is -128 .. 127
_MAGIC = 12582912.0    # 1.5 * 2^23: adding it leaves the integer, rounded half to even, in the low bits
_i64 = types.int64


@inline
def _codes(memory, k_width):
    return memory + _OPERAND + _OPERAND_BLOCK * (k_width // BLOCK + 1)


@inline
def quantize_query(q, width, memory, row):
    """Quantise a (rotated) query f32 [width] at q to row `row` of the operand."""
    for b in range(width // BLOCK):
        block = memory + _OPERAND + _OPERAND_BLOCK * b
        _query_block(q + 4 * BLOCK * b, block + 2 * BLOCK * row, block + _ROWS * 2 * BLOCK + 8 * row)


@inline
def coded_scores(rows, kind, width, size, keys, k, ahead, memory, scores):
    """scores f32 [rows][64] = queries times the chunk's keys at k; 0 for groups of 16 behind the first `keys`."""
    for address in range(scores, scores + 4 * CHUNK * rows, 64):
        store_f32(address, zero_f32())
    y = _codes(memory, width)
    unpack_keys(kind, width, keys, k, size, y, ahead)
    blocks, part = width // BLOCK, part_bytes(size, width)
    for group in range((keys + GROUP - 1) // GROUP):
        first = group * blocks
        _key_scores(rows, blocks, k + first * part, part, y + first * PART, PART, memory + _OPERAND,
                    scores + 64 * group)


@inline
def add_coded_values(rows, kind, width, k_width, size, keys, v, ahead, memory, probabilities, factors, y):
    """y f32 [rows][width] = y * factors + probabilities [rows][64] @ the chunk's first `keys` values at v."""
    buffer = _codes(memory, k_width)
    unpack_values(kind, width, keys, v, size, buffer, ahead)
    blocks, part = width // BLOCK, part_bytes(size, width)
    for b in range(blocks):
        for group in range(CHUNK // GROUP):
            _open_headers(v + (group * blocks + b) * part, keys - GROUP * group, memory + _TABLE + 64 * group)
        for r in range(rows):
            _quantize_probabilities(probabilities + 4 * CHUNK * r, memory + _TABLE, memory + 2 * CHUNK * r,
                                    memory + _WEIGHTS + 8 * r)
        _add_values(rows, (keys + GROUP - 1) // GROUP, buffer + b * PART, blocks * PART, memory, factors,
                    y + 4 * BLOCK * b, 4 * width)


@staged(types.void, _i64, _i64, _i64)
def _query_block(q, x, aux):
    """Quantise 32 columns: high bytes, then low bytes, to x; {scale, scale * sum} to aux."""
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
    """Scale of the integers, and its inverse, for the magnitudes whose float32 bits are `bits`."""
    largest = bits.call("llvm.vector.reduce.smax.v16i32", llvm_type("i32"))  # integers order as floats; NaN is largest
    enough = largest.compare(">", constant(largest, "f32", SMALLEST, 1).as_("i32", 1))
    largest = largest.as_("f32", 1)
    inverse = Value(largest.builder, largest.builder.fdiv(constant(largest, "f32", _LARGEST, 1).llvm, largest.llvm))
    return largest * (1 / _LARGEST), enough.choose(inverse, 0.0)


@staged(types.void, _i64, _i64, _i64)
def _open_headers(block, tokens, table):
    """Write scales and minima of 16 values as float32 to the table; zeros behind the first `tokens`."""
    present = tokens.narrow("i32").splat().compare(">", list(range(GROUP)))
    for i in range(2):
        save(table + 4 * CHUNK * i, present.choose(load_bf16(block + 2 * GROUP * i), 0.0))


@staged(types.void, _i64, _i64, _i64, _i64)
def _quantize_probabilities(probabilities, table, x, aux):
    """Quantise probabilities f32 [64] times scales: high bytes, then low bytes, to x; {scale, sum with minima} to aux.
    """
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


# The inner loops, compiled for each number of rows.

@intrinsic
def _key_scores(typingctx, rows, blocks, block, part, codes, step, operand, y):
    """y f32 [rows][16], rows 256 bytes apart = the operand times 16 keys: parts at `block`, their codes at `codes`."""
    def emit(rows, blocks, block, part, codes, step, operand, y):
        def add(b, totals):
            x, headers = operand + b * _OPERAND_BLOCK, block + b * part
            aux, words = x + _ROWS * 2 * BLOCK, codes + b * step
            sums = _add_products(_zeros(y, rows), [(words + 64 * i, x + 4 * i) for i in range(8)], 2 * BLOCK, BLOCK)
            scale, minimum = load_bf16(headers), load_bf16(headers + 2 * GROUP)
            totals = [fma(s * scale, _splat(aux + 8 * r), t) for r, (s, t) in enumerate(zip(_floats(sums), totals))]
            return [fma(minimum, _splat(aux + 8 * r + 4), t) for r, t in enumerate(totals)]

        for r, total in enumerate(repeat(blocks, [constant(y, "f32", 0.0)] * rows, add)):
            save(y + 4 * CHUNK * r, total)
    return types.void(_i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64), _for_rows(emit)


@intrinsic
def _add_values(typingctx, rows, groups, codes, step, memory, factors, y, row):
    """y f32 [rows][32], rows `row` bytes apart = y * factors + the probabilities times groups of 16 values."""
    def emit(rows, groups, codes, step, memory, factors, y, row):
        for half in range(2):
            def add(g, sums):
                group, x = codes + g * step + 64 * half, memory + (g << 4)  # noqa: B023
                return _add_products(sums, [(group + 128 * i, x + 4 * i) for i in range(4)], 2 * CHUNK, CHUNK)

            for r, total in enumerate(_floats(repeat(groups, _zeros(y, rows), add))):
                target, aux = y + row * r + 64 * half, memory + _WEIGHTS + 8 * r
                added = fma(total, _splat(aux), _splat(aux + 4))
                save(target, fma(load(target, "f32", 16), _splat(factors + 4 * r), added))
    return types.void(_i64, _i64, _i64, _i64, _i64, _i64, _i64, _i64), _for_rows(emit)


def _for_rows(emit):
    """A code generator that calls `emit` for each number of rows in WIDTHS; the first argument selects at run time."""
    def codegen(context, builder, signature, args):
        rows, *rest = (Value(builder, a) for a in args)
        for count in WIDTHS:
            with builder.if_then(rows.compare("==", count).llvm):
                emit(count, *rest)
        return context.get_dummy_value()
    return codegen


def _zeros(like: Value, rows: int) -> list[Value]:
    """Zero accumulators for the high and the low bytes of each row."""
    return [constant(like, "i32", 0) for _ in range(2 * rows)]


def _add_products(sums: list[Value], operands: list[tuple[Value, Value]], row: int, low: int) -> list[Value]:
    """Add a dot product for each (address of codes u8x64, address of a word of the first row's high bytes).

    row, low: bytes from a row to the next, and from high bytes to low bytes.
    """
    dot = Dot(sums)
    for codes, x in operands:
        dot.add(load(codes, "u8", 64), [load(x + row * (i // 2) + low * (i % 2), "i32") for i in range(len(sums))], 255)
    return dot.sums()


def _floats(sums: list[Value]) -> list[Value]:
    """256 * high + low of each row."""
    return [((high << 8) + low).to_f32() for high, low in zip(sums[::2], sums[1::2], strict=True)]


def _splat(address: Value) -> Value:
    return load(address, "f32").splat()
