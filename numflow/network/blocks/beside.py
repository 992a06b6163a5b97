"""Further inputs of attention: relative position scores (disentangled attention), and the keys that an index selects.

A table has one embedding per bucket of distances. The layer projects each embedding to a key K and a query Q, as it
projects tokens. The score of query i and key j is q_i . k_j + q_i . K[n] + Q[n] . k_j, n the bucket of their distance.

An index has small keys, of tokens or of entries. An entry is, column by column, a weighted mean of vectors of the
tokens in its window; the weights are a softmax of gates of these tokens. With overlap, the previous window adds further
vectors, from columns of their own.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.channels import clip_length
from numflow.network.blocks.projections import by_head
from numflow.network.blocks.rope import rotate
from numflow.network.steps.builder import Builder
from numflow.ops import Cache, View

Beside = tuple[tuple[View, ...], dict[str, str]]  # further inputs and weights of an attention step
_FARTHEST = 1 << 20  # limit of the bucket table
_EXCLUDED = -1e30  # a score whose exponential is 0 beside any other
_MOST_INDEXED = 1 << 22  # limit of positions: each row of a batch has one bit per position


def distances(b: Builder, q: View, k: View, heads: int) -> Beside:
    """Further inputs and weights of `attention`: products of q [T, H*E] and k [T, H*E] with projected keys and
    queries of the relative position embeddings; empty if the spec has none.

    Raises:
        SpecError: other options exclude relative position embeddings, or their number or reach is wrong.
    """
    count = b.option("attention", "distances")
    if not count:
        return (), {}
    plain = not b.option("rope", "enabled") and b.option("attention", "q_norm") == "none" \
        and not b.option("attention", "clip") and b.option("attention", "key_scale") == 1.0
    if b.option("attention", "causal") or not plain or b.option("attention", "kv_heads") != heads:
        raise SpecError(f"{b.where}: attention.distances: expected attention both ways, a key head for each query "
                        "head, and queries and keys as their matrices make them", ("attention.distances",))
    reach, size = b.option("attention", "distance_reach"), q.width // heads
    own, which = b.option("attention", "own_distances"), b.option("attention", "distance_products")
    table, products = f"position_buckets.{count}.{reach}", []
    if table not in b.weights:
        b.constant(table, buckets(b, count, reach))
    for x, name, kind, letter in ((q, "of_queries", "keys", "k"), (k, "of_keys", "queries", "q")):
        y = b.view(name, heads * count)
        if which in ("both", kind):
            matrix = _projected(b, f"{'dist' if own else 'attn'}_{letter}", name, count, heads, size)
        else:
            matrix = b.constant(f"no_{kind}.{heads * count}", np.zeros((heads * count, size), np.float32))
            b.weights[matrix] = replace(b.weights[matrix], groups=heads)
        b.emit("head_linear", (x,), (y,), name, {"weight": matrix}, heads=heads)
        products.append(y)
    return tuple(products), {"position_buckets": table}


def relative(b: Builder, x: View, heads: int) -> Beside:
    """Further input and weight of `attention` for biases by distance to earlier keys: per head a sum of learned
    values of that distance, weighed by attn_rel(x). Empty if the spec has none."""
    if not (reach := b.option("attention", "relative")):
        return (), {}
    size = b.option("attention", "relative_dim")
    weights = b.linear("attn_rel", x, b.view("relative", heads * size))
    if limit := b.option("attention", "relative_limit"):
        if b.has("attn_rel_scale.weight"):
            b.emit("scale", (weights,), (weights,), "attn_rel_scale",
                   {"weight": b.vector("attn_rel_scale", "weight", weights.width, flat=True)}, scale=1.0)
        clip_length(b, "attn_rel_limit", weights, heads, limit)
    # Divided by the scale, which multiplies the whole score. Keys beyond the reach have the zero behind the last value.
    values = b.numbers("attn_rel_numbers", size * reach).reshape(size, reach) / b.option("attention", "scale")
    table = np.pad(values.T, ((0, 1), (0, 0)))
    if b.option("attention", "token_sinks"):  # a sink, which is subtracted from all scores, is one more weight
        temper(b, weights)
        sinks = b.linear("attn_sink", x, b.view("sinks", heads))
        joined = b.view("relative_and_sinks", heads * (size + 1))
        b.emit("head_concat", (weights, sinks), (joined,), "attn_rel_sinks", heads=heads)
        table = np.pad(table, ((0, 0), (0, 1)), constant_values=-1 / b.option("attention", "scale"))
        weights = joined
    y, distance = b.view("of_queries", heads * (reach + 1)), np.arange(reach, -reach - 1, -1)
    by_head(b, f"{b.prefix}attn_rel_numbers", weights, y, table, heads)
    name = f"position_buckets_before.{reach}"
    if name not in b.weights:
        b.constant(name, np.where((distance >= 0) & (distance < reach), distance, reach).astype(np.float32))
    return (y,), {"position_buckets": name}


def temper(b: Builder, x: View) -> None:
    """Multiply x by attention.temperature's factor of each position, in place."""
    if temperature := b.option("attention", "temperature"):
        smooth = 2 if b.option("attention", "temperature_power") else int(b.option("attention", "temperature_smooth"))
        more: dict[str, Any] = {"smooth": smooth} if smooth else {}
        b.emit("scale_by_position", (x,), (x,), "q_temperature", scale=temperature,
               length=b.option("attention", "temperature_length"), offset=b.option("attention", "temperature_offset"),
               **more)


