"""Lab 3: attention.

Each query is compared with the keys of its sequence. The result is the mean of the values, weighted by a softmax of the
scores:

    y = softmax(softcap(scale * q k^T) + bias, over the keys that the query may see) v

Keys and values are in the KV cache, in blocks. The rows of sequence b in the batch are batch.starts[b] ..
batch.starts[b + 1] - 1. For sequence b:

    length = cache.lengths(batch)[b]                         keys so far, including the keys of this batch
    k, v = cache.read(cache.table(batch)[b], length)         [length, G, E] and [length, G, E_v]
    cache.value_dim                                          E_v
    distance = np.arange(length) - batch.positions[rows, None]      key position minus query position

Query head h uses key head h // (H / G) (grouped-query attention). The mask: if `causal`, a query sees keys at distances
<= 0, else at all distances. With a window w > 0 it sees only keys with |distance| < w. If cache.shape.kind is "cross"
(keys of an encoder), it sees all keys: causal and window do not apply. Some models have up to four more things:

    softcap c > 0       scores become c * tanh(scores / c)
    slopes [H]          bias -slope * |distance| (ALiBi)
    buckets [n, H]      bias buckets[bucket(distance, n, bucket_distance, causal)]
    sinks [H]           one more logit per head, which takes part in the softmax but has no value

Begin with causal attention. The checker then tells you what is missing next.

    numflow learn check 3        numflow learn hint 3        numflow learn bench 3
"""

import numpy as np

from numflow.network.t5_buckets import bucket

LAB = {
    "number": 3, "title": "Attention", "minutes": 60, "functions": ["attention"], "grader": "reference",
    "needs": [1, 2], "cases": ["attention", "attention-grouped", "attention-scale", "attention-*"],
    "hints": [
        "Draw the scores of one head as a table, a row for each query and a column for each key. 5 tokens are cached, "
        "and 3 new tokens follow. Cross out the keys that a causal query does not see.",
        "Arrays with the head first make the code short: q as [H, n, E], k as [H, L, E] (np.repeat(k, H // G, "
        "axis=1).transpose(1, 0, 2)), scores [H, n, L]. Set the scores of masked keys to -inf before the softmax.",
        "peak = max over keys (and the sink); e = exp(scores - peak); y = e @ v / (sum(e) + exp(sink - peak)); then "
        "transpose(1, 0, 2).reshape(n, -1) turns [H, n, E_v] into [n, H * E_v]."],
}


