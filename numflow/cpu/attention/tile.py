"""Attention of one tile: up to 8 query rows that share a key/value head, over spans of 128 keys.

The twin in plain Python is `numflow/learn/twins/online.py`.

A span is processed in chunks of 64 keys with a running maximum (online softmax). Its partial result is, for each row,
the maximum score m, l = sum exp(s - m) and sum exp(s - m) v. Partial results are merged in the order of the keys.
Chunks and spans begin at fixed positions of the sequence, and a row's arithmetic does not depend on the other rows of
the tile, so a row's bits do not depend on the threads that compute its spans. A masked key adds exactly 0.

A kernel is compiled for one value of each of these parameters:
half    None: the inner loops read float32. True: float16. PAIRS: pairs of bfloat16, to which queries and probabilities
        are rounded too.
coded   None: the inner loops read the KV cache itself. Else the cache is quantised: chunks are decoded to float32
        first, or with `half` their codes are multiplied directly (int8.py).
prefix  None: values are stored. Else values are the first columns of keys, which are then transposed.

Quantised rows of keys and values are rotated (quant/kv.py): queries are rotated too, and sums of values are rotated
back at the end.
"""

import numpy as np

from numflow.cpu.attention.coded import decode_keys, decode_values, transpose_16x16, transpose_rows
from numflow.cpu.attention.index_kernels import select_chunk
from numflow.cpu.attention.int8 import add_coded_values, coded_scores, quantize_query
from numflow.cpu.attention.products import (
    columns_per_step,
    make_factors,
    scaled_products,
    step_bytes,
    store_probabilities_as,
    wide_products,
)
from numflow.cpu.attention.relative import add_c2p_scores, add_relative_scores
from numflow.cpu.attention.slots import (
    COLUMNS,
    EXP_SUMS,
    FACTOR,
    FIRST_KEY,
    HEAD,
    HEIGHTS,
    LANE_SUMS,
    LAST_KEY,
    MAX_ROWS,
    MAXIMA,
    NEXT_MAX,
    OTHER_FACTOR,
    POSITION,
    QUERIES,
    RUNNING_MAX,
    SCORES,
    SELECTED,
    SLOTS,
    SPAN,
    SPAN_RESULT,
    VALUES,
    Y_ADDRESS,
)
from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64, i64_ptr
from numflow.cpu.runtime.kernel import POSITIONS, STARTS
from numflow.cpu.simd.float32 import (
    fma,
    keep_bits,
    keep_lanes,
    lane_indices,
    load_part,
    magnitude,
    max_lanes,
    maximum,
    splat,
    store_part,
    sum_lanes,
)
from numflow.cpu.simd.functions import exp, exp_to_1, tanh
from numflow.cpu.simd.vector import inline, load_f32, store_f32, zero_f32
from numflow.cpu.state.cache import CHUNK, GROUP
from numflow.cpu.state.kv_code import rotate
from numflow.cpu.state.kv_rows import BF16

_MIN_SCORE, _MASKED = np.float32(-3e38), np.float32(-np.inf)


