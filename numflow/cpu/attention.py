"""Softmax attention over the paged cache (op `attention`), for prefill and decoding alike.

A tile is up to 8 rows, (token, query head) pairs that share a key/value head; attention_tile.py computes it. Threads
take tiles one by one. Where there are too few of them (decoding at a long context), they take single spans of 128
keys, and whoever finishes the last span of a tile merges them; either way the same sums are taken in the same order.
"""

import math

import numpy as np
from numba import njit

from numflow.cpu.atomic import exchange, fetch_add
from numflow.cpu.attention_tile import (
    COUNTERS,
    FACTOR,
    HEAD,
    HEADER,
    KV_HEADS,
    LENGTHS,
    MOST_ROWS,
    OWN,
    PARTIALS,
    PEAKS,
    QUERIES_PER_KEY,
    SCRATCH,
    SCRATCH_BYTES,
    SINKS,
    SLOTS,
    SPAN,
    TOTALS,
    V_DIM,
    V_KIND,
    V_WIDTH,
    VALUES,
    WHERE,
    begin_tile,
    clear_slot,
    merge,
    partial_bytes,
    rotate_row,
    scratch_bytes,
    slot_bytes,
    span_result,
    tile_rows,
    total_slot,
    value_bytes,
)
from numflow.cpu.kernel import N_SEQUENCES, STARTS, Call, f32_ptr, i32_ptr, i64, kernel
from numflow.cpu.kv_code import F16
from numflow.cpu.math import exp
from numflow.cpu.simd import inline, load_f32, store_f32
from numflow.cpu.simd_float import larger, store_part
from numflow.ops import Step, param

# Partial results there is room for; at most this many (tile, span) pairs are taken apart.
MOST_SLOTS = 4096
# Byte offsets in the counters: the next item, threads that are done, spans done of each tile.
_NEXT, _DONE, _SPANS_DONE = 0, 64, 128
# Merged by Numba before anything is compiled: LLVM meets the long functions inside once, not once for each level.
merged = njit(inline="always", error_model="numpy")
_TILES_PER_THREAD = 4  # with fewer tiles than this, spans are shared out


def attention(step: Step, ctx) -> list[Call]:
    """q f32 [T, H*E] -> y f32 [T, H*E_v]; slopes, sinks f32 [H]; buckets f32 [n, H]."""
    cache, heads = ctx.caches[param(step, "cache")], param(step, "heads")
    shape, own = cache.shape, cache.shape.kind == "self"
    slopes, sinks = (ctx.vector(step.weights[role]) if role in step.weights else 0 for role in ("slopes", "sinks"))
    causal, reach, window = param(step, "causal"), param(step, "bucket_distance"), param(step, "window") if own else 0
    bias = bias_by_distance(ctx.vector(step.weights["buckets"]).reshape(-1, heads), reach, causal) \
        if "buckets" in step.weights else 0
    (decoded, per_thread), tiles = scratch_bytes(*cache.widths), _TILES_PER_THREAD * ctx.n_threads
    scratch = ctx.scratch("attention", ctx.n_threads * per_thread)
    partials = ctx.scratch("attention partials", MOST_SLOTS * slot_bytes(cache.widths[1]))
    counters = ctx.scratch("attention counters", _SPANS_DONE + 8 * tiles)
    fn = {("f32", "f32"): _attention_f32, ("f16", "f16"): _attention_f16}.get(cache.kinds, _attention_coded)
    return [Call.of(step, fn, ctx.header, *ctx.view(step.inputs[0]), *ctx.view(step.outputs[0]), cache.addresses,
                    shape.kv_heads, heads // shape.kv_heads, shape.k_dim, shape.v_dim, cache.block_size,
                    *cache.table_fields, float(param(step, "scale")), own and causal, window,
                    float(param(step, "softcap")), slopes, sinks, bias, reach, scratch, per_thread, partials,
                    MOST_SLOTS, counters, decoded, *cache.row_fields)]


def bias_by_distance(buckets: np.ndarray, reach: int, causal: bool) -> np.ndarray:
    """T5's relative bias [n, H] written out: f32 [H, 2 * reach + 33] for key - query from -(reach + 16) to reach + 16.

    Half of the buckets are exact small distances, the rest grow logarithmically up to `reach`. Without causality the
    upper half of all buckets is for keys after the query.
    """
    count, distance = len(buckets), np.arange(-reach - 16, reach + 17)
    if causal:
        back, first = np.maximum(-distance, 0), np.zeros_like(distance)
    else:
        count //= 2
        back, first = np.abs(distance), np.where(distance > 0, count, 0)
    exact = count // 2
    ratio = np.log(np.maximum(back, exact).astype(np.float32) / exact) / np.float32(math.log(reach / exact))
    far = np.minimum(exact + (ratio * (count - exact)).astype(np.int64), count - 1)
    return np.ascontiguousarray(buckets[first + np.where(back < exact, back, far)].T)


