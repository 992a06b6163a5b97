"""Softmax attention over the paged cache (op `attention`).

y = softmax(softcap(scale * q k^T) + bias, over the visible keys of the sequence) v

A warp works for one query head of one row. With few rows and many keys several warps share the keys of a head: each
leaves its largest score, its sum of weights and its weighted values, and a second kernel joins them in order.
"""

import functools
import math

from numflow.cuda.arithmetic import exp, fmax, half_to_float, high_half, log, low_half, tanh
from numflow.cuda.call import N_TOKENS, Call, Sizes
from numflow.cuda.device import Launch
from numflow.cuda.intrinsic import LocalArray, SharedArray
from numflow.cuda.intrinsics import (
    as_floats,
    as_u16,
    as_words,
    block_x,
    block_y,
    block_z,
    grid_z,
    lane_index,
    load4,
    sync_warp,
)
from numflow.cuda.kernel import Kernel, device, kernel
from numflow.cuda.reduce import warp_max, warp_sum
from numflow.cuda.scalar import f32, i32, u8, u32
from numflow.ops import Step, param

LOWEST = -3.0e38
PART_KEYS = 256   # keys of a part, at least
MOST_PARTS = 32
FEW_ROWS = 64     # rows up to which keys are shared


def attention(step: Step, ctx) -> list[Call]:
    """q f32 [T, H * E], slopes [H], sinks [H], buckets [n, H] -> y f32 [T, H * E_v]."""
    (q,), (y,), batch, heads = step.inputs, step.outputs, ctx.batch, param(step, "heads")
    cache = ctx.caches[param(step, "cache")]
    shape, causal, window = cache.shape, param(step, "causal"), param(step, "window")
    slopes, sinks, buckets = (ctx.vector(step.weights[role]) if role in step.weights else None
                              for role in ("slopes", "sinks", "buckets"))
    n_buckets = ctx.network.weights[step.weights["buckets"]].shape[0] if buckets else 0
    is_self = shape.kind == "self"
    chosen = attention_kernel(cache.types[0], cache.types[1], shape.k_dim, -(-shape.v_dim // 32), slopes is not None,
                              sinks is not None, buckets is not None)
    exact = (n_buckets if causal else n_buckets // 2) // 2
    spread = math.log(param(step, "bucket_distance") / exact) if buckets else 1.0
    partial = ctx.scratch("parts of attention", 4 * FEW_ROWS * heads * MOST_PARTS * (shape.v_dim + 2))
    args = (*ctx.view(y), partial, *ctx.view(q), cache.k, cache.v, slopes, sinks, buckets, batch.ref("positions"),
            batch.ref("sequence_of"), batch.ref(cache.table), batch.stride, batch.ref(cache.lengths), batch.counts,
            heads, shape.kv_heads, shape.v_dim, cache.block_size, param(step, "scale"),
            param(step, "softcap"), causal and is_self, window if is_self else 0, n_buckets, 1 / spread)

    def parts(sizes: Sizes) -> int:
        many = sizes.rows[N_TOKENS] > FEW_ROWS
        return 1 if many else max(1, min(MOST_PARTS, sizes.keys // PART_KEYS))

    def attend(sizes: Sizes) -> Launch:
        return Launch(chosen, (heads, sizes.rows[N_TOKENS], parts(sizes)), args)

    def join(sizes: Sizes) -> Launch:
        return Launch(_join, (heads, sizes.rows[N_TOKENS], 1), (
            *ctx.view(y), partial, parts(sizes), batch.counts, heads, shape.v_dim))

    return [Call(step, attend), Call(step, join).only(lambda sizes: parts(sizes) > 1)]


@kernel("attention_join", 32)
def _join(y: f32.ptr, y_stride: u32, partial: f32.ptr, parts: u32, counts: i32.ptr, heads: u32, v_dim: u32):
    """Parts hold peak, sum, then v_dim weighted values."""
    head, t, lane = block_x(), block_y(), u32(lane_index())
    if t >= counts[N_TOKENS]:
        return
    width = u32(v_dim + 2)
    first = partial + (t * heads + head) * parts * width
    peak, part = f32(LOWEST), u32(0)
    while part < parts:
        peak = fmax(peak, first[part * width])
        part = u32(part + 1)
    total, part = f32(0), u32(0)
    while part < parts:
        total += exp(first[part * width] - peak) * first[part * width + 1]
        part = u32(part + 1)
    column = lane
    while column < v_dim:
        value, part = f32(0), u32(0)
        while part < parts:
            value += exp(first[part * width] - peak) * first[part * width + 2 + column]
            part = u32(part + 1)
        y[t * y_stride + head * v_dim + column] = value / total
        column = u32(column + 32)


@device
def _bucket(distance, count, inverse, causal):
    """T5's bucket of a distance (key - query): half are exact, the rest logarithmic."""
    first, back = i32(0), i32(-distance)
    if causal:
        back = i32(0) if back < 0 else back
    else:
        count = count >> u32(1)
        first = i32(count) if distance > 0 else i32(0)
        back = i32(-back) if back < 0 else back
    exact = i32(count >> u32(1))
    if back < exact:
        return first + back
    far = exact + i32(log(f32(back) / f32(exact)) * inverse * f32(i32(count) - exact))
    return first + (far if far < i32(count) - 1 else i32(count) - 1)


@functools.cache
def attention_kernel(k_type: str, v_type: str, k_dim: int, columns: int, has_slopes: bool, has_sinks: bool,
                     has_buckets: bool) -> Kernel:
    """A warp for each row and head, 32 keys at a time; a lane owns a key of the scores and `columns` of the output."""
    parts = LocalArray(f32, columns)
    weights, values = SharedArray(f32, 32), SharedArray(u32, 32)
    half_k, half_v = k_type == "f16", v_type == "f16"
    queries = SharedArray(f32, -(-k_dim // 8) * 8)
    wide = half_k and k_dim % 8 == 0  # rows of keys are on 16-byte boundaries
    extras = "_slopes" * has_slopes + "_sinks" * has_sinks + "_buckets" * has_buckets

    @kernel(f"attention_{k_type}_{v_type}_{k_dim}_{columns}{extras}", 32, exact=has_buckets)
    def _attention(y: f32.ptr, y_stride: u32, partial: f32.ptr, q: f32.ptr, q_stride: u32, k: u8.ptr, v: u8.ptr,
                   slopes: f32.ptr, sinks: f32.ptr, buckets: f32.ptr, positions: i32.ptr, sequence_of: i32.ptr,
                   table: i32.ptr, table_stride: u32, lengths: i32.ptr, counts: i32.ptr, heads: u32, kv_heads: u32,
                   v_dim: u32, block_size: u32, scale: f32, cap: f32, causal: u32, window: i32, n_buckets: u32,
                   spread: f32):
        head, t, lane = block_x(), block_y(), lane_index()
        if t >= counts[N_TOKENS]:
            return
        sequence, position = sequence_of[t], i32(positions[t])
        end = i32(lengths[sequence])
        first = i32(0)
        if causal != 0:
            end = i32(position + 1)
        if window > 0:
            first = i32(position - window + 1) if position >= window else i32(0)
            end = i32(position + window) if position + window < end else end
        blocks, kv_head = table + sequence * table_stride, u32(head // (heads // kv_heads))
        query, acc, p, rows = queries(), parts(), weights(), values()
        column = u32(lane)
        while column < k_dim:
            query[column] = q[t * q_stride + head * k_dim + column]
            column = u32(column + 32)
        sync_warp()
        for i in range(columns):
            acc[i] = f32(0)
        peak, total = f32(LOWEST), f32(0)
        if has_sinks and block_z() == 0:
            peak, total = sinks[head], f32(1)
        shares = u32(grid_z())
        if shares > 1 and first < end:
            share = u32((u32(end - first) + 32 * shares - 1) // u32(32 * shares) * 32)
            first = i32(first + block_z() * share)
            end = i32(first + share) if first + share < end else end
        begin = first
        while begin < end:
            key = i32(begin + lane)
            score, row = f32(LOWEST), u32(0)
            if key < end:
                row = u32((blocks[key // block_size] * kv_heads + kv_head) * block_size + key % block_size)
                dot, c = f32(0), u32(0)
                if wide:
                    while c < k_dim:
                        w0, w1, w2, w3 = load4(as_words(k), u32(row * k_dim + c) >> u32(1))
                        q0, q1, q2, q3 = load4(query, c)
                        q4, q5, q6, q7 = load4(query, u32(c + 4))
                        dot += (q0 * low_half(w0) + q1 * high_half(w0)) + (q2 * low_half(w1) + q3 * high_half(w1))
                        dot += (q4 * low_half(w2) + q5 * high_half(w2)) + (q6 * low_half(w3) + q7 * high_half(w3))
                        c = u32(c + 8)
                while c < k_dim:
                    if half_k:
                        dot += query[c] * half_to_float(as_u16(k)[row * k_dim + c])
                    else:
                        dot += query[c] * as_floats(k)[row * k_dim + c]
                    c = u32(c + 1)
                score = dot * scale
                if cap > f32(0):
                    score = cap * tanh(score / cap)
                if has_slopes:
                    score += slopes[head] * f32(key - position)
                if has_buckets:
                    score += buckets[_bucket(i32(key - position), n_buckets, spread, causal != 0) * heads + head]
            larger = fmax(peak, warp_max(score))
            weight = exp(score - larger) if key < end else f32(0)
            fade = exp(peak - larger)
            total = total * fade + warp_sum(weight)
            peak = larger
            p[lane], rows[lane] = weight, row
            sync_warp()
            some = u32(end - begin) if end - begin < 32 else u32(32)
            for i in range(columns):
                column = u32(lane + 32 * i)
                part = acc[i] * fade
                if column < v_dim:
                    for j in range(some):
                        if half_v:
                            part += p[j] * half_to_float(as_u16(v)[rows[j] * v_dim + column])
                        else:
                            part += p[j] * as_floats(v)[rows[j] * v_dim + column]
                acc[i] = part
            sync_warp()
            begin = i32(begin + 32)
        to = partial + ((t * heads + head) * shares + block_z()) * (v_dim + 2)
        if shares > 1 and lane == 0:
            to[0], to[1] = peak, total
        for i in range(columns):
            column = u32(lane + 32 * i)
            if column < v_dim and shares > 1:
                to[column + 2] = acc[i]
            elif column < v_dim:
                y[t * y_stride + head * v_dim + column] = acc[i] / total

    return _attention
