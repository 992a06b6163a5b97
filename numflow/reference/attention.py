"""Softmax attention over the paged cache (op `attention`), the choice of its keys (op `index_select`), and entries that
stand for windows of tokens (op `pool`)."""

import numpy as np

from numflow.network.t5_buckets import bucket


def index_select(q, weights, *, batch, cache, heads, top_k, width):
    """Bits of the top_k best keys of each row: score = sum over h of weights[t, h] * max(q head h . key, 0).

    q [T, I * d], weights [T, I] -> i32 [T, width]: bit p % 32 of word p // 32 stands for key p. Of equals the earlier.
    """
    y = np.zeros((len(q), width), np.int32)
    for b, length in enumerate(cache.lengths(batch)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        if cache.shape.every:
            k = cache.entries(cache.table(batch)[b], length)
        else:
            k = cache.read(cache.table(batch)[b], length, min(batch.positions[rows], default=0))[0][:, 0]
        each = np.maximum(_by_head(q[rows], heads) @ k.T, 0)  # [I, n, L]
        scores = np.sum(weights[rows].T[:, :, None] * each, axis=0)
        seen = np.arange(len(k)) < (batch.positions[rows, None] + 1) // cache.every
        best = np.argsort(-np.where(seen, scores, -np.inf), axis=1, kind="stable")[:, :top_k]
        bits = np.zeros((len(scores), 32 * width), bool)
        np.put_along_axis(bits, best, True, axis=1)
        bits[:, :len(k)] &= seen
        y[rows] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return y


def attention(q, *beside, slopes=None, sinks=None, buckets=None, places=None, batch, cache, heads, scale, causal,
              window, softcap, bucket_distance, chunk=0, entries=""):
    """softmax(softcap(scale * q k^T) + bias) v over the visible keys of each sequence; q [T, H*E] -> y [T, H*E_v].

    slopes [H]: bias -slope * |key position - query position|. buckets [n, H]: bias by bucket of the distance.
    sinks [H]: one more logit per head that takes probability and has no value. chunk: keys from the beginning of the
    query's own chunk of so many positions on. beside: chosen [T, W], keys whose bits are set (index_select); or with
    places, numbers of distances, products of queries and of keys with that many vectors [T, H * N] each. entries: a
    cache of entries that all rows behind them see as well, or those that are chosen.
    """
    chosen = beside[0] if beside and places is None else None
    y = np.empty((len(q), heads * cache.value_dim), np.float32)
    for b, length in enumerate(cache.lengths(batch)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        k, v = cache.read(cache.table(batch)[b], length, min(batch.positions[rows], default=0))
        distance = np.arange(length) - batch.positions[rows, None]  # key position - query position [n, L]
        products = _by_head(q[rows], heads) @ _by_query_head(k, heads).transpose(0, 2, 1)
        if places is not None:
            products = products + _far(*(_by_head(x[rows], heads) for x in beside), places=places,
                                       distance=distance)
        scores = _scores(products, scale, softcap)
        if slopes is not None:
            scores -= slopes[:, None, None] * np.abs(distance).astype(np.float32)
        if buckets is not None:
            scores += buckets[bucket(distance, len(buckets), bucket_distance, causal)].transpose(2, 0, 1)
        if cache.shape.kind == "self":
            seen = _visible(distance, causal, window)
            if chunk:
                seen &= np.arange(length) >= batch.positions[rows, None] // chunk * chunk
            if chosen is not None and not entries:
                seen &= _bits(chosen[rows], length)
            scores[:, ~seen] = -np.inf
        if entries:
            more = entries.entries(entries.table(batch)[b], length)
            beyond = _scores(_by_head(q[rows], heads) @ more.T, scale, softcap)
            seen = np.arange(len(more)) < (batch.positions[rows, None] + 1) // entries.every
            if chosen is not None:
                seen &= _bits(chosen[rows], len(more))
            beyond[:, ~seen] = -np.inf
            scores, v = np.concatenate([scores, beyond], axis=2), np.concatenate([v, more[:, None, :v.shape[2]]])
        y[rows] = _merge(_softmax(scores, sinks) @ _by_query_head(v, heads))
    return y


def pool(bias, *, batch, cache, every, series):
    """y [T, E] of tokens that end a window of `every` tokens; bias [every, S * E]. See ops.py; other rows are zeros."""
    width = bias.shape[1] // series
    y = np.zeros((len(batch.positions), width), np.float32)
    for b, (start, end) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
        for t in range(start, end):
            length = batch.positions[t] + 1
            if length % every:
                continue
            rows, _ = cache.read(cache.table(batch)[b], length, batch.positions[t])
            gates, values = [], []
            for s in range(series):
                first = length - (series - s) * every
                if first >= 0:
                    columns = slice(s * width, (s + 1) * width)
                    gate, value = np.split(rows[first:first + every, 0], 2, axis=1)
                    gates.append(gate[:, columns] + bias[:, columns])
                    values.append(value[:, columns])
            gates, values = np.concatenate(gates), np.concatenate(values)
            weights = np.exp(gates - gates.max(axis=0))
            y[t] = np.sum(values * (weights / weights.sum(axis=0)), axis=0)
    return y


def _bits(words, count):
    """The first `count` bits of each row of words."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")[:, :count].astype(bool)


def _far(of_queries, of_keys=None, *, places, distance):
    """of_queries [H, n, N], distance [n, L] -> [H, n, L]: each product with the vector of the distance; with of_keys
    [H, L, N], of a whole sequence, that of the key too."""
    reach = len(places) // 2
    number = places[np.clip(distance, -reach, reach) + reach].astype(np.int64)
    each = np.arange(len(number))
    found = of_queries[:, each[:, None], number]
    return found if of_keys is None else found + of_keys[:, each, number]


def _scores(products, scale, softcap):
    """[H, n, L] -> [H, n, L]"""
    scores = np.float32(scale) * products
    return np.float32(softcap) * np.tanh(scores / np.float32(softcap)) if softcap else scores


def _visible(distance, causal, window):
    """Mask of the keys that a query sees; window w: the last w with its own, and as many ahead if not causal."""
    seen = distance <= 0 if causal else np.ones(distance.shape, bool)
    return seen & (np.abs(distance) < window) if window else seen


def _softmax(scores, sinks):
    """Over keys [H, n, L]; the sink of a head is one more term of the sum."""
    peak = np.max(scores, axis=2, keepdims=True)
    if sinks is not None:
        peak = np.maximum(peak, sinks[:, None, None])
    e = np.exp(scores - peak)
    total = np.sum(e, axis=2, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - peak)
    return e / total


def _by_head(x, heads):
    """[n, H * E] -> [H, n, E]"""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def _by_query_head(x, heads):
    """[L, G, E] -> [H, L, E]: query head h uses key/value head h // (H / G)."""
    return np.repeat(x, heads // x.shape[1], axis=1).transpose(1, 0, 2)


def _merge(y):
    """[H, n, E] -> [n, H * E]"""
    return y.transpose(1, 0, 2).reshape(y.shape[1], -1)