def uneven_window(b: Builder, q: View, heads: int) -> Beside:
    """Further input and weight of `attention` for a window with other numbers of keys on the two sides of a query: the
    window of the longer side, and a score that excludes the keys of the other side which are beyond its reach.

    Raises:
        SpecError: no window, a huge one, causal attention, or a softcap, which would bound that score.
    """
    window, ahead = (b.option("attention", key) for key in ("window", "ahead"))
    if max(window, ahead) > _FARTHEST:
        raise SpecError(f"{b.where}: attention.ahead: expected a window of up to {_FARTHEST} keys on each side, found "
                        f"{window} and {ahead}", ("attention.window", "attention.ahead"))
    if not window or b.option("attention", "causal") or b.option("attention", "softcap"):
        raise SpecError(f"{b.where}: attention.ahead: expected a window that is not causal, without a softcap",
                        ("attention.ahead",))
    distance = np.arange(-max(window - 1, ahead), max(window - 1, ahead) + 1)
    excluded = (distance > ahead) | (distance <= -window)
    if not excluded.any():
        return (), {}
    y = b.view("window_scores", 2 * heads)
    shift = b.constant(f"window_scores.{heads}", np.tile(np.array([0, _EXCLUDED], np.float32), heads))
    b.emit("scale", (View(q.buffer, q.start, y.width),), (y,), "window_scores", {"shift": shift}, scale=0.0)
    name = f"position_buckets_around.{window}.{ahead}"
    if name not in b.weights:
        b.constant(name, excluded.astype(np.float32))
    return (y,), {"position_buckets": name}


def buckets(b: Builder, count: int, reach: int) -> np.ndarray:
    """Bucket 0 .. count - 1 for each distance (key - query position) -R .. R: f32 [2R + 1].

    Half of the buckets are for keys before the query, nearest last. With a reach, the nearer half of each side has one
    distance per bucket, and the other buckets grow logarithmically up to the reach.

    Raises:
        SpecError: too few buckets, an odd number of them, or a reach that is within the exact distances.
    """
    side, exact = count // 2, count // 4
    if count % 2 or (reach and (exact < 2 or reach < exact + 2)):
        raise SpecError(f"{b.where}: attention.distances: expected an even number, and 8 or more with a reach of more "
                        f"than a quarter of it and 1, found {count} with a reach of {reach}",
                        ("attention.distances", "attention.distance_reach"))
    farthest = side
    if reach:
        farthest = math.ceil(exact * ((reach - 1) / exact) ** ((side - exact) / (exact - 1))) + 1
    bucket = np.arange(min(farthest, _FARTHEST) + 1)
    if reach:  # in float32, as in training
        far = np.log(np.maximum(bucket, exact).astype(np.float32) / np.float32(exact))
        far /= np.log(np.float32((reach - 1) / exact))
        bucket = np.where(bucket <= exact, bucket, exact + np.ceil(far * np.float32(exact - 1)).astype(np.int64))
    before = np.minimum(side + bucket, count - 1)
    return np.concatenate([before[:0:-1], np.maximum(side - bucket, 0)]).astype(np.float32)


