"""Attention of one tile: up to 8 query rows that share a key/value head, over spans of 128 keys.

The plain twin is `numflow/learn/twins/online.py`.

A span is worked through in chunks of 64 keys with a running maximum (online softmax) and leaves a partial result:
for each row the maximum m, l = sum exp(s - m) and sum exp(s - m) v. Partial results are merged in the order of the
keys. Chunks and spans begin at fixed positions of the sequence and a row's arithmetic does not depend on the other
rows of its tile, so a row's bits are the same whoever computes which spans. A hidden key adds exactly 0.

`half` is None where the inner loops read float32, True for float16, PAIRS for pairs of bfloat16, which queries and
probabilities become too. `coded` is None where they read the cache
itself, anything else where it has few bits: chunks are then decoded to float32 first, or with `half` multiplied as they
are (int8.py). `prefix` is None where values are stored, anything else where they are the first columns of
keys, which are then turned around. Kernels are compiled for one of these. A row of keys or values of few bits is a
rotated one (quant/kv.py): queries are rotated too, and sums of values back in the end.
"""

import numpy as np

from numflow.cpu.attention.coded import decode_keys, decode_values, turn, turn_rows
from numflow.cpu.attention.far import add_far, add_of_queries
from numflow.cpu.attention.int8 import add_coded_values, coded_scores, quantize_query
from numflow.cpu.attention.products import (
    columns_together,
    make_factors,
    put_shares_of,
    scaled_products,
    step_bytes,
    wide_products,
)
from numflow.cpu.attention.slots import (
    COLUMNS,
    FACTOR,
    FIRST,
    HEAD,
    HEIGHTS,
    LAST,
    MOST_ROWS,
    NEXT_PEAK,
    OTHER_FACTOR,
    OWN,
    PEAK,
    PEAKS,
    POSITION,
    QUERIES,
    SCORES,
    SLOTS,
    SPAN,
    SUMS,
    TOTALS,
    VALUES,
    WHERE,
)
from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64, i64_ptr
from numflow.cpu.runtime.kernel import POSITIONS, STARTS
from numflow.cpu.simd.float32 import (
    fma,
    keep_bits,
    keep_lanes,
    lane_numbers,
    larger,
    load_part,
    magnitude,
    max_lanes,
    splat,
    store_part,
    sum_lanes,
)
from numflow.cpu.simd.functions import exp, exp_to_1, tanh
from numflow.cpu.simd.vector import inline, load_f32, store_f32, zero_f32
from numflow.cpu.state.cache import CHUNK, GROUP
from numflow.cpu.state.kv_code import rotate
from numflow.cpu.state.kv_rows import BF16

_NEVER, _HIDDEN = np.float32(-3e38), np.float32(-np.inf)


