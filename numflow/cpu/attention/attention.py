"""Softmax attention over the paged cache (op `attention`), for prefill and decoding alike.

A step with entries or with a cross cache beside its own is two attentions of each row, one over each cache. Their
results are joined by their maxima and sums of exponentials.

A tile is up to 8 rows, (token, query head) pairs that share a key/value head; tile.py computes a tile. Threads take
tiles one by one. If there are too few tiles (decoding at a long context), threads take single spans of 128 keys, and
the thread that finishes the last span of a tile merges its spans. Both ways take the same sums in the same order.
"""

from typing import Any

import numpy as np

from numflow.cpu.attention.slots import (
    INDEX,
    JOIN,
    MAX_SLOTS,
    RELATIVE,
    SLOTS,
    SPANS_DONE,
    TILES_PER_THREAD,
    TOKENS,
    scratch_bytes,
    slot_bytes,
)
from numflow.cpu.runtime.kernel import Call, Code
from numflow.cpu.state.cache import GROUP, KVCache
from numflow.network.t5_buckets import bucket
from numflow.ops import Step, param

_DIRECT = ("f32", "f32"), ("f16", "f16")  # (K, V) types that kernels read without decoding, for any activations
_CODE, _INDEX = Code("numflow.cpu.attention.attention_kernels"), Code("numflow.cpu.attention.index_kernels")


