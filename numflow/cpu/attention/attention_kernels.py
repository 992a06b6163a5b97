"""The kernels of `attention` (attention.py)."""

import numpy as np

from numflow.cpu.attention.products import PAIRS
from numflow.cpu.attention.slots import (
    DONE,
    EXP_SUMS,
    FACTOR,
    HEAD,
    JOIN,
    MAX_ROWS,
    MAXIMA,
    NEXT,
    SLOTS,
    SPAN,
    SPAN_RESULT,
    SPANS_DONE,
    TILES_PER_THREAD,
    VALUES,
    Y_ADDRESS,
)
from numflow.cpu.attention.tile import (
    begin_tile,
    clear_slot,
    merge,
    partial_bytes,
    rotate_row,
    span_result,
    tile_rows,
    total_slot,
    value_bytes,
)
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.atomic import exchange, fetch_add
from numflow.cpu.runtime.kernel import N_SEQUENCES, STARTS, kernel
from numflow.cpu.simd.float32 import fma, load_part, maximum, splat, store_part
from numflow.cpu.simd.functions import exp
from numflow.cpu.simd.vector import inline, load_f32, merged, store_f32
from numflow.cpu.state.kv_rows import BF16


@kernel
def attention_f32(args, thread, n_threads):
    _attention(args, thread, n_threads, None, None, None)


@kernel
def attention_f16(args, thread, n_threads):
    _attention(args, thread, n_threads, True, None, None)


@kernel
def attention_bf16(args, thread, n_threads):
    _attention(args, thread, n_threads, PAIRS, None, None)


@kernel
def attention_coded(args, thread, n_threads):
    _attention(args, thread, n_threads, None, True, None)


@kernel
def attention_coded_int8(args, thread, n_threads):
    _attention(args, thread, n_threads, True, True, None)


@kernel
def attention_f32_prefix(args, thread, n_threads):
    _attention(args, thread, n_threads, None, None, True)


@kernel
def attention_f16_prefix(args, thread, n_threads):
    _attention(args, thread, n_threads, True, None, True)


@kernel
def attention_coded_prefix(args, thread, n_threads):
    _attention(args, thread, n_threads, None, True, True)


@merged
def _attention(args, thread, n_threads, half, coded, prefix):
    counters, scratch = i64(args, SLOTS.counters), i64(args, SLOTS.scratch) + thread * i64(args, SLOTS.scratch_bytes)
    tiles, spans = _count(args)
    few = n_threads > 1 and tiles < TILES_PER_THREAD * n_threads
    parts = spans if few and tiles * spans <= i64(args, SLOTS.max_slots) else 1
    sequence, before, count = 0, 0, _tiles(args, 0)
    item = fetch_add(counters + NEXT, 1)
    while item < tiles * parts:
        tile = item // parts
        while tile >= before + count:
            before += count
            sequence += 1
            count = _tiles(args, sequence)
        _attend(args, scratch, half, coded, prefix, sequence, tile - before, tile, item % parts, parts)
        item = fetch_add(counters + NEXT, 1)
    if fetch_add(counters + DONE, 1) == n_threads - 1:
        exchange(counters + NEXT, 0)
        exchange(counters + DONE, 0)


@inline
def _rows(args, sequence):
    """Rows, (token, query head) pairs, of a sequence per key head."""
    starts = i32_ptr(i64(i64(args, SLOTS.header), STARTS))
    return (starts[sequence + 1] - starts[sequence]) * i64(args, SLOTS.queries_per_key)


@inline
def _tiles(args, sequence):
    return (_rows(args, sequence) + MAX_ROWS - 1) // MAX_ROWS * i64(args, SLOTS.kv_heads)


