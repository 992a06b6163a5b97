"""Softmax attention over the paged cache (op `attention`), for prefill and decoding alike.

With entries there are two of them for each row, joined by the sums that both leave.

A tile is up to 8 rows, (token, query head) pairs that share a key/value head; tile.py computes it. Threads
take tiles one by one. Where there are too few of them (decoding at a long context), they take single spans of 128
keys, and whoever finishes the last span of a tile merges them; either way the same sums are taken in the same order.
"""

from typing import Any

import numpy as np

from numflow.cpu.attention.slots import (
    FAR,
    INDEX,
    JOIN,
    MOST_SLOTS,
    SLOTS,
    SPANS_DONE,
    TILES_PER_THREAD,
    scratch_bytes,
    slot_bytes,
)
from numflow.cpu.runtime.kernel import Call, Code
from numflow.cpu.state.cache import GROUP, KVCache
from numflow.network.t5_buckets import bucket
from numflow.ops import Step, param

_AS_THEY_ARE = ("f32", "f32"), ("f16", "f16")  # keys and values that need no decoding, whatever the arithmetic
_CODE, _INDEX = Code("numflow.cpu.attention.attention_kernels"), Code("numflow.cpu.attention.index_kernels")


def attention(step: Step, ctx) -> list[Call]:
    """q f32 [T, H*E], chosen i32 [T, W] or one or two products with vectors of distances f32 [T, H*N] -> y f32
    [T, H*E_v]; slopes, sinks f32 [H]; buckets f32 [n, H]; places f32 [2R + 1]."""
    y, heads, entries = step.outputs[0], param(step, "heads"), param(step, "entries")
    chosen = ctx.view(step.inputs[1]) if len(step.inputs) == 2 and "places" not in step.weights else (0, 0)
    if not entries:
        return [_attention(step, ctx, ctx.caches[param(step, "cache")], chosen, ctx.strided("y", y))]
    other = ctx.scratch("attention of entries", 4 * ctx.room(y) * y.width)
    sums, more = (ctx.scratch(f"sums of {what}", 8 * ctx.room(y) * heads) for what in ("attention", "entries"))
    return [_attention(step, ctx, ctx.caches[param(step, "cache")], (0, 0), ctx.strided("y", y), sums),
            _attention(step, ctx, ctx.caches[entries], chosen, {"y": other, "y_stride": y.width}, more),
            Call.named(step, _CODE.kernel("attention_join"), JOIN, header=ctx.header, rows=ctx.rows(y),
                       **ctx.strided("y", y), other=other, other_stride=y.width, sums=sums, more=more, heads=heads,
                       width=y.width // heads)]


def _attention(step: Step, ctx, cache: KVCache, chosen: tuple[int, int], y: dict[str, Any], sums: Any = 0) -> Call:
    """Attention over one cache, which may be one of entries. chosen: bits of its keys. y, sums: where results go."""
    shape, heads = cache.shape, param(step, "heads")
    own, every = shape.kind == "self", shape.every
    weights = {} if every else step.weights
    slopes, sinks = (ctx.vector(weights[role]) if role in weights else 0 for role in ("slopes", "sinks"))
    causal, reach = param(step, "causal"), param(step, "bucket_distance")
    window, chunk = (param(step, key) if own and not every else 0 for key in ("window", "chunk"))
    bias = bias_by_distance(ctx.vector(weights["buckets"]).reshape(-1, heads), reach, causal) \
        if "buckets" in weights else 0
    (decoded, turned, most), tiles = scratch_bytes(*cache.widths), TILES_PER_THREAD * ctx.n_threads
    per_thread = most if shape.prefix else turned
    scratch = ctx.scratch("attention", ctx.n_threads * per_thread)
    partials = ctx.scratch("attention partials", MOST_SLOTS * slot_bytes(cache.widths[1]))
    counters = ctx.scratch("attention counters", SPANS_DONE + 8 * tiles)
    rounded = ctx.activations != "f32" and not shape.prefix
    kind = "coded" if every else \
        cache.kinds[0] if cache.kinds in _AS_THEY_ARE or multiplies_pairs(cache, ctx.activations) else \
        "coded_int8" if rounded else "coded"
    kernel = _CODE.kernel(f"attention_{kind}{'_prefix' if shape.prefix else ''}")
    return Call.named(
        step, kernel, SLOTS, header=ctx.header, **ctx.strided("q", step.inputs[0]), **y,
        cache=cache.addresses, kv_heads=shape.kv_heads, queries_per_key=heads // shape.kv_heads, k_dim=shape.k_dim,
        v_dim=shape.value_dim, block_size=cache.block_size, **cache.table_fields, scale=float(param(step, "scale")),
        causal=own and causal, window=window, softcap=float(param(step, "softcap")), slopes=slopes, sinks=sinks,
        bias=bias, reach=reach, scratch=scratch, scratch_bytes=per_thread, partials=partials, most_slots=MOST_SLOTS,
        counters=counters, decoded=decoded, **cache.row_fields, turned=turned, chunk=chunk, chosen=chosen[0],
        chosen_stride=chosen[1], every=every, sums=sums, **_far(step, ctx))


def _far(step: Step, ctx) -> dict[str, Any]:
    """Slots of products with vectors of distances."""
    if "places" not in step.weights:
        return dict.fromkeys(FAR, 0)
    _, of_queries, *of_keys = step.inputs
    places = ctx.vector(step.weights["places"]).astype(np.int32)
    keys = ctx.strided("of_keys", of_keys[0]) if of_keys else dict.fromkeys(FAR[2:4], 0)
    return {**ctx.strided("of_queries", of_queries), **keys, "places": places,
            "places_reach": len(places) // 2, "far": of_queries.width // param(step, "heads")}


def multiplies_pairs(cache: KVCache, activations: str) -> bool:
    """Whether attention rounds queries and weights to bfloat16, as keys and values are, and multiplies pairs."""
    return cache.kinds == ("bf16", "bf16") and activations != "f32" and not cache.shape.prefix


def index_select(step: Step, ctx) -> list[Call]:
    """q f32 [T, I*d], weights f32 [T, I] -> y i32 [T, W]."""
    (q, weights), (y,), cache = step.inputs, step.outputs, ctx.caches[param(step, "cache")]
    heads, width, fields = param(step, "heads"), cache.widths[0], cache.table_fields
    turned = 4 * 32 * (y.width + 2)
    scratch_bytes = turned if cache.kinds[0] in ("f32", "f16") else turned + width * (4 * heads + 5 * GROUP)
    scratch_bytes = -(-scratch_bytes // 64) * 64
    scratch = ctx.scratch("scores of an index", ctx.n_threads * scratch_bytes)
    return [Call.named(
        step, _INDEX.kernel("index_select"), INDEX, header=ctx.header, rows=ctx.rows(q), **ctx.strided("q", q),
        **ctx.strided("weights", weights), **ctx.strided("y", y), words=y.width, cache=cache.addresses,
        table=fields["table"], table_stride=fields["table_stride"], block_size=cache.block_size, heads=heads,
        size=cache.shape.k_dim, kind=cache.row_fields["k_kind"], width=width, row=cache.row_fields["k_size"],
        top_k=param(step, "top_k"), scratch=scratch, scratch_bytes=scratch_bytes, turned=turned,
        every=cache.shape.every)]


def bias_by_distance(buckets: np.ndarray, reach: int, causal: bool) -> np.ndarray:
    """Relative bias of T5 [n, H] by distance: f32 [H, 2 * reach + 33], key - query from -(reach + 16) to reach + 16."""
    distance = np.arange(-reach - 16, reach + 17)
    return np.ascontiguousarray(buckets[bucket(distance, len(buckets), reach, causal)].T)