@kernel
def _attention_f32(args, thread, n_threads):
    _attention(args, thread, n_threads, None, None)


@kernel
def _attention_f16(args, thread, n_threads):
    _attention(args, thread, n_threads, True, None)


@kernel
def _attention_coded(args, thread, n_threads):
    _attention(args, thread, n_threads, None, True)


@merged
def _attention(args, thread, n_threads, half, coded):
    counters, scratch = i64(args, COUNTERS), i64(args, SCRATCH) + thread * i64(args, SCRATCH_BYTES)
    tiles, spans = _count(args)
    few = n_threads > 1 and tiles < _TILES_PER_THREAD * n_threads
    parts = spans if few and tiles * spans <= i64(args, SLOTS) else 1
    sequence, before, own = 0, 0, _tiles(args, 0)
    item = fetch_add(counters + _NEXT, 1)
    while item < tiles * parts:
        tile = item // parts
        while tile >= before + own:
            before += own
            sequence += 1
            own = _tiles(args, sequence)
        _attend(args, scratch, half, coded, sequence, tile - before, tile, item % parts, parts)
        item = fetch_add(counters + _NEXT, 1)
    if fetch_add(counters + _DONE, 1) == n_threads - 1:
        exchange(counters + _NEXT, 0)
        exchange(counters + _DONE, 0)


@inline
def _rows(args, sequence):
    """Rows of a sequence under each key head."""
    starts = i32_ptr(i64(i64(args, HEADER), STARTS))
    return (starts[sequence + 1] - starts[sequence]) * i64(args, QUERIES_PER_KEY)


@inline
def _tiles(args, sequence):
    return (_rows(args, sequence) + MOST_ROWS - 1) // MOST_ROWS * i64(args, KV_HEADS)


@inline
def _count(args):
    """Tiles of the batch, and spans of its longest sequence."""
    header, tiles, longest = i64(args, HEADER), np.int64(0), np.int64(0)
    lengths = i32_ptr(i64(header, i64(args, LENGTHS)))
    for sequence in range(i64(header, N_SEQUENCES)):
        tiles += _tiles(args, sequence)
        longest = max(longest, np.int64(lengths[sequence]))
    return tiles, (longest + SPAN - 1) // SPAN


@merged
def _attend(args, scratch, half, coded, sequence, index, tile, part, parts):
    """One tile, or of its `parts` spans the one number `part`. The last rows come first: they see the most keys."""
    per_head = _tiles(args, sequence) // i64(args, KV_HEADS)
    head, first = index // per_head, (per_head - 1 - index % per_head) * MOST_ROWS
    count = min(_rows(args, sequence) - first, MOST_ROWS)
    rows = tile_rows(count)
    least, most = begin_tile(args, scratch, rows, sequence, head, first, count)
    begin, end, total = least // SPAN, most // SPAN + 1, total_slot(args, scratch)
    partials = i64(args, PARTIALS) + tile * parts * partial_bytes(args)
    if parts == 1:
        clear_slot(args, total)
    for span in range(begin if parts == 1 else max(begin, part), end if parts == 1 else min(end, part + 1)):
        slot = scratch + OWN if parts == 1 else partials + span * partial_bytes(args)
        span_result(args, scratch, rows, half, coded, sequence, head, span, least, most, slot)
        if parts == 1:
            merge(args, scratch, count, total, slot)
    if parts > 1:
        done = i64(args, COUNTERS) + _SPANS_DONE + 8 * tile
        if fetch_add(done, 1) < parts - 1:
            return
        exchange(done, 0)
        clear_slot(args, total)
        for span in range(begin, end):
            merge(args, scratch, count, total, partials + span * partial_bytes(args))
    _finish(args, scratch, count, total)


@inline
def _finish(args, scratch, count, total):
    """y = values / l. A sink is one more term of l; a row that sees nothing is zero."""
    sinks = i64(args, SINKS)
    if sinks:
        for r in range(count):
            f32_ptr(scratch + FACTOR)[r] = f32_ptr(sinks)[i64(scratch + HEAD, r)]
        peak, sink = load_f32(total + PEAKS), load_f32(scratch + FACTOR)
        higher = larger(peak, sink)
        ours = exp(peak - higher)
        store_f32(scratch + FACTOR, ours)
        store_f32(total + TOTALS, load_f32(total + TOTALS) * ours + exp(sink - higher))
    for r in range(count):
        weight = f32_ptr(scratch + FACTOR)[r] if sinks else np.float32(1)
        under = f32_ptr(total + TOTALS)[r]
        factor = weight / under if under != 0 else np.float32(0)
        y, values = i64(scratch + WHERE, r), total + VALUES + r * value_bytes(args)
        if i64(args, V_KIND) > F16:
            rotate_row(values, i64(args, V_WIDTH))
        for column in range(0, i64(args, V_DIM), 16):
            store_part(y + 4 * column, load_f32(values + 4 * column) * factor, i64(args, V_DIM) - column)
