"""Kernels that make operands (activations.py)."""

import numpy as np
from numba import types

from numflow.cpu.linear.activations import BF16, CHUNK, F32, INT8, INT16, TOKEN_TILE
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.bfloat16 import pack_pairs, pairs_of_columns, round_to_bf16
from numflow.cpu.simd.dot import byte_sums
from numflow.cpu.simd.value import constant, fma, llvm_type, load, save, staged
from numflow.cpu.simd.vector import inline, merged
from numflow.cpu.weights.layout import AUX_BYTES, UNIT

# Units whose largest magnitude is below count as zeros: the inverse of their scale would overflow.
_SMALLEST, _SMALLEST_OF_PAIRS = np.float32(1e-36), np.float32(1e-34)
BY_TILE = (F32, INT8, BF16)  # operand kinds that are made for a whole token tile at once
_FINER = np.float32(254)  # a rounding error is at most half of a scale, and becomes up to 127


@inline
def rows_of_token(kind):
    """Operand rows per token."""
    return 2 if kind == INT16 else 1


@inline
def tile_tokens(left):
    """Tokens of the next tile where `left` tokens remain."""
    if left > 4:
        return TOKEN_TILE
    return 4 if left > 2 else left


@kernel
def to_int8(args, thread, n_threads):
    """args: header, rows field, source f32 [T, stride], stride, K, x, aux."""
    _operand(args, thread, n_threads, INT8)


@kernel
def to_int16(args, thread, n_threads):
    """args: as to_int8."""
    _operand(args, thread, n_threads, INT16)


@kernel
def to_f32(args, thread, n_threads):
    """args: header, rows field, source f32 [T, stride], stride, K, x."""
    _operand(args, thread, n_threads, F32)


@kernel
def to_bf16(args, thread, n_threads):
    """args: as to_f32; K is even."""
    _operand(args, thread, n_threads, BF16)