@inline
def _count(args):
    """Tiles of the batch, and spans of its longest sequence."""
    header, tiles, longest = i64(args, SLOTS.header), np.int64(0), np.int64(0)
    lengths = i32_ptr(i64(header, i64(args, SLOTS.lengths)))
    for sequence in range(i64(header, N_SEQUENCES)):
        tiles += _tiles(args, sequence)
        longest = max(longest, np.int64(lengths[sequence]))
    return tiles, max((longest // max(i64(args, SLOTS.every), 1) + SPAN - 1) // SPAN, 1)


@merged
def _attend(args, scratch, half, coded, prefix, sequence, index, tile, part, parts):
    """Compute one tile, or span `part` of its `parts` spans. The last rows come first: they see the most keys."""
    per_head = _tiles(args, sequence) // i64(args, SLOTS.kv_heads)
    head, first = index // per_head, (per_head - 1 - index % per_head) * MAX_ROWS
    count = min(_rows(args, sequence) - first, MAX_ROWS)
    rows = tile_rows(count)
    min_key, max_key = begin_tile(args, scratch, rows, half, coded, sequence, head, first, count)
    begin, end, total = min_key // SPAN, max_key // SPAN + 1, total_slot(args, scratch)
    partials = i64(args, SLOTS.partials) + tile * parts * partial_bytes(args)
    if end <= begin:
        clear_slot(args, total)
    for span in range(begin if parts == 1 else max(begin, part), end if parts == 1 else min(end, part + 1)):
        result = total if span == begin else scratch + SPAN_RESULT
        slot = result if parts == 1 else partials + span * partial_bytes(args)
        span_result(args, scratch, rows, half, coded, prefix, sequence, head, span, min_key, max_key, slot)
        if parts == 1 and span > begin:
            merge(args, scratch, count, total, slot)
    if parts > 1:
        done = i64(args, SLOTS.counters) + SPANS_DONE + 8 * tile
        if fetch_add(done, 1) < parts - 1:
            return
        exchange(done, 0)
        total = partials + begin * partial_bytes(args) if begin < end else total
        for span in range(begin + 1, end):
            merge(args, scratch, count, total, partials + span * partial_bytes(args))
    _finish(args, scratch, count, total)


@kernel
def attention_join(args, thread, n_threads):
    """y = the two results, each weighted by its share of the sum of exponentials. Items: rows times heads."""
    heads, width = i64(args, JOIN.heads), i64(args, JOIN.width)
    begin, end = share(i64(i64(args, JOIN.header), i64(args, JOIN.rows)) * heads, thread, n_threads)
    for item in range(begin, end):
        t, head = item // heads, item % heads
        ours, theirs = f32_ptr(i64(args, JOIN.sums) + 8 * item), f32_ptr(i64(args, JOIN.other_sums) + 8 * item)
        peak = max(ours[0], theirs[0])
        a, b = exp(splat(ours[0] - peak)) * ours[1], exp(splat(theirs[0] - peak)) * theirs[1]
        total = a + b
        y = i64(args, JOIN.y) + 4 * (t * i64(args, JOIN.y_stride) + head * width)
        other = i64(args, JOIN.other) + 4 * (t * i64(args, JOIN.other_stride) + head * width)
        for i in range(0, width, 16):
            weighted = load_part(y + 4 * i, width - i) * (a / total)
            store_part(y + 4 * i, fma(load_part(other + 4 * i, width - i), b / total, weighted), width - i)


@inline
def _store_sums(args, scratch, count, total):
    """Store the maximum score and the sum of exponentials of each row of a tile."""
    heads = i64(args, SLOTS.kv_heads) * i64(args, SLOTS.queries_per_key)
    for r in range(count):
        t = (i64(scratch + Y_ADDRESS, r) - i64(args, SLOTS.y)) // (4 * i64(args, SLOTS.y_stride))
        sums = f32_ptr(i64(args, SLOTS.sums) + 8 * (t * heads + i64(scratch + HEAD, r)))
        sums[0], sums[1] = f32_ptr(total + MAXIMA)[r], f32_ptr(total + EXP_SUMS)[r]


@inline
def _finish(args, scratch, count, total):
    """y = values / l. A sink is one more term of l; a row that sees no key is zero."""
    sinks = i64(args, SLOTS.sinks)
    if sinks:
        for r in range(count):
            f32_ptr(scratch + FACTOR)[r] = f32_ptr(sinks)[i64(scratch + HEAD, r)]
        peak, sink = load_f32(total + MAXIMA), load_f32(scratch + FACTOR)
        higher = maximum(peak, sink)
        ours = exp(peak - higher)
        store_f32(scratch + FACTOR, ours)
        store_f32(total + EXP_SUMS, load_f32(total + EXP_SUMS) * ours + exp(sink - higher))
        store_f32(total + MAXIMA, higher)
    if i64(args, SLOTS.sums):
        _store_sums(args, scratch, count, total)
    for r in range(count):
        weight = f32_ptr(scratch + FACTOR)[r] if sinks else np.float32(1)
        exp_sum = f32_ptr(total + EXP_SUMS)[r]
        factor = weight / exp_sum if exp_sum != 0 else np.float32(0)
        y, values = i64(scratch + Y_ADDRESS, r), total + VALUES + r * value_bytes(args)
        if i64(args, SLOTS.v_kind) > BF16:
            rotate_row(values, i64(args, SLOTS.v_width))
        for column in range(0, i64(args, SLOTS.v_dim), 16):
            store_part(y + 4 * column, load_f32(values + 4 * column) * factor, i64(args, SLOTS.v_dim) - column)