@inline
def begin_tile(args, scratch, rows, half, coded, sequence, head, first, count):
    """Look up rows first .. first + count of the sequence's (token, query head) pairs under a key head.

    Rows beyond `count` repeat the last one, without effect. Returns the first and the last key any row sees.
    """
    header, group, window = i64(args, SLOTS.header), i64(args, SLOTS.queries_per_key), i64(args, SLOTS.window)
    chunk, k_dim, k_width = i64(args, SLOTS.chunk), i64(args, SLOTS.k_dim), i64(args, SLOTS.k_width)
    scale = np.float32(f64(args, SLOTS.scale))
    positions, begin = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, STARTS))[sequence]
    newest = np.int64(i32_ptr(i64(header, i64(args, SLOTS.lengths)))[sequence]) - 1
    least, most = max(newest, 0), np.int64(-1)
    for r in range(rows):
        row = first + min(r, count - 1)
        t, h = begin + row // group, head * group + row % group
        position = np.int64(positions[t])
        ahead = position if i64(args, SLOTS.causal) else position + window - 1 if window else newest
        first_key, last_key = max(position - window + 1, 0) if window else np.int64(0), min(ahead, newest)
        if i64(args, SLOTS.every):  # entries of the windows that have ended
            last_key = (last_key + 1) // i64(args, SLOTS.every) - 1
        if chunk:
            first_key = max(first_key, position // chunk * chunk)
        least, most = min(least, first_key), max(most, last_key)
        i64_ptr(scratch + FIRST)[r], i64_ptr(scratch + LAST)[r] = first_key, last_key
        i64_ptr(scratch + POSITION)[r], i64_ptr(scratch + HEAD)[r] = position, h
        y = i64(args, SLOTS.y) + 4 * (t * i64(args, SLOTS.y_stride) + h * i64(args, SLOTS.v_dim))
        i64_ptr(scratch + WHERE)[r] = y
        q = i64(args, SLOTS.q) + 4 * (t * i64(args, SLOTS.q_stride) + h * k_dim)
        where = scratch + QUERIES + 2 * partial_bytes(args) + 4 * r * k_width
        for e in range(0, k_width, 16):
            store_part(where + 4 * e, load_part(q + 4 * e, k_dim - e) * scale, k_width - e)
        if i64(args, SLOTS.k_kind) > BF16:
            rotate_row(where, k_width)
            if coded is not None and half is not None:
                quantize_query(where, k_width, _region(args, scratch), r)
        make_factors(half, where, k_width)
    return least, most


@inline
def _region(args, scratch):
    """Memory of int8.py, behind a decoded chunk."""
    return scratch + i64(args, SLOTS.decoded) + 4 * CHUNK * max(i64(args, SLOTS.k_width), i64(args, SLOTS.v_width))


@inline
def rotate_row(row, width):
    """Rotate a row of float32, its own inverse."""
    for at in range(row, row + 4 * width, 128):
        rotate(at)


@inline
def value_bytes(args):
    """Bytes of a row of float32 values."""
    return 4 * i64(args, SLOTS.v_width)


@inline
def partial_bytes(args):
    """slot_bytes, in kernels."""
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
def span_result(args, scratch, rows, half, coded, prefix, sequence, head, span, least, most, slot):
    """The partial result of one span, of the keys least .. most, into `slot`."""
    clear_slot(args, slot)
    store_f32(scratch + PEAK, splat(_NEVER))
    for r in range(rows):
        store_f32(scratch + SUMS + 64 * r, zero_f32())
    for base in range(max(span * SPAN, least // CHUNK * CHUNK), min((span + 1) * SPAN, most + 1), CHUNK):
        key, following = _chunk(args, sequence, head, base), _chunk(args, sequence, head, min(base + CHUNK, most))
        k = i64(i64(args, SLOTS.cache), 0) + key * i64(args, SLOTS.k_size)
        v = k if prefix is not None else i64(i64(args, SLOTS.cache), 1) + key * i64(args, SLOTS.v_size)
        next_k = k + (following - key) * i64(args, SLOTS.k_size)
        next_v = v + (following - key) * i64(args, SLOTS.v_size)
        keys, decoded = min(most + 1 - base, CHUNK), scratch + i64(args, SLOTS.decoded)
        if coded is None:
            _scores(args, scratch, rows, half, keys, k, v)
        elif prefix is None:
            _coded_scores(args, scratch, rows, half, keys, k, next_k, decoded)
        elif i64(args, SLOTS.every):
            _gather(args, scratch, sequence, base, keys, decoded)
            _scores(args, scratch, rows, None, keys, decoded, decoded)
        else:
            _coded_scores(args, scratch, rows, half, keys, k, next_k, decoded)
        if i64(args, SLOTS.of_keys):
            add_far(args, scratch, rows, sequence, base, keys)
        elif i64(args, SLOTS.far):
            add_of_queries(args, scratch, rows, base, keys)
        _probabilities(args, scratch, rows, half, base, most)
        if prefix is not None:
            _add_turned_keys(args, scratch, rows, half, keys, k if coded is None else decoded, slot)
        elif coded is None:
            _add_values(args, scratch, rows, half, v, keys, slot, next_k)
        else:
            _add_coded_values(args, scratch, rows, half, keys, v, next_v, decoded, slot)
    store_f32(slot + PEAKS, load_f32(scratch + PEAK))
    for r in range(rows):
        f32_ptr(slot + TOTALS)[r] = sum_lanes(load_f32(scratch + SUMS + 64 * r))


@inline
def _gather(args, scratch, sequence, base, keys, y):
    """Entries from number `base` on, 16 side by side, at y; behind the last one it is repeated, without effect."""
    header, tokens, every = i64(args, SLOTS.header), i64(args, SLOTS.block_size), i64(args, SLOTS.every)
    table = i32_ptr(i64(header, i64(args, SLOTS.table)) + 4 * sequence * i64(header, i64(args, SLOTS.table_stride)))
    places, width = (tokens + every - 1) // every, i64(args, SLOTS.k_width)
    rows = scratch + i64(args, SLOTS.turned)  # where keys become values, afterwards
    for group in range((keys + GROUP - 1) // GROUP):
        for lane in range(GROUP):
            last = (base + min(group * GROUP + lane, keys - 1) + 1) * every - 1  # token of its window
            entry = np.int64(table[last // tokens]) * places + last % tokens // every
            i64_ptr(rows)[lane] = i64(i64(args, SLOTS.cache), 0) + entry * i64(args, SLOTS.k_size)
        for column in range(0, width, 16):
            turn_rows(rows, 4 * column, y + 64 * (group * width + column))


@inline
def _coded_scores(args, scratch, rows, half, keys, k, ahead, decoded):
    kind, width, size = i64(args, SLOTS.k_kind), i64(args, SLOTS.k_width), i64(args, SLOTS.k_size)
    region = _region(args, scratch)
    if half is not None and kind > BF16:
        coded_scores(rows, kind, width, size, keys, k, ahead, region, scratch + SCORES)
    else:
        decode_keys(kind, width, keys, k, size, region, decoded, ahead)
        _scores(args, scratch, rows, None, keys, decoded, decoded)


@inline
def _add_coded_values(args, scratch, rows, half, keys, v, ahead, decoded, slot):
    kind, width, size = i64(args, SLOTS.v_kind), i64(args, SLOTS.v_width), i64(args, SLOTS.v_size)
    region = _region(args, scratch)
    if half is not None and kind > BF16:
        add_coded_values(rows, kind, width, i64(args, SLOTS.k_width), size, keys, v, ahead, region, scratch + SCORES,
                         scratch + FACTOR, slot + VALUES)
    else:
        decode_values(kind, width, keys, v, size, region, decoded, ahead)
        _add_values(args, scratch, rows, None, decoded, keys, slot, decoded)


@inline
def _add_turned_keys(args, scratch, rows, half, keys, k, slot):
    """Values are the first columns of the chunk's keys at k, in groups of 16 side by side; float16 with `half`."""
    turned, width = scratch + i64(args, SLOTS.turned), i64(args, SLOTS.v_width)
    size, row = 4 if half is None else 2, 4 * i64(args, SLOTS.v_width)
    for group in range((keys + GROUP - 1) // GROUP):
        for column in range(0, width, 16):
            source = k + (group * i64(args, SLOTS.k_width) + column) * GROUP * size
            turn(half, source, turned + group * GROUP * row + 4 * column, row)
    _add_values(args, scratch, rows, None, turned, keys, slot, turned)


@inline
def tile_rows(count):
    """The least number of rows that is compiled and holds `count`."""
    rows = MOST_ROWS
    for height in HEIGHTS:
        if count <= height < rows:
            rows = height
    return rows


@inline
def _columns(rows):
    """Vectors of columns that are summed at a time."""
    columns = 1
    for i in range(len(HEIGHTS)):
        if HEIGHTS[i] == rows:
            columns = COLUMNS[i]
    return columns


@inline
def _chunk(args, sequence, head, key):
    """Begin of the chunk with `key` in the cache, counted in keys of one head."""
    header, block_size = i64(args, SLOTS.header), i64(args, SLOTS.block_size)
    table = i32_ptr(i64(header, i64(args, SLOTS.table)) + 4 * sequence * i64(header, i64(args, SLOTS.table_stride)))
    first = (table[key // block_size] * i64(args, SLOTS.kv_heads) + head) * block_size
    return first + key % block_size // CHUNK * CHUNK


@inline
def _scores(args, scratch, rows, half, keys, k, ahead):
    """q k^T * scale of the chunk whose `keys` keys are at k, some groups of 16 keys at a time."""
    width, step, columns = i64(args, SLOTS.k_width), 16 * step_bytes(half), _columns(rows)
    steps = width // columns_together(half)
    group = steps * step
    for first in range(0, (keys + GROUP - 1) // GROUP, columns):
        wide_products(rows, columns, half, steps, scratch + SCORES + 64 * first, 256,
                      scratch + QUERIES + 2 * partial_bytes(args), 4 * width, k + first * group, group, step,
                      ahead + first * group, 0)


@inline
def _probabilities(args, scratch, rows, half, base, most):
    """exp(score - running maximum), hidden keys 0; FACTOR is what older sums are to be multiplied by."""
    if _as_they_are(args, scratch, rows, base):
        _probabilities_of(args, scratch, rows, half, base, base + CHUNK, True)
    else:
        _probabilities_of(args, scratch, rows, half, base, min(base + CHUNK, most + 1), None)


@inline
def _as_they_are(args, scratch, rows, base):
    """True where every row sees all keys of a chunk, and nothing is done to its scores."""
    plain = not (i64(args, SLOTS.softcap) | i64(args, SLOTS.slopes) | i64(args, SLOTS.bias) | i64(args, SLOTS.chosen))
    first, last = i64(scratch + FIRST, 0), i64(scratch + LAST, 0)
    for r in range(1, rows):
        first, last = max(first, i64(scratch + FIRST, r)), min(last, i64(scratch + LAST, r))
    return plain and first <= base and base + CHUNK - 1 <= last


@inline
def _probabilities_of(args, scratch, rows, half, base, end, plain):
    """The probabilities of keys base .. end - 1; `plain`: as `_as_they_are` says, which unrolls the loops."""
    for r in range(rows):
        peak, group = splat(_HIDDEN), scratch + SCORES + 256 * r
        if plain is None:
            for key in range(base, end, GROUP):
                score = _biased(args, scratch, load_f32(group), r, key)
                store_f32(group, score)
                peak, group = larger(score, peak), group + 64
        else:
            for at in range(0, 4 * CHUNK, 64):
                peak = larger(load_f32(group + at), peak)
        f32_ptr(scratch + NEXT_PEAK)[r] = max(f32_ptr(scratch + PEAK)[r], max_lanes(peak))
    store_f32(scratch + FACTOR, exp(load_f32(scratch + PEAK) - load_f32(scratch + NEXT_PEAK)))
    store_f32(scratch + PEAK, load_f32(scratch + NEXT_PEAK))
    for r in range(rows):
        peak, total, group = splat(f32_ptr(scratch + PEAK)[r]), zero_f32(), scratch + SCORES + 256 * r
        for at in range(0, 4 * (end - base) if plain is None else 4 * CHUNK, 64):
            probability = exp_to_1(load_f32(group + at) - peak)
            put_shares_of(half, group, at // 4, probability)
            total = total + probability
        older = load_f32(scratch + SUMS + 64 * r) * f32_ptr(scratch + FACTOR)[r]
        store_f32(scratch + SUMS + 64 * r, older + total)


@inline
def _biased(args, scratch, score, r, key):
    """Soft cap, bias by distance and masks of 16 scores, of keys key .. key + 15."""
    distance = key - i64(scratch + POSITION, r)
    if i64(args, SLOTS.softcap):
        cap = f64(args, SLOTS.softcap)
        score = tanh(score / cap) * cap
    if i64(args, SLOTS.slopes):
        slope = f32_ptr(i64(args, SLOTS.slopes))[i64(scratch + HEAD, r)]
        score = fma(magnitude(lane_numbers() + np.float32(distance)), -slope, score)
    if i64(args, SLOTS.bias):
        reach = i64(args, SLOTS.reach)
        row = i64(args, SLOTS.bias) + 4 * i64(scratch + HEAD, r) * (2 * reach + 33)
        score = score + load_f32(row + 4 * (min(max(distance, -reach - 16), reach + 1) + reach + 16))
    if i64(args, SLOTS.chosen):
        t = (i64(scratch + WHERE, r) - i64(args, SLOTS.y)) // (4 * i64(args, SLOTS.y_stride))
        words = i32_ptr(i64(args, SLOTS.chosen) + 4 * t * i64(args, SLOTS.chosen_stride))
        score = keep_bits(score, np.int64(words[key // 32]) >> (key % 32), _HIDDEN)
    return keep_lanes(score, i64(scratch + FIRST, r) - key, i64(scratch + LAST, r) - key, _HIDDEN)


@inline
def _add_values(args, scratch, rows, half, v, keys, slot, ahead):
    """values = values * FACTOR + probabilities @ the chunk's first `keys` rows at v."""
    row, step, together = value_bytes(args), step_bytes(half), columns_together(half)
    first, widest = 0, _columns(rows)
    while first < row // 64:
        columns = widest if first + widest <= row // 64 else 1
        scaled_products(rows, columns, half, (keys + together - 1) // together, slot + VALUES + 64 * first, row,
                        scratch + SCORES, 256, v + 16 * step * first, 16 * step, row // 4 * step,
                        ahead + CHUNK * 16 * step // together * first, scratch + FACTOR)
        first += columns


@inline
def merge(args, scratch, rows, total, part):
    """Add the partial result of later keys to `total`."""
    old, new = load_f32(total + PEAKS), load_f32(part + PEAKS)
    peak = larger(old, new)
    ours, theirs = exp(old - peak), exp(new - peak)
    store_f32(total + PEAKS, peak)
    store_f32(total + TOTALS, fma(load_f32(part + TOTALS), theirs, load_f32(total + TOTALS) * ours))
    store_f32(scratch + FACTOR, ours)
    store_f32(scratch + OTHER_FACTOR, theirs)
    stride = value_bytes(args)
    for r in range(rows):
        a, b = f32_ptr(scratch + FACTOR)[r], f32_ptr(scratch + OTHER_FACTOR)[r]
        for at in range(VALUES + r * stride, VALUES + (r + 1) * stride, 64):
            store_f32(total + at, fma(load_f32(part + at), b, load_f32(total + at) * a))
