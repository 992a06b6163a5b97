"""Softmax attention over the paged cache (op `attention`).

y = softmax(softcap(scale * q k^T) + bias, over the visible keys of the sequence) v
"""

import functools
import math

from numflow.cuda.arithmetic import exp, fmax, half_to_float, log, tanh
from numflow.cuda.call import N_TOKENS, Call
from numflow.cuda.device import Launch
from numflow.cuda.intrinsic import LocalArray, SharedArray
from numflow.cuda.intrinsics import as_floats, as_u16, block_x, block_y, lane_index, sync_warp
from numflow.cuda.kernel import Kernel, device, kernel
from numflow.cuda.reduce import warp_max, warp_sum
from numflow.cuda.scalar import f32, i32, u8, u32
from numflow.ops import Step, param

LOWEST = -3.0e38


def attention(step: Step, ctx) -> list[Call]:
    """q f32 [T, H * E], slopes [H], sinks [H], buckets [n, H] -> y f32 [T, H * E_v]."""
    (q,), (y,), batch, heads = step.inputs, step.outputs, ctx.batch, param(step, "heads")
    cache = ctx.caches[param(step, "cache")]
    shape, causal, window = cache.shape, param(step, "causal"), param(step, "window")
    slopes, sinks, buckets = (ctx.vector(step.weights[role]) if role in step.weights else None
                              for role in ("slopes", "sinks", "buckets"))
    n_buckets = ctx.network.weights[step.weights["buckets"]].shape[0] if buckets else 0
    is_self = shape.kind == "self"
    chosen = attention_kernel(cache.types[0], cache.types[1], -(-shape.v_dim // 32), slopes is not None,
                              sinks is not None, buckets is not None)
    exact = (n_buckets if causal else n_buckets // 2) // 2
    spread = math.log(param(step, "bucket_distance") / exact) if buckets else 1.0
    args = (*ctx.view(y), *ctx.view(q), cache.k, cache.v, slopes, sinks, buckets, batch.ref("positions"),
            batch.ref("sequence_of"), batch.ref(cache.table), batch.stride, batch.ref(cache.lengths), batch.counts,
            heads, shape.kv_heads, shape.k_dim, shape.v_dim, cache.block_size, param(step, "scale"),
            param(step, "softcap"), causal and is_self, window if is_self else 0, n_buckets, 1 / spread)
    return [Call(step, lambda sizes: Launch(chosen, (heads, sizes.rows[N_TOKENS], 1), args))]


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
def attention_kernel(k_type: str, v_type: str, columns: int, has_slopes: bool, has_sinks: bool,
                     has_buckets: bool) -> Kernel:
    """A warp for each row and head, 32 keys at a time; a lane owns a key of the scores and `columns` of the output."""
    parts = LocalArray(f32, columns)
    weights, values = SharedArray(f32, 32), SharedArray(u32, 32)
    half_k, half_v = k_type == "f16", v_type == "f16"
    extras = "_slopes" * has_slopes + "_sinks" * has_sinks + "_buckets" * has_buckets

    @kernel(f"attention_{k_type}_{v_type}_{columns}{extras}", 32, exact=has_buckets)
    def _attention(y: f32.ptr, y_stride: u32, q: f32.ptr, q_stride: u32, k: u8.ptr, v: u8.ptr, slopes: f32.ptr,
                   sinks: f32.ptr, buckets: f32.ptr, positions: i32.ptr, sequence_of: i32.ptr, table: i32.ptr,
                   table_stride: u32, lengths: i32.ptr, counts: i32.ptr, heads: u32, kv_heads: u32, k_dim: u32,
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
        query = q + (t * q_stride + head * k_dim)
        acc, p, rows = parts(), weights(), values()
        for i in range(columns):
            acc[i] = f32(0)
        peak, total = f32(LOWEST), f32(0)
        if has_sinks:
            peak, total = sinks[head], f32(1)
        begin = first
        while begin < end:
            key = i32(begin + lane)
            score, row = f32(LOWEST), u32(0)
            if key < end:
                row = u32((blocks[key // block_size] * kv_heads + kv_head) * block_size + key % block_size)
                dot = f32(0)
                for c in range(k_dim):
                    if half_k:
                        dot += query[c] * half_to_float(as_u16(k)[row * k_dim + c])
                    else:
                        dot += query[c] * as_floats(k)[row * k_dim + c]
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
        for i in range(columns):
            column = u32(lane + 32 * i)
            if column < v_dim:
                y[t * y_stride + head * v_dim + column] = acc[i] / total

    return _attention
