"""Attention of one tile: up to 8 query rows that share a key/value head, over spans of 512 keys.

A span is worked through in chunks of 64 keys with a running maximum (online softmax) and leaves a partial result:
for each row the maximum m, l = sum exp(s - m) and sum exp(s - m) v. Partial results are merged in the order of the
keys. Chunks and spans begin at fixed positions of the sequence and a row's arithmetic does not depend on the other
rows of its tile, so a row's bits are the same whoever computes which spans. A hidden key adds exactly 0.

The number of rows is compiled in: `zero`, a tuple of 1, 2, 4 or 8 zero vectors, says it by its type.
"""

import inspect

import numpy as np
from numba import types
from numba.core import cgutils

from numflow.cpu.kernel import POSITIONS, STARTS, f32_ptr, f64, i32_ptr, i64, i64_ptr
from numflow.cpu.math import exp, tanh
from numflow.cpu.simd import fma_ir, inline, load_at, load_f32, named_intrinsic, store_f32, zero_f32
from numflow.cpu.simd import splat as splat_ir
from numflow.cpu.simd_float import fma, keep_lanes, lane_numbers, larger, load_as_f32, max_lanes, splat, sum_lanes
from numflow.cpu.simd_tile import add_outer

GROUP, CHUNK, SPAN, MOST_ROWS = 16, 64, 512, 8

# Arguments of the attention kernels.
HEADER, Q, Q_STRIDE, Y, Y_STRIDE, CACHE, KV_HEADS, QUERIES_PER_KEY, K_DIM, V_DIM, BLOCK = range(11)
TABLE, TABLE_STRIDE, LENGTHS, SCALE, CAUSAL, WINDOW, SOFTCAP, SLOPES, SINKS, BIAS, REACH = range(11, 22)
SCRATCH, SCRATCH_BYTES, PARTIALS, SLOTS, COUNTERS = range(22, 27)

# A thread's scratch memory, offsets in bytes: [8] rows are int64 where not said otherwise.
SCORES = 0                 # f32 [8][64], then the probabilities
SUMS = 2048                # f32 [8][16], l by lane
PEAK, NEXT_PEAK = 2560, 2624  # f32 [16], one lane for each row
FACTOR, OTHER_FACTOR = 2688, 2752
FIRST, LAST = 2816, 2880   # keys the row sees
POSITION, HEAD, WHERE = 2944, 3008, 3072  # of the row; address of its y
K_GROUPS, V_GROUPS = 3136, 3168  # [4], addresses of the chunk's groups of 16 keys
OWN = 3200                 # partial result of a span, then the total, then q * scale, f32 [E][rows]

# A partial result: f32 m[16], l[16], values [8][Ep].
PEAKS, TOTALS, VALUES = 0, 64, 128

_NEVER, _HIDDEN = np.float32(-3e38), np.float32(-np.inf)