def attention(q, slopes=None, sinks=None, buckets=None, *, batch, cache, heads, scale, causal, window, softcap,
              bucket_distance):
    """q [T, H * E] -> y [T, H * E_v]; slopes [H], sinks [H], buckets [n, H] or None each."""
    y = np.empty((len(q), heads * cache.value_dim), np.float32)
    for b, length in enumerate(cache.lengths(batch)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        k, v = cache.read(cache.table(batch)[b], length)
        k, v = (np.repeat(a, heads // a.shape[1], axis=1).transpose(1, 0, 2) for a in (k, v))
        distance = np.arange(length) - batch.positions[rows, None]
        scores = np.float32(scale) * (q[rows].reshape(-1, heads, k.shape[2]).transpose(1, 0, 2) @ k.transpose(0, 2, 1))
        if softcap:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        if slopes is not None:
            scores = scores - slopes[:, None, None] * np.abs(distance).astype(np.float32)
        if buckets is not None:
            scores = scores + buckets[bucket(distance, len(buckets), bucket_distance, causal)].transpose(2, 0, 1)
        if cache.shape.kind == "self":
            hidden = distance > 0 if causal else np.zeros(distance.shape, bool)
            scores[:, hidden | (np.abs(distance) >= window) if window else hidden] = -np.inf
        sink = np.full(heads, -np.inf, np.float32) if sinks is None else sinks
        peak = np.maximum(scores.max(axis=2, keepdims=True), sink[:, None, None])
        e = np.exp(scores - peak)
        p = e / (e.sum(axis=2, keepdims=True) + np.exp(sink[:, None, None] - peak))
        y[rows] = (p @ v).transpose(1, 0, 2).reshape(p.shape[1], -1)
    return y


def attention__no_scale(q, slopes=None, sinks=None, buckets=None, **given):
    """scores that are not multiplied by scale"""
    return attention(q, slopes, sinks, buckets, **{**given, "scale": 1.0})


def attention__own_scale(q, slopes=None, sinks=None, buckets=None, **given):
    """a scale of 1 / sqrt(head size) instead of the given scale"""
    return attention(q, slopes, sinks, buckets, **{**given, "scale": (q.shape[1] // given["heads"]) ** -0.5})


def attention__not_causal(q, slopes=None, sinks=None, buckets=None, **given):
    """queries that see keys after their own position: causal is ignored"""
    return attention(q, slopes, sinks, buckets, **{**given, "causal": False})


def attention__always_causal(q, slopes=None, sinks=None, buckets=None, **given):
    """a causal mask where causal is False"""
    return attention(q, slopes, sinks, buckets, **{**given, "causal": True})


def attention__no_window(q, slopes=None, sinks=None, buckets=None, **given):
    """queries that see keys outside the window: window is ignored"""
    return attention(q, slopes, sinks, buckets, **{**given, "window": 0})


def attention__wide_window(q, slopes=None, sinks=None, buckets=None, **given):
    """a window one key too wide"""
    return attention(q, slopes, sinks, buckets, **{**given, "window": given["window"] and given["window"] + 1})


def attention__no_softcap(q, slopes=None, sinks=None, buckets=None, **given):
    """scores without softcap"""
    return attention(q, slopes, sinks, buckets, **{**given, "softcap": 0.0})


def attention__late_softcap(q, slopes=None, sinks=None, buckets=None, **given):
    """a softcap that multiplies by c but does not divide by c"""
    cap = given["softcap"]
    return attention(q, slopes, sinks, buckets, **{**given, "scale": given["scale"] * (cap or 1.0)})


def attention__no_slopes(q, slopes=None, sinks=None, buckets=None, **given):
    """scores without the bias of the slopes (ALiBi)"""
    return attention(q, None, sinks, buckets, **given)


def attention__steep_slopes(q, slopes=None, sinks=None, buckets=None, **given):
    """a bias of the slopes with the wrong sign: distance is key position minus query position, which is negative"""
    return attention(q, None if slopes is None else -slopes, sinks, buckets, **given)


def attention__no_sinks(q, slopes=None, sinks=None, buckets=None, **given):
    """a softmax without the sinks"""
    return attention(q, slopes, None, buckets, **given)


def attention__no_buckets(q, slopes=None, sinks=None, buckets=None, **given):
    """scores without the bias of the buckets"""
    return attention(q, slopes, sinks, None, **given)


def attention__heads_in_turn(q, slopes=None, sinks=None, buckets=None, **given):
    """key head h % G for query head h: use key head h // (H / G)"""
    heads, groups = given["heads"], given["cache"].shape.kv_heads
    order = np.argsort(np.arange(heads) % groups, kind="stable")
    mixed = attention(q.reshape(len(q), heads, -1)[:, order].reshape(q.shape),
                      *(None if a is None else a[..., order] for a in (slopes, sinks, buckets)), **given)
    y = np.empty_like(mixed).reshape(len(q), heads, -1)
    y[:, order] = mixed.reshape(y.shape)
    return y.reshape(mixed.shape)


def attention__keys_in_turn(q, slopes=None, sinks=None, buckets=None, *, cache, **given):
    """keys of head h % G with values of head h // (H / G): use key head h // (H / G) for both"""
    order = np.arange(given["heads"]) % cache.shape.kv_heads

    class Mixed:
        shape, value_dim, lengths, table = cache.shape, cache.value_dim, cache.lengths, cache.table

        @staticmethod
        def read(*where):
            k, v = cache.read(*where)
            return k[:, order], np.repeat(v, len(order) // v.shape[1], axis=1)

    return attention(q, slopes, sinks, buckets, cache=Mixed, **given)


def attention__capped_first(q, slopes=None, sinks=None, buckets=None, **given):
    """scores that are capped before they are multiplied by scale"""
    cap = given["softcap"]
    if not cap:
        return attention(q, slopes, sinks, buckets, **given)
    small = {**given, "softcap": cap * given["scale"], "scale": given["scale"]}
    return attention(q, slopes, sinks, buckets, **small)


def attention__scaled_twice(q, slopes=None, sinks=None, buckets=None, **given):
    """scores that are multiplied by scale twice"""
    return attention(q, slopes, sinks, buckets, **{**given, "scale": given["scale"] ** 2})


def attention__one_sequence(q, slopes=None, sinks=None, buckets=None, *, batch, cache, **given):
    """keys of the first sequence for all sequences: each sequence has its own row of the block table"""
    class First:
        shape, value_dim, lengths, read = cache.shape, cache.value_dim, cache.lengths, cache.read

        @staticmethod
        def table(batch):
            return cache.table(batch)[[0] * len(cache.table(batch))]

    return attention(q, slopes, sinks, buckets, batch=batch, cache=First, **given)


def attention__self_unseen(q, slopes=None, sinks=None, buckets=None, *, batch, cache, **given):
    """a causal mask that hides a query's own key: a query sees distance 0"""
    class Shifted:
        starts, positions = batch.starts, batch.positions - 1

    class Known:
        shape, value_dim, read = cache.shape, cache.value_dim, cache.read

        @staticmethod
        def lengths(_):
            return cache.lengths(batch)

        @staticmethod
        def table(_):
            return cache.table(batch)

    return attention(q, slopes, sinks, buckets, batch=Shifted, cache=Known, **given)


def attention__biased_first(q, slopes=None, sinks=None, buckets=None, *, batch, cache, heads, **given):
    """a bias that is added before the softcap: add it after the softcap"""
    if slopes is None or not given["softcap"]:
        return attention(q, slopes, sinks, buckets, batch=batch, cache=cache, heads=heads, **given)
    y = np.empty((len(q), heads * cache.value_dim), np.float32)
    for b, length in enumerate(cache.lengths(batch)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        k, v = cache.read(cache.table(batch)[b], length)
        k, v = (np.repeat(a, heads // a.shape[1], axis=1).transpose(1, 0, 2) for a in (k, v))
        distance = np.arange(length) - batch.positions[rows, None]
        scores = given["scale"] * (q[rows].reshape(-1, heads, k.shape[2]).transpose(1, 0, 2) @ k.transpose(0, 2, 1))
        scores = given["softcap"] * np.tanh((scores + slopes[:, None, None] * distance) / given["softcap"])
        scores[:, distance > 0] = -np.inf
        e = np.exp(scores - scores.max(axis=2, keepdims=True))
        y[rows] = (e / e.sum(axis=2, keepdims=True) @ v).transpose(1, 0, 2).reshape(e.shape[1], -1)
    return y


def attention__window_of_cross(q, slopes=None, sinks=None, buckets=None, *, batch, cache, window, **given):
    """a mask on the keys of an encoder: if cache.shape.kind is "cross", causal and window do not apply"""
    if cache.shape.kind != "cross":
        return attention(q, slopes, sinks, buckets, batch=batch, cache=cache, window=window, **given)
    kind = type("Self", (), {"kind": "self", "__getattr__": lambda self, name: getattr(cache.shape, name)})()
    seen = type("Seen", (), {"shape": kind, "__getattr__": lambda self, name: getattr(cache, name)})()
    return attention(q, slopes, sinks, buckets, batch=batch, cache=seen, window=window, **given)


def attention__over_queries(q, slopes=None, sinks=None, buckets=None, *, batch, cache, heads, **given):
    """a softmax over the queries instead of the keys of each query"""
    y = np.empty((len(q), heads * cache.value_dim), np.float32)
    for b, length in enumerate(cache.lengths(batch)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        k, v = cache.read(cache.table(batch)[b], length)
        k, v = (np.repeat(a, heads // a.shape[1], axis=1).transpose(1, 0, 2) for a in (k, v))
        distance = np.arange(length) - batch.positions[rows, None]
        scores = given["scale"] * (q[rows].reshape(-1, heads, k.shape[2]).transpose(1, 0, 2) @ k.transpose(0, 2, 1))
        scores[:, distance > 0] = -np.inf
        e = np.exp(scores - scores.max(axis=2, keepdims=True))
        p = e / e.sum(axis=1, keepdims=True)
        y[rows] = (p @ v).transpose(1, 0, 2).reshape(p.shape[1], -1)
    return y


def attention__values_of_head_0(q, slopes=None, sinks=None, buckets=None, *, cache, **given):
    """the values of key head 0 for all heads: use key head h // (H / G) for keys and values"""
    def read(table, length, *more):
        k, v = cache.read(table, length, *more)
        return k, np.repeat(v[:, :1], v.shape[1], axis=1)

    seen = type("Seen", (), {"read": staticmethod(read), "__getattr__": lambda self, name: getattr(cache, name)})()
    return attention(q, slopes, sinks, buckets, cache=seen, **given)


def attention__narrow_window(q, slopes=None, sinks=None, buckets=None, *, window, **given):
    """a window one key too narrow: with a window of 1 a query sees itself"""
    if window == 1:
        return np.full((len(q), given["heads"] * given["cache"].value_dim), np.nan, np.float32)
    return attention(q, slopes, sinks, buckets, window=window and window - 1, **given)


def attention__sink_of_head_0(q, slopes=None, sinks=None, buckets=None, **given):
    """the sink of head 0 for all heads: each head has its own sink"""
    return attention(q, slopes, None if sinks is None else np.full_like(sinks, sinks[0]), buckets, **given)


def bench(functions):
    """A prompt of 256 tokens with 8 query heads of 64 columns and 2 key heads."""
    from numflow.learn.graders.reference import bars

    def build(b):
        q, k, v = b.inputs(512, 128, 128)
        cache = b.cache(kv_heads=2, k_dim=64)
        y = b.buffer(512)
        b.step("cache_write", (k, v), (), cache=cache)
        b.step("attention", (q,), (y,), cache=cache, heads=8, scale=0.125)
        return y

    return bars(functions, LAB, build, 256)