def attention(step: Step, ctx) -> list[Call]:
    """q f32 [T, H*E], selected i32 [T, W] or products with position embeddings c2p, p2c f32 [T, H*N] -> y f32
    [T, H*E_v]; slopes, sinks f32 [H]; buckets f32 [n, H]; position_buckets f32 [2R + 1]."""
    y, heads, beside = step.outputs[0], param(step, "heads"), param(step, "entries") or param(step, "cross")
    selected = ctx.view(step.inputs[1]) if len(step.inputs) == 2 and "position_buckets" not in step.weights else (0, 0)
    cache = ctx.caches[param(step, "cache")]
    if not beside:
        return [_attention(step, ctx, cache, selected, ctx.strided("y", y))]
    of_keys, of_others = (selected, (0, 0)) if param(step, "cross") else ((0, 0), selected)
    other = ctx.scratch("attention beside", 4 * ctx.max_rows(y) * y.width)
    sums, other_sums = (ctx.scratch(f"sums of {part}", 8 * ctx.max_rows(y) * heads)
                        for part in ("attention", "attention beside"))
    return [_attention(step, ctx, cache, of_keys, ctx.strided("y", y), sums),
            _attention(step, ctx, ctx.caches[beside], of_others, {"y": other, "y_stride": y.width}, other_sums, False),
            Call.named(step, _CODE.kernel("attention_join"), JOIN, header=ctx.header, rows=ctx.rows(y),
                       **ctx.strided("y", y), other=other, other_stride=y.width, sums=sums,
                       other_sums=other_sums, heads=heads, width=y.width // heads)]


def _attention(step: Step, ctx, cache: KVCache, selected: tuple[int, int], y: dict[str, Any], sums: Any = 0,
               biased: bool = True) -> Call:
    """Attention over one cache, of keys or of entries.

    selected: address and stride of the bits of visible keys or blocks. y, sums: slots and memory of the results.
    biased: scores have the biases of the step, and sinks take part.
    """
    shape, heads = cache.shape, param(step, "heads")
    is_self, every = shape.kind == "self", shape.every
    weights = step.weights if biased else {}
    slopes, sinks = (ctx.vector(weights[role]) if role in weights else 0 for role in ("slopes", "sinks"))
    causal, reach = param(step, "causal"), param(step, "bucket_distance")
    window, chunk = (param(step, key) if is_self and not every else 0 for key in ("window", "chunk"))
    bias = bias_by_distance(ctx.vector(weights["buckets"]).reshape(-1, heads), reach, causal) \
        if "buckets" in weights else 0
    (decoded, transposed, end), tiles = scratch_bytes(*cache.widths), TILES_PER_THREAD * ctx.n_threads
    per_thread = end if shape.prefix else transposed
    scratch = ctx.scratch("attention", ctx.n_threads * per_thread)
    partials = ctx.scratch("attention partials", MAX_SLOTS * slot_bytes(cache.widths[1]))
    counters = ctx.scratch("attention counters", SPANS_DONE + 8 * tiles)
    rounded = ctx.activations != "f32" and not shape.prefix
    kind = "coded" if every else \
        cache.kinds[0] if cache.kinds in _DIRECT or multiplies_pairs(cache, ctx.activations) else \
        "coded_int8" if rounded else "coded"
    kernel = _CODE.kernel(f"attention_{kind}{'_prefix' if shape.prefix else ''}")
    return Call.named(
        step, kernel, SLOTS, header=ctx.header, **ctx.strided("q", step.inputs[0]), **y,
        cache=cache.addresses, kv_heads=shape.kv_heads, queries_per_key=heads // shape.kv_heads, k_dim=shape.k_dim,
        v_dim=shape.value_dim, block_size=cache.block_size, **cache.table_fields, scale=float(param(step, "scale")),
        causal=is_self and causal, window=window, softcap=float(param(step, "softcap")), slopes=slopes, sinks=sinks,
        bias=bias, reach=reach, scratch=scratch, scratch_bytes=per_thread, partials=partials, max_slots=MAX_SLOTS,
        counters=counters, decoded=decoded, **cache.row_fields, transposed=transposed, chunk=chunk,
        selected=selected[0], selected_stride=selected[1], every=every, selected_block=param(step, "block"),
        selected_words=step.inputs[1].width // shape.kv_heads if param(step, "block") else 0, sums=sums,
        **_relative(step if biased else None, ctx))


def _relative(step: Step | None, ctx) -> dict[str, Any]:
    """Slots of relative-position scores; zeros without a step or without such scores."""
    if step is None or "position_buckets" not in step.weights:
        return dict.fromkeys(RELATIVE, 0)
    _, c2p, *p2c = step.inputs
    bucket_table = ctx.vector(step.weights["position_buckets"]).astype(np.int32)
    p2c_slots = ctx.strided("p2c", p2c[0]) if p2c else dict.fromkeys(RELATIVE[2:4], 0)
    return {**ctx.strided("c2p", c2p), **p2c_slots, "bucket_table": bucket_table,
            "bucket_reach": len(bucket_table) // 2, "n_buckets": c2p.width // param(step, "heads")}


def multiplies_pairs(cache: KVCache, activations: str) -> bool:
    """Whether attention multiplies pairs of bfloat16: keys and values are bfloat16, and queries and probabilities are
    rounded to it."""
    return cache.kinds == ("bf16", "bf16") and activations != "f32" and not cache.shape.prefix


def index_select(step: Step, ctx) -> list[Call]:
    """q f32 [T, I*d], weights f32 [T, I] -> y i32 [T, W]."""
    return [_selection(step, ctx, words=step.outputs[0].width, block=0, local=0,
                       **ctx.strided("weights", step.inputs[1]))]


def block_select(step: Step, ctx) -> list[Call]:
    """q f32 [T, H*d] -> y i32 [T, H*W]."""
    return [_selection(step, ctx, words=step.outputs[0].width // param(step, "heads"), block=param(step, "block"),
                       local=param(step, "local"), weights=0, weights_stride=0)]


def _selection(step: Step, ctx, **own: Any) -> Call:
    """The call of an op that selects keys or blocks. own: slots that the two ops fill differently."""
    q, (y,), cache = step.inputs[0], step.outputs, ctx.caches[param(step, "cache")]
    heads, width, fields = param(step, "heads"), cache.widths[0], cache.table_fields
    rotated = 4 * 32 * (y.width + 2)
    scratch_bytes = rotated if cache.kinds[0] in ("f32", "f16") else rotated + width * (4 * heads + 5 * GROUP)
    scratch_bytes = -(-scratch_bytes // 64) * 64
    scratch = ctx.scratch("scores of an index", ctx.n_threads * scratch_bytes)
    return Call.named(
        step, _INDEX.kernel(step.op), INDEX, header=ctx.header, rows=ctx.rows(q), **ctx.strided("q", q), **own,
        **ctx.strided("y", y), cache=cache.addresses,
        table=fields["table"], table_stride=fields["table_stride"], block_size=cache.block_size, heads=heads,
        size=cache.shape.k_dim, kind=cache.row_fields["k_kind"], width=width, row=cache.row_fields["k_size"],
        top_k=param(step, "top_k"), scratch=scratch, scratch_bytes=scratch_bytes, rotated=rotated,
        every=cache.shape.every)


def index_tokens(step: Step, ctx) -> list[Call]:
    """x i32 [T, V] -> y i32 [T, W]."""
    (x,), (y,) = step.inputs, step.outputs
    return [Call.named(step, _INDEX.kernel("index_tokens"), TOKENS, header=ctx.header, rows=ctx.rows(x),
                       **ctx.strided("x", x), **ctx.strided("y", y), words=y.width, every=param(step, "every"))]


def bias_by_distance(buckets: np.ndarray, reach: int, causal: bool) -> np.ndarray:
    """T5's relative position bias [n, H] by distance: f32 [H, 2 * reach + 33], key - query from -(reach + 16) on."""
    distance = np.arange(-reach - 16, reach + 17)
    return np.ascontiguousarray(buckets[bucket(distance, len(buckets), reach, causal)].T)