def _projected(b: Builder, module: str, name: str, count: int, heads: int, size: int) -> str:
    """Keys or queries projected from the embeddings by a module's matrix, `count` rows for each head."""
    width = b.option("stack", "width")
    roles: dict[str, tuple[str, str, tuple[int, ...]]] = {
        "table": ("dist_embd", "weight", (count, width)), "matrix": (module, "weight", (heads * size, width))}
    if b.has(f"{module}.bias"):
        roles["bias"] = (module, "bias", (heads * size,))
    if b.option("attention", "distance_norm"):
        roles |= {"norm": ("dist_norm", "weight", (width,)), "norm_bias": ("dist_norm", "bias", (width,))}
    return b.projected(f"{name}.weight", roles, (heads * count, size), heads, b.option("norm", "eps"))


def log_scaled(b: Builder, module: str, x: View, heads: int) -> None:
    """x *= scale * ln(position + 1) + bias with learned values per head, as x * (1 + ln(position + 1)) * scale + x *
    (bias - scale)."""
    scale, bias = (np.repeat(b.numbers(f"{module}_log_{part}", heads), x.width // heads) for part in ("scale", "bias"))
    rest = b.view(f"{module}_log_rest", x.width)
    for view, label, values in ((rest, "rest", bias - scale), (x, "scale", scale)):
        weight = b.constant(f"{b.prefix}{module}_log_{label}", values)
        b.emit("scale", (x,), (view,), f"{module}_log_{label}", {"weight": weight}, scale=1.0)
    b.emit("scale_by_position", (x,), (x,), f"{module}_log", scale=1.0, length=1)
    b.emit("add", (x, rest), (x,), f"{module}_log_add")


def index(b: Builder, x: View, low_query: View) -> tuple[View]:
    """Select the top_k keys for each query by an index with small keys, or the tokens of the top_k windows, or the
    top_k blocks for each key head.

    Returns a bit mask i32 [T, context / 32], or [T, key heads * blocks / 32]: of this layer, or of the last layer
    before that has an index.
    """
    every, block, context = b.option("indexer", "every"), b.option("indexer", "block"), _indexed(b)
    if b.option("rope", "scaling") == "dynamic":  # the longest text after scaling
        context = max(context, int(b.option("rope", "original_context") * b.option("rope", "factor")))
    selections = _selections(b) if block else 1
    chosen = b.view("chosen", selections * -(-context // (32 * max(block, 1))), dtype="i32")
    if not b.option("indexer", "own"):
        if not any(chosen in step.outputs for step in b.entries[b.entry]):
            raise SpecError(f"{b.where}: indexer.own: the first layer needs its own indexer", ("indexer.own",))
        return (chosen,)
    q, name = (_mean_keys if b.option("indexer", "pooling") == "mean" else _keys)(b, x, low_query)
    if block:
        b.emit("block_select", (q,), (chosen,), "block_select", cache=name, block=block,
               **{key: b.option("indexer", key) for key in ("heads", "top_k", "local")})
    elif every == 1:
        _select(b, x, q, name, chosen)
    else:
        best = _select(b, x, q, name, b.view("chosen_entries", -(-context // (32 * every)), dtype="i32"))
        b.emit("index_tokens", (best,), (chosen,), "index_tokens", every=every)
    return (chosen,)


def _selections(b: Builder) -> int:
    """The number of selections of blocks, one for each key head.

    Raises:
        SpecError: the index has windows, another number of heads, or fewer blocks than are selected first.
    """
    heads, kv_heads = b.option("indexer", "heads"), b.option("attention", "kv_heads")
    if heads != kv_heads or b.option("indexer", "every") > 1 or b.option("latent", "rank"):
        raise SpecError(f"{b.where}: indexer.block: expected as many index heads as key heads {kv_heads}, without "
                        f"indexer.every or latent.rank, found {heads}", ("indexer.block", "indexer.heads"))
    if b.option("indexer", "local") > b.option("indexer", "top_k"):
        raise SpecError(f"{b.where}: indexer.local: expected up to indexer.top_k {b.option('indexer', 'top_k')}, found "
                        f"{b.option('indexer', 'local')}", ("indexer.local", "indexer.top_k"))
    return heads


def _keys(b: Builder, x: View, low_query: View) -> tuple[View, str]:
    """Index queries, and the name of the cache of index keys: of tokens, or of windows, pooled by gates."""
    heads, size, every = (b.option("indexer", key) for key in ("heads", "head_dim", "every"))
    rope_dim = b.option("latent", "rope_dim")
    if rope_dim > size or (rope_dim and every > 1):
        raise SpecError(f"{b.where}: latent.rope_dim: expected up to indexer.head_dim {size}, and 0 with "
                        f"indexer.every, found {rope_dim}", ("indexer.head_dim", "latent.rope_dim", "indexer.every"))
    # Products of queries and keys do not depend on the column order: rotated columns are moved to the front.
    order = np.roll(np.arange(size), rope_dim) if b.option("indexer", "last") else None
    rows = None if order is None else (np.arange(heads)[:, None] * size + order).reshape(-1)
    if order is not None:
        b.expect_rows("index_q", heads * size)
        b.expect_rows("index_k", size)
    if b.option("indexer", "q_norm"):
        low_query = b.norm("index_q_norm", x, b.view("index_q_in", x.width), kind="layer",
                           eps=b.option("indexer", "norm_eps"))
    q = b.linear("index_q", low_query, b.view("index_q", heads * size), rows)
    both, k = _gates_and_key(b, size, every)
    b.linear("index_k", x, k, order)
    norm = {role: b.vector("index_k_norm", role, size, order) for role in ("weight", "bias")}
    b.emit("layer_norm", (k,), (k,), "index_k_norm", norm, eps=b.option("indexer", "norm_eps"))
    if b.option("indexer", "log_scaled"):
        log_scaled(b, "index", q, heads)
    for view, count, label in ((q, heads, "index_rope_q"), (k, 1, "index_rope_k")) if rope_dim else ():
        rotate(b, view, count, size, label, b.option("indexer", "pairing"))
    if every > 1:
        b.linear("index_pool_gate", x, View(both.buffer, 0, size))
        k = _pooled(b, "index_pool", both, size, every, 1)
    return q, _stored_keys(b, k, every)


def _mean_keys(b: Builder, x: View, low_query: View) -> tuple[View, str]:
    """Index queries, and the name of the cache of index keys: the normalised means of the keys of each window."""
    heads, size, every = (b.option("indexer", key) for key in ("heads", "head_dim", "every"))
    q, (both, k) = b.view("index_q", heads * size), _gates_and_key(b, size, every)
    if b.has("index_qk.weight"):
        b.expect_rows("index_qk", q.width + size, exactly=True)
        b.linear("index_qk", x, q, range(q.width), ".q")
        b.linear("index_qk", x, k, range(q.width, q.width + size), ".k")
    else:
        b.linear("index_q", low_query, q)
        b.linear("index_k", x, k)
    if every > 1:  # equal gates make a mean
        b.emit("scale", (k,), (View(both.buffer, 0, size),), "index_pool_gate", scale=0.0)
        k = _pooled(b, "index_pool", both, size, every, 1,
                    b.constant(f"index_pool_bias.{every}x{size}", np.zeros((every, size), np.float32)))
    b.norm("index_head_norm", q, q, groups=heads)
    b.norm("index_k_norm", k, k)
    if b.option("rope", "enabled"):
        rotate(b, q, heads, size, "index_rope_q")
        rotate(b, k, 1, size, "index_rope_k", ago=every - 1)  # the position of the window's first token
    return q, _stored_keys(b, k, every)


def _gates_and_key(b: Builder, size: int, every: int) -> tuple[View, View]:
    """A row [gates, key] of each token, of the key alone without windows; and the key, its last columns."""
    both = b.view("index_rows", (1 + (every > 1)) * size)
    return both, View(both.buffer, both.width - size, size)


def _stored_keys(b: Builder, k: View, every: int) -> str:
    """Write index keys, of tokens or of windows, to a cache; its name."""
    return _stored(b, "index_pool", k, every) if every > 1 else _stored(b, "index", k, 0)


def index_of_entries(b: Builder, x: View, low: View) -> tuple[View]:
    """Bit mask i32 [T, entries / 32] of the top_k entries for each query, by an index with entries of its own."""
    heads, size = b.option("indexer", "heads"), b.option("indexer", "head_dim")
    words = -(-_indexed(b) // (32 * b.option("compressed", "every")))
    q = b.linear("index_q", low, b.view("index_q", heads * size))
    if b.option("rope", "enabled"):
        rotate(b, q, heads, size, "index_rope_q")
    name = entries(b, x, "index_pool", size)
    return (_select(b, x, q, name, b.view("chosen", words, dtype="i32")),)


def _indexed(b: Builder) -> int:
    """The number of positions that an index has.

    Raises:
        SpecError: more than an index may have.
    """
    if (context := b.option("stack", "context")) > _MOST_INDEXED:
        raise SpecError(f"{b.where}: stack.context: an index has up to {_MOST_INDEXED} positions, found {context}",
                        ("stack.context",))
    return context


def _select(b: Builder, x: View, q: View, name: str, chosen: View) -> View:
    """chosen = the top_k keys in cache `name` for index queries q, heads weighed by index_weights(x) or equally."""
    heads, weights = b.option("indexer", "heads"), b.view("index_weights", b.option("indexer", "heads"))
    if b.option("indexer", "weighted"):
        b.linear("index_weights", x, weights)
    else:
        b.emit("scale", (View(q.buffer, q.start, heads),), (weights,), "index_weights",
               {"shift": b.constant(f"index_weights.{heads}", np.ones(heads, np.float32))}, scale=0.0)
    b.emit("index_select", (q, weights), (chosen,), "index_select", cache=name, heads=heads,
           top_k=b.option("indexer", "top_k"))
    return chosen


def entries(b: Builder, x: View, module: str, size: int) -> str:
    """Emit the steps that compute entries [size] from x, by modules whose names begin with `module`; name of their
    cache."""
    every, series = b.option("compressed", "every"), 1 + b.option("compressed", "overlap")
    rows = b.view(f"{module}_rows", 2 * series * size)
    b.linear(f"{module}_gate", x, View(rows.buffer, 0, series * size))
    b.linear(f"{module}_value", x, View(rows.buffer, series * size, series * size))
    y = _pooled(b, module, rows, size, every, series)
    b.norm(f"{module}_norm", y, y)
    if b.option("rope", "enabled"):
        rotate(b, y, 1, size, f"{module}_rope", ago=every - 1)  # the position of the window's first token
    return _stored(b, module, y, every)


def _pooled(b: Builder, module: str, rows: View, size: int, every: int, series: int, bias: str = "") -> View:
    """Entries [T, size] of windows that end, pooled from rows [gates, values]. bias: name of the weight, if it is no
    tensor.

    Rows of the last tokens are in a cache. Its window is the tokens that an entry covers.
    """
    last, y = f"{b.prefix}{module}_rows", b.view(f"{module}_entry", size)
    b.caches[last] = Cache(last, 1, rows.width, 0, prefix=rows.width, every=1)
    b.emit("cache_write", (rows,), (), f"{module}_rows", cache=last)
    b.emit("pool", (), (y,), module, {"bias": bias or b.matrix(f"{module}_bias", every, series * size)}, cache=last,
           every=every, series=series)
    return y


def _stored(b: Builder, module: str, y: View, every: int) -> str:
    """Write entries y to a cache; its name."""
    name = f"{b.prefix}{module}"
    b.caches[name] = Cache(name, 1, y.width, 0, prefix=y.width, every=every)
    b.emit("cache_write", (y,), (), f"{module}_write", cache=name)
    return name
