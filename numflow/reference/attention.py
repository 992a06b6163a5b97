"""Softmax attention over the paged KV cache (op `attention`), selection of keys or blocks of keys (ops `index_select`,
`block_select`), and pooled entries, one for a window of tokens (op `pool`)."""

import numpy as np

from numflow.network.t5_buckets import bucket


def index_select(q, weights, *, batch, cache, heads, top_k, width):
    """Bits of the top_k best keys of each row: score = sum over h of weights[t, h] * max(q head h . key, 0).

    q [T, I * d], weights [T, I] -> i32 [T, width]: bit p % 32 of word p // 32 is set if key p is selected. Of equal
    scores the earlier key is selected.
    """
    y = np.zeros((len(q), width), np.int32)
    for b, length in enumerate(cache.lengths(batch)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        if cache.shape.every:
            k = cache.entries(cache.table(batch)[b], length)
        else:
            k = cache.read(cache.table(batch)[b], length, min(batch.positions[rows], default=0))[0][:, 0]
        products = np.maximum(_by_head(q[rows], heads) @ k.T, 0)  # [I, n, L]
        scores = np.sum(weights[rows].T[:, :, None] * products, axis=0)
        visible = np.arange(len(k)) < (batch.positions[rows, None] + 1) // cache.every
        best = np.argsort(-np.where(visible, scores, -np.inf), axis=1, kind="stable")[:, :top_k]
        bits = np.zeros((len(scores), 32 * width), bool)
        np.put_along_axis(bits, best, True, axis=1)
        bits[:, :len(k)] &= visible
        y[rows] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return y


def index_tokens(x, *, batch, every, width):
    """Bits of tokens for bits of entries: of the tokens in the windows of x i32 [T, V], and in the row's incomplete
    window up to its position. i32 [T, width]."""
    token, positions = np.arange(32 * width), batch.positions[:, None]
    windows = np.unpackbits(np.ascontiguousarray(x).view(np.uint8), axis=1, bitorder="little").astype(bool)
    last = (token // every == (positions + 1) // every) & (token <= positions)
    bits = windows[:, token // every] | last
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def block_select(q, *, batch, cache, heads, block, top_k, local, width):
    """Bits of the top_k best blocks of keys, for each head by itself: score of a block = the largest q . key of its
    visible keys; the `local` last blocks come first.

    q [T, H * d] -> i32 [T, width], width / H words per head: bit p % 32 of word p // 32 is set if block p is selected.
    """
    y = np.zeros((len(q), heads, width // heads), np.int32)
    for b, length in enumerate(cache.lengths(batch)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        k, positions = cache.read(cache.table(batch)[b], length)[0][:, 0], batch.positions[rows, None]
        visible = np.arange(length) <= positions
        scores = np.where(visible, _by_head(q[rows], heads) @ k.T, -np.inf)  # [H, n, L]
        count = -(-length // block)
        scores = np.pad(scores, ((0, 0), (0, 0), (0, count * block - length)), constant_values=-np.inf)
        scores = scores.reshape(*scores.shape[:2], count, block).max(axis=3)
        ago = positions // block - np.arange(count)  # blocks between the row's own and this one
        scores[:, (ago >= 0) & (ago < local)] = np.inf
        best = np.argsort(-scores, axis=2, kind="stable")[:, :, :top_k]
        bits = np.zeros((*scores.shape[:2], 32 * y.shape[2]), bool)
        np.put_along_axis(bits, best, True, axis=2)
        bits[:, :, :count] &= ago >= 0
        y[rows] = np.packbits(bits, axis=2, bitorder="little").view(np.int32).transpose(1, 0, 2)
    return y.reshape(len(q), width)


def attention(q, *beside, slopes=None, sinks=None, buckets=None, position_buckets=None, batch, cache, heads, scale,
              causal, window, softcap, bucket_distance, chunk=0, block=0, entries="", cross=""):
    """softmax(softcap(scale * q k^T) + bias) v over the visible keys of each sequence; q [T, H*E] -> y [T, H*E_v].

    slopes [H]:       ALiBi bias -slope * |key position - query position|.
    buckets [n, H]:   T5's relative position bias, by bucket of the relative position.
    sinks [H]:        one more score per head that takes probability and has no value.
    chunk:            c > 0: only keys of the query's own chunk of c positions are visible.
    beside:           selected [T, W], bits of the visible keys (index_select), or with `block` [T, G * W], bits of
                      visible blocks for each key head (block_select); or, with position_buckets, products c2p of
                      queries and p2c of keys with learned position embeddings, [T, H * N] each.
    position_buckets: index of the embedding for each relative position -R .. R.
    entries:          a cache of entries. A row also sees the entries of complete windows, or the selected of them.
    cross:            a cross cache. A row also sees all its keys, without a bias.
    """
    selected = beside[0] if beside and position_buckets is None else None
    y = np.empty((len(q), heads * cache.value_dim), np.float32)
    for b, length in enumerate(cache.lengths(batch)):
        rows = slice(batch.starts[b], batch.starts[b + 1])
        k, v = cache.read(cache.table(batch)[b], length, min(batch.positions[rows], default=0))
        distance = np.arange(length) - batch.positions[rows, None]  # key position - query position [n, L]
        products = _by_head(q[rows], heads) @ _by_query_head(k, heads).transpose(0, 2, 1)
        if position_buckets is not None:
            products = products + _relative(*(_by_head(x[rows], heads) for x in beside), buckets=position_buckets,
                                            distance=distance)
        scores = _scores(products, scale, softcap)
        if slopes is not None:
            scores -= slopes[:, None, None] * np.abs(distance).astype(np.float32)
        if buckets is not None:
            scores += buckets[bucket(distance, len(buckets), bucket_distance, causal)].transpose(2, 0, 1)
        if cache.shape.kind == "self":
            visible = _visible(distance, causal, window)
            if chunk:
                visible &= np.arange(length) >= batch.positions[rows, None] // chunk * chunk
            if selected is not None and not entries:
                visible = visible & _selected(selected[rows], length, block, k.shape[1], heads)
            scores[np.broadcast_to(~visible, scores.shape)] = -np.inf
        if entries:
            pooled = entries.entries(entries.table(batch)[b], length)
            entry_scores = _scores(_by_head(q[rows], heads) @ pooled.T, scale, softcap)
            visible = np.arange(len(pooled)) < (batch.positions[rows, None] + 1) // entries.every
            if selected is not None:
                visible &= _bits(selected[rows], len(pooled))
            entry_scores[:, ~visible] = -np.inf
            scores = np.concatenate([scores, entry_scores], axis=2)
            v = np.concatenate([v, pooled[:, None, :v.shape[2]]])
        if cross:
            k, values = cross.read(cross.table(batch)[b], cross.lengths(batch)[b])
            products = _by_head(q[rows], heads) @ _by_query_head(k, heads).transpose(0, 2, 1)
            scores = np.concatenate([scores, _scores(products, scale, softcap)], axis=2)
            v = np.concatenate([v, values])
        y[rows] = _merge(_softmax(scores, sinks) @ _by_query_head(v, heads))
    return y


def pool(bias, *, batch, cache, every, series):
    """y [T, E]: entries of windows of `every` tokens, in the rows of their last tokens, zeros in other rows (ops.py).

    bias [every, S * E].
    """
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


def _selected(words, length, block, kv_heads, heads):
    """The selected keys: [n, L], or with blocks [H, n, L], by query head."""
    if not block:
        return _bits(words, length)
    blocks = [np.repeat(_bits(part, -(-length // block)), block, axis=1)[:, :length]
              for part in np.split(words, kv_heads, axis=1)]
    return np.repeat(blocks, heads // kv_heads, axis=0)


def _relative(c2p, p2c=None, *, buckets, distance):
    """Relative-position scores: c2p [H, n, N], distance [n, L] -> c2p[h, i, bucket] [H, n, L]; with p2c [H, L, N], of a
    whole sequence, plus p2c[h, j, bucket]."""
    reach = len(buckets) // 2
    bucket_of = buckets[np.clip(distance, -reach, reach) + reach].astype(np.int64)
    index = np.arange(len(bucket_of))
    scores = c2p[:, index[:, None], bucket_of]
    return scores if p2c is None else scores + p2c[:, index, bucket_of]


def _scores(products, scale, softcap):
    """Scaled products with the soft cap, [H, n, L] -> [H, n, L]."""
    scores = np.float32(scale) * products
    return np.float32(softcap) * np.tanh(scores / np.float32(softcap)) if softcap else scores


def _visible(distance, causal, window):
    """Mask of the keys that a query sees; window w: w keys up to its own, and w - 1 keys ahead if not causal."""
    visible = distance <= 0 if causal else np.ones(distance.shape, bool)
    return visible & (np.abs(distance) < window) if window else visible


def _softmax(scores, sinks):
    """Softmax over the keys of [H, n, L]; the sink of a head is one more term of the sum."""
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