@merged
def _operand(args, thread, n_threads, kind):
    """Threads share the chunks of all token tiles."""
    rows_per_token = rows_of_token(kind)
    tile = TOKEN_TILE // rows_per_token
    tokens, stride, columns = i64(i64(args, 0), i64(args, 1)), 4 * i64(args, 3), i64(args, 4)
    chunks = (columns + CHUNK - 1) // CHUNK
    begin, end = share((tokens + tile - 1) // tile * chunks, thread, n_threads)
    for item in range(begin, end):
        t = item // chunks * tile
        fill_tile(i64(args, 2) + t * stride, stride, 0, 1, min(tile, tokens - t), columns, item % chunks * CHUNK,
                  i64(args, 5), i64(args, 6), t * rows_per_token, kind)


@kernel
def heads_to_int8(args, thread, n_threads):
    """args: header, rows field, source f32 [T, stride], stride, K of a head, x, aux, heads."""
    _heads(args, thread, n_threads, INT8)


@kernel
def heads_to_int16(args, thread, n_threads):
    """args: as heads_to_int8."""
    _heads(args, thread, n_threads, INT16)


@kernel
def heads_to_f32(args, thread, n_threads):
    """args: as heads_to_int8."""
    _heads(args, thread, n_threads, F32)


@kernel
def heads_to_bf16(args, thread, n_threads):
    """args: as heads_to_int8."""
    _heads(args, thread, n_threads, BF16)


@merged
def _heads(args, thread, n_threads, kind):
    """Threads share the chunks of all token tiles of head 0, then of head 1 and so on."""
    rows_per_token = rows_of_token(kind)
    tile = TOKEN_TILE // rows_per_token
    tokens, stride, columns = i64(i64(args, 0), i64(args, 1)), 4 * i64(args, 3), i64(args, 4)
    chunks, tiles = (columns + CHUNK - 1) // CHUNK, (tokens + tile - 1) // tile
    head_rows = (tokens + TOKEN_TILE - 1) // TOKEN_TILE * TOKEN_TILE
    begin, end = share(i64(args, 7) * tiles * chunks, thread, n_threads)
    for item in range(begin, end):
        head, t = item // chunks // tiles, item // chunks % tiles * tile
        fill_tile(i64(args, 2) + t * stride + 4 * head * columns, stride, 0, 1, min(tile, tokens - t), columns,
                  item % chunks * CHUNK, i64(args, 5), i64(args, 6), (head * head_rows + t) * rows_per_token, kind)


@merged
def fill_tile(source, stride, routes, divisor, count, columns, begin, x, aux, t, kind):
    """Write columns [begin, begin + CHUNK) of the tile of `count` tokens at row t of an operand.

    Token i is row i of `source` (rows `stride` bytes apart), or row routes[i] // divisor where `routes` is an address.
    """
    m = tile_tokens(count * rows_of_token(kind))
    if kind in BY_TILE and count == TOKEN_TILE and routes == 0:
        put_tile(source + 4 * begin, stride, columns, begin, x, aux, t, kind)
        return
    for i in range(count):
        row = source + (i32_ptr(routes)[i] // divisor if routes else i) * stride
        put_row(row + 4 * begin, columns, begin, x, aux, t, i, m, kind)


@inline
def put_row(source, columns, begin, x, aux, t, i, m, kind):
    """Write columns [begin, begin + CHUNK) at `source` as token i of the tile of m rows at row t of an operand."""
    end = min(begin + CHUNK, columns)
    if kind == BF16:
        out = x + 2 * (t * columns + begin * m) + 4 * i
        for k in range(0, end - begin - 15, 16):
            _put_pairs16(source + 4 * k, out + 2 * k * m, 4 * m)
        for k in range((end - begin) // 16 * 16, end - begin, 2):
            _put_pair(source + 4 * k, out + 2 * k * m)
    elif kind != F32:
        aux += t * (columns // UNIT) * AUX_BYTES
        for unit in range(begin // UNIT, end // UNIT):
            values, unit_x, unit_aux = (source + unit * 128 - 4 * begin, x + t * columns + unit * 32 * m,
                                        aux + unit * AUX_BYTES * m)
            if kind == INT16:
                _quantize_pairs(values, unit_x, unit_aux, 2 * i, m)
            else:
                _quantize_unit(values, unit_x, unit_aux, i, m)
    else:
        out, row = f32_ptr(x + 4 * (t * columns + begin * m + i)), f32_ptr(source)
        for k in range(end - begin):
            out[k * m] = row[k]


@inline
def put_tile(source, stride, columns, begin, x, aux, t, kind):
    """Write columns [begin, begin + CHUNK) of TOKEN_TILE rows, `stride` bytes apart at `source`, as the tile at row t
    of an operand whose kind is one of BY_TILE."""
    count = min(CHUNK, columns - begin)
    if kind == INT8:
        aux += t * (columns // UNIT) * AUX_BYTES
        for unit in range(begin // UNIT, (begin + count) // UNIT):
            _quantize_tile(source + unit * 128 - 4 * begin, stride, x + t * columns + unit * 32 * TOKEN_TILE,
                           aux + unit * AUX_BYTES * TOKEN_TILE)
        return
    if kind == BF16:
        x += 2 * (t * columns + begin * TOKEN_TILE)
        for k in range(0, count - 15, 16):
            _interleave_pairs(source + 4 * k, stride, x + 2 * k * TOKEN_TILE)
        for k in range(count // 16 * 16, count, 2):
            for i in range(TOKEN_TILE):
                _put_pair(source + i * stride + 4 * k, x + 2 * k * TOKEN_TILE + 4 * i)
        return
    x += 4 * (t * columns + begin * TOKEN_TILE)
    for k in range(0, count - 15, 16):
        _interleave16(source + 4 * k, stride, x + 4 * k * TOKEN_TILE)
    for k in range(count // 16 * 16, count):
        for i in range(TOKEN_TILE):
            f32_ptr(x)[k * TOKEN_TILE + i] = f32_ptr(source + i * stride)[k]


@staged(types.void, types.int64, types.int64, types.int64)
def _put_pairs16(source, x, stride):
    """Write 16 float32 as 8 pairs of bfloat16, `stride` bytes apart."""
    words = pairs_of_columns(load(source, "f32", 16))
    for i in range(8):
        save(x + stride * i, words.lane(i))


@staged(types.void, types.int64, types.int64)
def _put_pair(source, x):
    """Write two float32 as a pair of bfloat16."""
    bits = round_to_bf16(load(source, "f32", 2))
    save(x, pack_pairs(bits.lane(0), bits.lane(1)))


@staged(types.void, types.int64, types.int64, types.int64)
def _interleave16(source, stride, x):
    """Write 16 columns of TOKEN_TILE rows, column by column."""
    save(x, _interleaved([load(source + stride * i, "f32", 16) for i in range(TOKEN_TILE)]))


@staged(types.void, types.int64, types.int64, types.int64)
def _interleave_pairs(source, stride, x):
    """Write 16 columns of TOKEN_TILE rows as pairs of bfloat16, column pair by column pair."""
    save(x, _interleaved([pairs_of_columns(load(source + stride * i, "f32", 16)) for i in range(TOKEN_TILE)]))


def _interleaved(rows):
    """Lane 0 of every row, lane 1 of every row, ..."""
    while len(rows) > 1:  # zip rows that are half of all rows apart first, neighbours last
        half = len(rows) // 2
        rows = [low.zipped(high) for low, high in zip(rows[:half], rows[half:])]
    return rows[0]


def _reduced(rows, combine):
    """Reduce the lanes of every row to one: lane i of the result is of row i."""
    count, lanes = len(rows), rows[0].lanes
    while len(rows) > 1:
        half = len(rows) // 2
        both = [low.zipped(high) for low, high in zip(rows[:half], rows[half:])]
        rows = [combine(pair.part(0, lanes), pair.part(lanes, lanes)) for pair in both]
    return _folded(rows[0], count, combine)


def _folded(vector, count, combine):
    """Combine lanes that are `count` apart, until `count` lanes are left."""
    while vector.lanes > count:
        vector = combine(*vector.halves())
    return vector


@staged(types.void, types.int64, types.int64, types.int64, types.int64)
def _quantize_tile(source, stride, x, aux):
    """Quantise 32 columns of TOKEN_TILE rows at `source`: `_quantize_unit` for each row, with fewer instructions."""
    m = TOKEN_TILE
    bits = _reduced([_magnitude(source + stride * i) for i in range(m)], _larger)
    largest = bits.as_("f32", m)
    scale = largest / 127.0
    inverse = bits.compare(">", _SMALLEST.view(np.int32)).choose(constant(largest, "f32", 127.0, m) / largest, 0.0)
    save(aux, scale)
    save(aux + 4 * m, inverse)  # overwritten by the sums below; a broadcast from memory needs no shuffle
    sums = []
    for half in range(2):
        inverses = [load(aux + 4 * (m + i), "f32") for i in range(m)]
        integers = [_integers(_rounded(load(source + stride * i + 64 * half, "f32", 16), inverse))
                    for i, inverse in enumerate(inverses)]
        words = _interleaved([row.narrow("u8").as_("i32", 4) for row in integers])
        save(x + 16 * m * half, words)
        sums.append(_folded(byte_sums(words), m, lambda a, b: a + b))
    low, high = sums
    for index, values in enumerate((scale * (low + high).to_f32(), -(low + high), -low, (-low).to_f32(),
                                    (-high).to_f32()), 1):
        save(aux + 4 * m * index, values)


@inline
def _quantize_unit(source, x, aux, i, m):
    """Quantise 32 values at `source` as token i of m."""
    largest = _abs_max(source)
    scale = largest / np.float32(127)
    inverse = np.float32(127) / largest if largest > _SMALLEST else np.float32(0)
    low = _round16(source, inverse, x + 4 * i, 4 * m)
    high = _round16(source + 64, inverse, x + 4 * i + 16 * m, 4 * m)
    _put_aux(aux, i, m, scale, low, high)


@inline
def _quantize_pairs(source, x, aux, i, m):
    """Quantise 32 values at `source` as rows i and i + 1 of m: int8, and the rounding error as int8 of a smaller scale.
    """
    largest = _abs_max(source)
    scale = largest / np.float32(127)
    inverse = np.float32(127) / largest if largest > _SMALLEST_OF_PAIRS else np.float32(0)
    low = _round16(source, inverse, x + 4 * i, 4 * m)
    high = _round16(source + 64, inverse, x + 4 * i + 16 * m, 4 * m)
    _put_aux(aux, i, m, scale, low, high)
    low = _round_error16(source, inverse, scale, inverse * _FINER, x + 4 * i + 4, 4 * m)
    high = _round_error16(source + 64, inverse, scale, inverse * _FINER, x + 4 * i + 4 + 16 * m, 4 * m)
    _put_aux(aux, i + 1, m, scale / _FINER, low, high)


@inline
def _put_aux(aux, i, m, scale, low, high):
    """Store scale and sums of row i of m of a unit; `low` and `high` are the sums of its two halves."""
    f32_ptr(aux)[i] = scale
    f32_ptr(aux)[m + i] = scale * np.float32(low + high)
    i32_ptr(aux)[2 * m + i] = -(low + high)
    i32_ptr(aux)[3 * m + i] = -low
    f32_ptr(aux)[4 * m + i] = np.float32(-low)
    f32_ptr(aux)[5 * m + i] = np.float32(-high)


@staged(types.float32, types.int64)
def _abs_max(address):
    """Largest magnitude of 32 float32, compared as integers: the order is the same, and NaN is the largest."""
    return _magnitude(address).call("llvm.vector.reduce.smax.v16i32", llvm_type("i32")).as_("f32", 1)


def _magnitude(address):
    """Bits of the larger magnitude of values i and i + 16 of 32 float32, i32x16."""
    return _larger(*(load(address + offset, "i32", 16) & 0x7FFFFFFF for offset in (0, 64)))


def _larger(a, b):
    return a.compare(">", b).choose(a, b)


@staged(types.int32, types.int64, types.float32, types.int64, types.int64)
def _round16(source, inverse, x, stride):
    """Round 16 float32 times `inverse` to int8 and store them as 4-byte words, `stride` bytes apart; return their sum.
    """
    values = load(source, "f32", 16)
    return _put_integers(_rounded(values, inverse), x, stride)


@staged(types.int32, types.int64, types.float32, types.float32, types.float32, types.int64, types.int64)
def _round_error16(source, inverse, scale, finer, x, stride):
    """Round the rounding errors of `_round16`, times `finer`, in the same way."""
    values = load(source, "f32", 16)
    whole = _rounded(values, inverse) - 12582912.0
    errors = fma(whole, (-scale).splat(16), values)
    return _put_integers(_rounded(errors, finer), x, stride)


def _rounded(values, factor):
    """Values times a factor, + 1.5 * 2^23.

    The low bits then hold the integer, rounded half to even: no conversion instruction is needed.
    """
    return fma(values, factor.splat(16), constant(values, "f32", 12582912.0))


def _integers(rounded):
    """The integers in the low bits of `_rounded`, i32x16."""
    return rounded.as_("i32", 16) - 0x4B400000


def _put_integers(rounded, x, stride):
    integers = _integers(rounded)
    words = integers.narrow("u8").as_("i32", 4)
    for i in range(4):
        save(x + stride * i, words.lane(i))
    return integers.call("llvm.vector.reduce.add.v16i32", llvm_type("i32"))