def slot_bytes(v_dim: int) -> int:
    """Bytes of a partial result."""
    return VALUES + MOST_ROWS * 4 * (-(-v_dim // 16) * 16)


def scratch_bytes(k_dim: int, v_dim: int) -> int:
    """Bytes of a thread's scratch memory, whole cache lines."""
    return OWN + 2 * slot_bytes(v_dim) + -(-k_dim * MOST_ROWS * 4 // 64) * 64


def _row_op(emit):
    """emit(builder, row, *vectors or scalars) for each vector of a tile, as a function of kernels."""
    def typing(typingctx, tile, *args):
        def codegen(context, builder, signature, values):
            values = [cgutils.unpack_tuple(builder, v) if isinstance(t, types.UniTuple) else [v] * tile.count
                      for v, t in zip(values, signature.args, strict=True)]
            vectors = [emit(builder, row, *each) for row, each in enumerate(zip(*values, strict=True))]
            return context.make_tuple(builder, signature.return_type, vectors)
        return tile(tile, *args), codegen
    return named_intrinsic(typing, emit, list(inspect.signature(emit).parameters.values())[2:])


def _at(builder, address, row, stride):
    return builder.add(address, builder.mul(stride, stride.type(row)))


@_row_op
def add_outer_strided(builder, row, total, vector, x, stride):
    """total + vector * x, where row r's x is the float32 at x + r * stride bytes."""
    word = load_at(builder, _at(builder, x, row, stride), vector.type.element)
    return fma_ir(builder, splat_ir(builder, word, 16), vector, total)


@_row_op
def load_scaled(builder, row, like, address, stride, factors):
    """The vector at address + r * stride bytes times the r-th float32 at `factors`."""
    factor = load_at(builder, _at(builder, factors, row, factors.type(4)), like.type.element)
    return builder.fmul(load_at(builder, _at(builder, address, row, stride), like.type), splat_ir(builder, factor, 16))


@_row_op
def store_rows(builder, row, tile, address, stride):
    """Vector r to address + r * stride bytes; returns the tile."""
    builder.store(tile, builder.inttoptr(_at(builder, address, row, stride), tile.type.as_pointer())).align = 4
    return tile


@inline
def begin_tile(args, scratch, zero, sequence, head, first, count):
    """Look up rows first .. first + count of the sequence's (token, query head) pairs under a key head.

    Rows beyond `count` repeat the last one, without effect. Returns the first and the last key any row sees.
    """
    header, group = i64(args, HEADER), i64(args, QUERIES_PER_KEY)
    positions, begin = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, STARTS))[sequence]
    newest = np.int64(i32_ptr(i64(header, i64(args, LENGTHS)))[sequence]) - 1
    least, most = newest, np.int64(0)
    for r in range(len(zero)):
        row = first + min(r, count - 1)
        t, h = begin + row // group, head * group + row % group
        position = np.int64(positions[t])
        last = min(position, newest) if i64(args, CAUSAL) else newest
        seen = max(position - i64(args, WINDOW) + 1, 0) if i64(args, WINDOW) else np.int64(0)
        least, most = min(least, seen), max(most, last)
        i64_ptr(scratch + FIRST)[r], i64_ptr(scratch + LAST)[r] = seen, last
        i64_ptr(scratch + POSITION)[r], i64_ptr(scratch + HEAD)[r] = position, h
        i64_ptr(scratch + WHERE)[r] = i64(args, Y) + 4 * (t * i64(args, Y_STRIDE) + h * i64(args, V_DIM))
        q = f32_ptr(i64(args, Q) + 4 * (t * i64(args, Q_STRIDE) + h * i64(args, K_DIM)))
        scaled, scale = f32_ptr(_queries(args, scratch) + 4 * r), np.float32(f64(args, SCALE))
        for e in range(i64(args, K_DIM)):
            scaled[e * len(zero)] = q[e] * scale
    return least, most


@inline
def _queries(args, scratch):
    return scratch + OWN + 2 * partial_bytes(args)


@inline
def value_bytes(args):
    """Bytes of a row of float32 values."""
    return (i64(args, V_DIM) + 15) // 16 * 64


@inline
def partial_bytes(args):
    return VALUES + MOST_ROWS * value_bytes(args)


@inline
def total_slot(args, scratch):
    """Address of the scratch memory's total."""
    return scratch + OWN + partial_bytes(args)


@inline
def clear_slot(args, slot):
    """A partial result of no keys."""
    store_f32(slot + PEAKS, splat(_NEVER))
    for at in range(TOTALS, partial_bytes(args), 64):
        store_f32(slot + at, zero_f32())


@inline
def span_result(args, scratch, zero, half, sequence, head, span, least, most, slot):
    """The partial result of one span, of the keys least .. most, into `slot`."""
    clear_slot(args, slot)
    store_f32(scratch + PEAK, splat(_NEVER))
    for r in range(len(zero)):
        store_f32(scratch + SUMS + 64 * r, zero_f32())
    begin = max(span * SPAN, least // CHUNK * CHUNK)
    for base in range(begin, min((span + 1) * SPAN, most + 1), CHUNK):
        groups = (min(most + 1 - base, CHUNK) + GROUP - 1) // GROUP
        _find_groups(args, scratch, half, sequence, head, base, groups)
        _scores(args, scratch, zero, half)
        _probabilities(args, scratch, zero, base)
        _add_values(args, scratch, zero, half, most + 1 - base, slot)
    store_f32(slot + PEAKS, load_f32(scratch + PEAK))
    for r in range(len(zero)):
        f32_ptr(slot + TOTALS)[r] = sum_lanes(load_f32(scratch + SUMS + 64 * r))


@inline
def _find_groups(args, scratch, half, sequence, head, base, groups):
    """Addresses of K and V of the chunk's groups; those beyond the last repeat it, and are hidden."""
    header, block_size, size = i64(args, HEADER), i64(args, BLOCK), 2 if half else 4
    table = i32_ptr(i64(header, i64(args, TABLE)) + 4 * sequence * i64(header, i64(args, TABLE_STRIDE)))
    for group in range(CHUNK // GROUP):
        key = base + GROUP * min(group, groups - 1)
        place = (table[key // block_size] * i64(args, KV_HEADS) + head) * block_size + key % block_size
        i64_ptr(scratch + K_GROUPS)[group] = i64(i64(args, CACHE), 0) + place * i64(args, K_DIM) * size
        i64_ptr(scratch + V_GROUPS)[group] = i64(i64(args, CACHE), 1) + place * value_bytes(args) // 4 * size


@inline
def _scores(args, scratch, zero, half):
    """q k^T * scale of the chunk. As many accumulators as registers allow: 2 or 4 groups of keys at a time."""
    if len(zero) == MOST_ROWS:
        _scores_of_2(args, scratch, zero, half, 0)
        _scores_of_2(args, scratch, zero, half, 2)
    else:
        _scores_of_4(args, scratch, zero, half)


@inline
def _scores_of_2(args, scratch, zero, half, group):
    k0, k1 = i64(scratch + K_GROUPS, group), i64(scratch + K_GROUPS, group + 1)
    q, step, a, b = _queries(args, scratch), 32 if half else 64, zero, zero
    for _ in range(i64(args, K_DIM)):
        a, b = add_outer(a, load_as_f32(k0, half), q), add_outer(b, load_as_f32(k1, half), q)
        k0, k1, q = k0 + step, k1 + step, q + 4 * len(zero)
    store_rows(a, scratch + SCORES + 64 * group, 256)
    store_rows(b, scratch + SCORES + 64 * group + 64, 256)


@inline
def _scores_of_4(args, scratch, zero, half):
    k0, k1, k2, k3 = (i64(scratch + K_GROUPS, 0), i64(scratch + K_GROUPS, 1), i64(scratch + K_GROUPS, 2),
                      i64(scratch + K_GROUPS, 3))
    q, step, a, b, c, d = _queries(args, scratch), 32 if half else 64, zero, zero, zero, zero
    for _ in range(i64(args, K_DIM)):
        a, b = add_outer(a, load_as_f32(k0, half), q), add_outer(b, load_as_f32(k1, half), q)
        c, d = add_outer(c, load_as_f32(k2, half), q), add_outer(d, load_as_f32(k3, half), q)
        k0, k1, k2, k3, q = k0 + step, k1 + step, k2 + step, k3 + step, q + 4 * len(zero)
    store_rows(a, scratch + SCORES, 256)
    store_rows(b, scratch + SCORES + 64, 256)
    store_rows(c, scratch + SCORES + 128, 256)
    store_rows(d, scratch + SCORES + 192, 256)


@inline
def _probabilities(args, scratch, zero, base):
    """exp(score - running maximum), hidden keys 0; FACTOR is what older sums are to be multiplied by."""
    for r in range(len(zero)):
        peak = splat(_HIDDEN)
        for group in range(CHUNK // GROUP):
            at = scratch + SCORES + 256 * r + 64 * group
            score = _biased(args, scratch, load_f32(at), r, base + GROUP * group)
            store_f32(at, score)
            peak = larger(score, peak)
        f32_ptr(scratch + NEXT_PEAK)[r] = max(f32_ptr(scratch + PEAK)[r], max_lanes(peak))
    store_f32(scratch + FACTOR, exp(load_f32(scratch + PEAK) - load_f32(scratch + NEXT_PEAK)))
    store_f32(scratch + PEAK, load_f32(scratch + NEXT_PEAK))
    for r in range(len(zero)):
        peak, at = splat(f32_ptr(scratch + PEAK)[r]), scratch + SCORES + 256 * r
        a, b = exp(load_f32(at) - peak), exp(load_f32(at + 64) - peak)
        c, d = exp(load_f32(at + 128) - peak), exp(load_f32(at + 192) - peak)
        store_f32(at, a)
        store_f32(at + 64, b)
        store_f32(at + 128, c)
        store_f32(at + 192, d)
        older = load_f32(scratch + SUMS + 64 * r) * f32_ptr(scratch + FACTOR)[r]
        store_f32(scratch + SUMS + 64 * r, older + ((a + b) + (c + d)))


@inline
def _biased(args, scratch, score, r, key):
    """Soft cap, bias by distance and mask of 16 scores, of keys key .. key + 15."""
    distance = key - i64(scratch + POSITION, r)
    if i64(args, SOFTCAP):
        cap = f64(args, SOFTCAP)
        score = tanh(score / cap) * cap
    if i64(args, SLOPES):
        slope = f32_ptr(i64(args, SLOPES))[i64(scratch + HEAD, r)]
        score = fma(lane_numbers() + np.float32(distance), slope, score)
    if i64(args, BIAS):
        reach = i64(args, REACH)
        row = i64(args, BIAS) + 4 * i64(scratch + HEAD, r) * (2 * reach + 33)
        score = score + load_f32(row + 4 * (min(max(distance, -reach - 16), reach + 1) + reach + 16))
    return keep_lanes(score, i64(scratch + FIRST, r) - key, i64(scratch + LAST, r) - key, _HIDDEN)


@inline
def _add_values(args, scratch, zero, half, keys, slot):
    """values = values * FACTOR + probabilities @ V of the chunk's first `keys` keys; 1, 2 or 4 vectors of columns."""
    width, column = value_bytes(args) // 64, 0
    if len(zero) < MOST_ROWS:
        while column + 4 <= width:
            _add_4_columns(args, scratch, zero, half, keys, slot, column)
            column += 4
    while column + 2 <= width:
        _add_2_columns(args, scratch, zero, half, keys, slot, column)
        column += 2
    if column < width:
        _add_1_column(args, scratch, zero, half, keys, slot, column)


@inline
def _add_1_column(args, scratch, zero, half, keys, slot, column):
    stride, size = value_bytes(args), 2 if half else 4
    values = slot + VALUES + 64 * column
    a = load_scaled(zero, values, stride, scratch + FACTOR)
    for group in range(CHUNK // GROUP):
        v, p = i64(scratch + V_GROUPS, group) + 16 * column * size, scratch + SCORES + 64 * group
        for _ in range(min(keys - GROUP * group, GROUP)):
            a = add_outer_strided(a, load_as_f32(v, half), p, 256)
            v, p = v + stride // 4 * size, p + 4
    store_rows(a, values, stride)


@inline
def _add_2_columns(args, scratch, zero, half, keys, slot, column):
    stride, size = value_bytes(args), 2 if half else 4
    values = slot + VALUES + 64 * column
    a, b = load_scaled(zero, values, stride, scratch + FACTOR), load_scaled(zero, values + 64, stride, scratch + FACTOR)
    for group in range(CHUNK // GROUP):
        v, p = i64(scratch + V_GROUPS, group) + 16 * column * size, scratch + SCORES + 64 * group
        for _ in range(min(keys - GROUP * group, GROUP)):
            a = add_outer_strided(a, load_as_f32(v, half), p, 256)
            b = add_outer_strided(b, load_as_f32(v + 16 * size, half), p, 256)
            v, p = v + stride // 4 * size, p + 4
    store_rows(a, values, stride)
    store_rows(b, values + 64, stride)


@inline
def _add_4_columns(args, scratch, zero, half, keys, slot, column):
    stride, size = value_bytes(args), 2 if half else 4
    values = slot + VALUES + 64 * column
    a, b = load_scaled(zero, values, stride, scratch + FACTOR), load_scaled(zero, values + 64, stride, scratch + FACTOR)
    c, d = (load_scaled(zero, values + 128, stride, scratch + FACTOR),
            load_scaled(zero, values + 192, stride, scratch + FACTOR))
    for group in range(CHUNK // GROUP):
        v, p = i64(scratch + V_GROUPS, group) + 16 * column * size, scratch + SCORES + 64 * group
        for _ in range(min(keys - GROUP * group, GROUP)):
            a = add_outer_strided(a, load_as_f32(v, half), p, 256)
            b = add_outer_strided(b, load_as_f32(v + 16 * size, half), p, 256)
            c = add_outer_strided(c, load_as_f32(v + 32 * size, half), p, 256)
            d = add_outer_strided(d, load_as_f32(v + 48 * size, half), p, 256)
            v, p = v + stride // 4 * size, p + 4
    store_rows(a, values, stride)
    store_rows(b, values + 64, stride)
    store_rows(c, values + 128, stride)
    store_rows(d, values + 192, stride)


@inline
def merge(args, scratch, count, total, part):
    """Add the partial result of later keys to `total`."""
    old, new = load_f32(total + PEAKS), load_f32(part + PEAKS)
    peak = larger(old, new)
    ours, theirs = exp(old - peak), exp(new - peak)
    store_f32(total + PEAKS, peak)
    store_f32(total + TOTALS, fma(load_f32(part + TOTALS), theirs, load_f32(total + TOTALS) * ours))
    store_f32(scratch + FACTOR, ours)
    store_f32(scratch + OTHER_FACTOR, theirs)
    stride = value_bytes(args)
    for r in range(count):
        a, b = f32_ptr(scratch + FACTOR)[r], f32_ptr(scratch + OTHER_FACTOR)[r]
        for at in range(VALUES + r * stride, VALUES + (r + 1) * stride, 64):
            store_f32(total + at, fma(load_f32(part + at), b, load_f32(total + at) * a))