@inline
def begin_tile(args, scratch, rows, half, coded, sequence, head, first, count):
    """Prepare rows first .. first + count of the sequence's (token, query head) pairs of a key head.

    Rows beyond `count` repeat the last one, without effect. Returns the first and the last key that any row sees.
    """
    header, group, window = i64(args, SLOTS.header), i64(args, SLOTS.queries_per_key), i64(args, SLOTS.window)
    chunk, k_dim, k_width = i64(args, SLOTS.chunk), i64(args, SLOTS.k_dim), i64(args, SLOTS.k_width)
    scale = np.float32(f64(args, SLOTS.scale))
    positions, begin = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, STARTS))[sequence]
    newest = np.int64(i32_ptr(i64(header, i64(args, SLOTS.lengths)))[sequence]) - 1
    min_key, max_key = max(newest, 0), np.int64(-1)
    for r in range(rows):
        row = first + min(r, count - 1)
        t, h = begin + row // group, head * group + row % group
        position = np.int64(positions[t])
        limit = position if i64(args, SLOTS.causal) else position + window - 1 if window else newest
        first_key, last_key = max(position - window + 1, 0) if window else np.int64(0), min(limit, newest)
        if i64(args, SLOTS.every):  # entries whose `every` tokens are complete
            last_key = (last_key + 1) // i64(args, SLOTS.every) - 1
        if chunk:
            first_key = max(first_key, position // chunk * chunk)
        min_key, max_key = min(min_key, first_key), max(max_key, last_key)
        i64_ptr(scratch + FIRST_KEY)[r], i64_ptr(scratch + LAST_KEY)[r] = first_key, last_key
        i64_ptr(scratch + POSITION)[r], i64_ptr(scratch + HEAD)[r] = position, h
        y = i64(args, SLOTS.y) + 4 * (t * i64(args, SLOTS.y_stride) + h * i64(args, SLOTS.v_dim))
        i64_ptr(scratch + Y_ADDRESS)[r] = y
        q = i64(args, SLOTS.q) + 4 * (t * i64(args, SLOTS.q_stride) + h * k_dim)
        query = scratch + QUERIES + 2 * partial_bytes(args) + 4 * r * k_width
        for e in range(0, k_width, 16):
            store_part(query + 4 * e, load_part(q + 4 * e, k_dim - e) * scale, k_width - e)
        if i64(args, SLOTS.k_kind) > BF16:
            rotate_row(query, k_width)
            if coded is not None and half is not None:
                quantize_query(query, k_width, _int8_memory(args, scratch), r)
        make_factors(half, query, k_width)
    return min_key, max_key


@inline
def _int8_memory(args, scratch):
    """Address of a thread's memory of int8.py, behind a decoded chunk."""
    return scratch + i64(args, SLOTS.decoded) + 4 * CHUNK * max(i64(args, SLOTS.k_width), i64(args, SLOTS.v_width))


@inline
def rotate_row(row, width):
    """Rotate a row of float32 in place, block by block; the rotation is its own inverse."""
    for block in range(row, row + 4 * width, 128):
        rotate(block)


@inline
def value_bytes(args):
    """Bytes of a row of float32 values."""
    return 4 * i64(args, SLOTS.v_width)


@inline
def partial_bytes(args):
    """slots.slot_bytes, for kernels."""
    return VALUES + MAX_ROWS * value_bytes(args)


@inline
def total_slot(args, scratch):
    """Address of the tile's total in scratch memory."""
    return scratch + SPAN_RESULT + partial_bytes(args)


@inline
def clear_slot(args, slot):
    """Store the partial result of no keys."""
    store_f32(slot + MAXIMA, splat(_MIN_SCORE))
    for offset in range(EXP_SUMS, partial_bytes(args), 64):
        store_f32(slot + offset, zero_f32())


@inline
def span_result(args, scratch, rows, half, coded, prefix, sequence, head, span, min_key, max_key, slot):
    """Compute the partial result of the keys min_key .. max_key of one span into `slot`."""
    clear_slot(args, slot)
    store_f32(scratch + RUNNING_MAX, splat(_MIN_SCORE))
    for r in range(rows):
        store_f32(scratch + LANE_SUMS + 64 * r, zero_f32())
    for base in range(max(span * SPAN, min_key // CHUNK * CHUNK), min((span + 1) * SPAN, max_key + 1), CHUNK):
        if i64(args, SLOTS.selected) and not select_chunk(args, scratch, rows, base, max_key):
            continue
        key, next_key = _chunk(args, sequence, head, base), _chunk(args, sequence, head, min(base + CHUNK, max_key))
        k = i64(i64(args, SLOTS.cache), 0) + key * i64(args, SLOTS.k_size)
        v = k if prefix is not None else i64(i64(args, SLOTS.cache), 1) + key * i64(args, SLOTS.v_size)
        next_k = k + (next_key - key) * i64(args, SLOTS.k_size)
        next_v = v + (next_key - key) * i64(args, SLOTS.v_size)
        keys, decoded = min(max_key + 1 - base, CHUNK), scratch + i64(args, SLOTS.decoded)
        if coded is None:
            _scores(args, scratch, rows, half, keys, k, v)
        elif prefix is None:
            _coded_scores(args, scratch, rows, half, keys, k, next_k, decoded)
        elif i64(args, SLOTS.every):
            _gather(args, scratch, sequence, base, keys, decoded)
            _scores(args, scratch, rows, None, keys, decoded, decoded)
        else:
            _coded_scores(args, scratch, rows, half, keys, k, next_k, decoded)
        if i64(args, SLOTS.p2c):
            add_relative_scores(args, scratch, rows, sequence, base, keys)
        elif i64(args, SLOTS.n_buckets):
            add_c2p_scores(args, scratch, rows, base, keys)
        _probabilities(args, scratch, rows, half, base, max_key)
        if prefix is not None:
            _add_prefix_values(args, scratch, rows, half, keys, k if coded is None else decoded, slot)
        elif coded is None:
            _add_values(args, scratch, rows, half, v, keys, slot, next_k)
        else:
            _add_coded_values(args, scratch, rows, half, keys, v, next_v, decoded, slot)
    store_f32(slot + MAXIMA, load_f32(scratch + RUNNING_MAX))
    for r in range(rows):
        f32_ptr(slot + EXP_SUMS)[r] = sum_lanes(load_f32(scratch + LANE_SUMS + 64 * r))


@inline
def _gather(args, scratch, sequence, base, keys, y):
    """Gather `keys` entries from index `base` on to y, in groups of 16 transposed entries.

    The last entry is repeated to fill a group, without effect.
    """
    header, tokens, every = i64(args, SLOTS.header), i64(args, SLOTS.block_size), i64(args, SLOTS.every)
    table = i32_ptr(i64(header, i64(args, SLOTS.table)) + 4 * sequence * i64(header, i64(args, SLOTS.table_stride)))
    block_entries, width = (tokens + every - 1) // every, i64(args, SLOTS.k_width)
    rows = scratch + i64(args, SLOTS.transposed)  # memory that is free until keys are transposed to values
    for group in range((keys + GROUP - 1) // GROUP):
        for lane in range(GROUP):
            last = (base + min(group * GROUP + lane, keys - 1) + 1) * every - 1  # last token of the entry
            entry = np.int64(table[last // tokens]) * block_entries + last % tokens // every
            i64_ptr(rows)[lane] = i64(i64(args, SLOTS.cache), 0) + entry * i64(args, SLOTS.k_size)
        for column in range(0, width, 16):
            transpose_rows(rows, 4 * column, y + 64 * (group * width + column))


@inline
def _coded_scores(args, scratch, rows, half, keys, k, ahead, decoded):
    kind, width, size = i64(args, SLOTS.k_kind), i64(args, SLOTS.k_width), i64(args, SLOTS.k_size)
    memory = _int8_memory(args, scratch)
    if half is not None and kind > BF16:
        coded_scores(rows, kind, width, size, keys, k, ahead, memory, scratch + SCORES)
    else:
        decode_keys(kind, width, keys, k, size, memory, decoded, ahead)
        _scores(args, scratch, rows, None, keys, decoded, decoded)


@inline
def _add_coded_values(args, scratch, rows, half, keys, v, ahead, decoded, slot):
    kind, width, size = i64(args, SLOTS.v_kind), i64(args, SLOTS.v_width), i64(args, SLOTS.v_size)
    memory = _int8_memory(args, scratch)
    if half is not None and kind > BF16:
        add_coded_values(rows, kind, width, i64(args, SLOTS.k_width), size, keys, v, ahead, memory, scratch + SCORES,
                         scratch + FACTOR, slot + VALUES)
    else:
        decode_values(kind, width, keys, v, size, memory, decoded, ahead)
        _add_values(args, scratch, rows, None, decoded, keys, slot, decoded)


@inline
def _add_prefix_values(args, scratch, rows, half, keys, k, slot):
    """Add values that are the first columns of the chunk's keys at k, which are in groups of 16; float16 if `half`."""
    transposed, width = scratch + i64(args, SLOTS.transposed), i64(args, SLOTS.v_width)
    size, row = 4 if half is None else 2, 4 * i64(args, SLOTS.v_width)
    for group in range((keys + GROUP - 1) // GROUP):
        for column in range(0, width, 16):
            source = k + (group * i64(args, SLOTS.k_width) + column) * GROUP * size
            transpose_16x16(half, source, transposed + group * GROUP * row + 4 * column, row)
    _add_values(args, scratch, rows, None, transposed, keys, slot, transposed)


@inline
def tile_rows(count):
    """The smallest compiled number of rows that is at least `count`."""
    rows = MAX_ROWS
    for height in HEIGHTS:
        if count <= height < rows:
            rows = height
    return rows


@inline
def _columns(rows):
    """Vectors of columns per register tile."""
    columns = 1
    for i in range(len(HEIGHTS)):
        if HEIGHTS[i] == rows:
            columns = COLUMNS[i]
    return columns


@inline
def _chunk(args, sequence, head, key):
    """Index in the cache, in keys of one head, of the first key of the chunk with `key`."""
    header, block_size = i64(args, SLOTS.header), i64(args, SLOTS.block_size)
    table = i32_ptr(i64(header, i64(args, SLOTS.table)) + 4 * sequence * i64(header, i64(args, SLOTS.table_stride)))
    first = (table[key // block_size] * i64(args, SLOTS.kv_heads) + head) * block_size
    return first + key % block_size // CHUNK * CHUNK


@inline
def _scores(args, scratch, rows, half, keys, k, ahead):
    """scores = q k^T * scale of the chunk whose `keys` keys are at k, some groups of 16 keys at a time."""
    width, step, columns = i64(args, SLOTS.k_width), 16 * step_bytes(half), _columns(rows)
    steps = width // columns_per_step(half)
    group = steps * step
    for first in range(0, (keys + GROUP - 1) // GROUP, columns):
        wide_products(rows, columns, half, steps, scratch + SCORES + 64 * first, 256,
                      scratch + QUERIES + 2 * partial_bytes(args), 4 * width, k + first * group, group, step,
                      ahead + first * group, 0)


@inline
def _probabilities(args, scratch, rows, half, base, max_key):
    """probabilities = exp(score - running maximum), 0 for masked keys; FACTOR rescales the sums of earlier chunks."""
    if _all_unmasked(args, scratch, rows, base):
        _softmax_chunk(args, scratch, rows, half, base, base + CHUNK, True)
    else:
        _softmax_chunk(args, scratch, rows, half, base, min(base + CHUNK, max_key + 1), None)


@inline
def _all_unmasked(args, scratch, rows, base):
    """True if every row sees all keys of the chunk, and scores have no softcap, bias or selection."""
    unadjusted = not (i64(args, SLOTS.softcap) | i64(args, SLOTS.slopes) | i64(args, SLOTS.bias)
                      | i64(args, SLOTS.selected))
    first, last = i64(scratch + FIRST_KEY, 0), i64(scratch + LAST_KEY, 0)
    for r in range(1, rows):
        first, last = max(first, i64(scratch + FIRST_KEY, r)), min(last, i64(scratch + LAST_KEY, r))
    return unadjusted and first <= base and base + CHUNK - 1 <= last


@inline
def _softmax_chunk(args, scratch, rows, half, base, end, unmasked):
    """Probabilities of keys base .. end - 1. unmasked: True if `_all_unmasked`, which unrolls the loops, else None."""
    for r in range(rows):
        peak, group = splat(_MASKED), scratch + SCORES + 256 * r
        if unmasked is None:
            for key in range(base, end, GROUP):
                score = _adjusted(args, scratch, load_f32(group), r, key)
                store_f32(group, score)
                peak, group = maximum(score, peak), group + 64
        else:
            for offset in range(0, 4 * CHUNK, 64):
                peak = maximum(load_f32(group + offset), peak)
        f32_ptr(scratch + NEXT_MAX)[r] = max(f32_ptr(scratch + RUNNING_MAX)[r], max_lanes(peak))
    store_f32(scratch + FACTOR, exp(load_f32(scratch + RUNNING_MAX) - load_f32(scratch + NEXT_MAX)))
    store_f32(scratch + RUNNING_MAX, load_f32(scratch + NEXT_MAX))
    for r in range(rows):
        peak, total, group = splat(f32_ptr(scratch + RUNNING_MAX)[r]), zero_f32(), scratch + SCORES + 256 * r
        for offset in range(0, 4 * (end - base) if unmasked is None else 4 * CHUNK, 64):
            probability = exp_to_1(load_f32(group + offset) - peak)
            store_probabilities_as(half, group, offset // 4, probability)
            total = total + probability
        older = load_f32(scratch + LANE_SUMS + 64 * r) * f32_ptr(scratch + FACTOR)[r]
        store_f32(scratch + LANE_SUMS + 64 * r, older + total)


@inline
def _adjusted(args, scratch, score, r, key):
    """Scores of keys key .. key + 15 with softcap, relative position bias and masks."""
    distance = key - i64(scratch + POSITION, r)
    if i64(args, SLOTS.softcap):
        cap = f64(args, SLOTS.softcap)
        score = tanh(score / cap) * cap
    if i64(args, SLOTS.slopes):
        slope = f32_ptr(i64(args, SLOTS.slopes))[i64(scratch + HEAD, r)]
        score = fma(magnitude(lane_indices() + np.float32(distance)), -slope, score)
    if i64(args, SLOTS.bias):
        reach = i64(args, SLOTS.reach)
        row = i64(args, SLOTS.bias) + 4 * i64(scratch + HEAD, r) * (2 * reach + 33)
        score = score + load_f32(row + 4 * (min(max(distance, -reach - 16), reach + 1) + reach + 16))
    if i64(args, SLOTS.selected):
        score = keep_bits(score, i64(scratch + SELECTED, r) >> (key % CHUNK), _MASKED)
    return keep_lanes(score, i64(scratch + FIRST_KEY, r) - key, i64(scratch + LAST_KEY, r) - key, _MASKED)


@inline
def _add_values(args, scratch, rows, half, v, keys, slot, ahead):
    """values = values * FACTOR + probabilities @ the chunk's first `keys` values at v."""
    row, step, per_step = value_bytes(args), step_bytes(half), columns_per_step(half)
    first, widest = 0, _columns(rows)
    while first < row // 64:
        columns = widest if first + widest <= row // 64 else 1
        scaled_products(rows, columns, half, (keys + per_step - 1) // per_step, slot + VALUES + 64 * first, row,
                        scratch + SCORES, 256, v + 16 * step * first, 16 * step, row // 4 * step,
                        ahead + CHUNK * 16 * step // per_step * first, scratch + FACTOR)
        first += columns


@inline
def merge(args, scratch, rows, total, part):
    """Add the partial result of later keys to `total`."""
    old, new = load_f32(total + MAXIMA), load_f32(part + MAXIMA)
    peak = maximum(old, new)
    ours, theirs = exp(old - peak), exp(new - peak)
    store_f32(total + MAXIMA, peak)
    store_f32(total + EXP_SUMS, fma(load_f32(part + EXP_SUMS), theirs, load_f32(total + EXP_SUMS) * ours))
    store_f32(scratch + FACTOR, ours)
    store_f32(scratch + OTHER_FACTOR, theirs)
    stride = value_bytes(args)
    for r in range(rows):
        a, b = f32_ptr(scratch + FACTOR)[r], f32_ptr(scratch + OTHER_FACTOR)[r]
        for offset in range(VALUES + r * stride, VALUES + (r + 1) * stride, 64):
            store_f32(total + offset, fma(load_f32(part + offset), b, load_f32(total + offset) * a))
