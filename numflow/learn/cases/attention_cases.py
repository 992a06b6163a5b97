"""Cases of `cache_write` and `attention`, over paged caches: chunked prefill, ragged batches, then single tokens."""

import numpy as np

from numflow.learn.cases.build import CaseBuilder as Builder

# Three sequences: one is prefilled in two chunks, one begins with a single token, one decodes from the second run on.
SCHEDULE = (((0, 37), (1, 1), (2, 5)), ((2, 1), (0, 4)), ((0, 1), (1, 1), (2, 1)))
SHORT = (((0, 6), (1, 3)), ((1, 1), (0, 1)))
LONG = (((0, 300),), ((0, 1),))
WHOLE = (((0, 9), (1, 1), (2, 40)),)  # bidirectional: the whole sequence is in the batch

# name: heads, kv heads, head size, params, weights, schedule
SELF = {
    "attention": (4, 4, 16, {}, (), SCHEDULE),
    "attention-grouped": (6, 2, 64, {}, (), SCHEDULE),
    "attention-multi-query": (5, 1, 32, {}, (), SHORT),
    "attention-head-20": (3, 3, 20, {}, (), SCHEDULE),
    "attention-long": (2, 1, 64, {}, (), LONG),
    "attention-scale": (2, 2, 16, {"scale": 1.0}, (), SHORT),
    "attention-window-1": (2, 2, 16, {"window": 1}, (), SHORT),
    "attention-window": (4, 2, 16, {"window": 7}, (), SCHEDULE),
    "attention-window-wider-than-text": (2, 2, 16, {"window": 64}, (), SHORT),
    "attention-window-long": (2, 1, 32, {"window": 100}, (), LONG),
    "attention-chunk": (4, 2, 16, {"chunk": 6}, (), SCHEDULE),
    "attention-chunk-long": (2, 1, 64, {"chunk": 128}, (), LONG),
    "attention-chunk-window": (2, 2, 16, {"chunk": 16, "window": 9}, (), SCHEDULE),
    "attention-softcap": (4, 2, 32, {"softcap": 2.0}, (), SCHEDULE),
    "attention-softcap-slopes": (4, 2, 32, {"softcap": 1.5}, ("slopes",), SHORT),
    "attention-slopes": (6, 6, 16, {}, ("slopes",), SCHEDULE),
    "attention-slopes-both-ways": (6, 6, 16, {"causal": False}, ("slopes",), WHOLE),
    "attention-sinks": (4, 2, 64, {}, ("sinks",), SCHEDULE),
    "attention-sinks-window": (4, 2, 16, {"window": 5}, ("sinks",), SCHEDULE),
    "attention-buckets-causal": (4, 4, 16, {"scale": 1.0, "bucket_distance": 16}, ("buckets",), SCHEDULE),
    "attention-buckets-both-ways": (4, 4, 16, {"causal": False, "bucket_distance": 16}, ("buckets",), WHOLE),
    "attention-both-ways": (4, 2, 32, {"causal": False}, (), WHOLE),
    "attention-both-ways-window": (2, 2, 20, {"causal": False, "window": 6}, (), WHOLE),
}


def attention_cases():
    for name, (heads, kv_heads, head_dim, params, weights, schedule) in SELF.items():
        b = Builder(name)
        q, k, v = b.inputs(heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        _attend(b, q, k, v, heads, head_dim, b.cache(kv_heads=kv_heads, k_dim=head_dim), params, weights)
        yield b.case(b.last, schedule, bound=2e-5)
    yield _different_value_size()
    for heads, kv_heads, k_dim, prefix, params, schedule in (
            (4, 1, 28, 20, {}, SCHEDULE), (6, 2, 40, 32, {"softcap": 2.0}, SHORT),
            (5, 1, 96, 48, {"window": 7}, SCHEDULE), (2, 1, 64, 64, {}, LONG), (9, 1, 352, 320, {}, SHORT)):
        yield _values_in_keys(heads, kv_heads, k_dim, prefix, params, schedule)
    yield _distances("attention-distances", 4, 16, 12, 7, {})
    yield _distances("attention-distances-softcap-window", 3, 20, 9, 70, {"softcap": 2.0, "window": 20})
    yield _distances("attention-distances-long", 2, 64, 32, 140, {}, (((0, 150), (1, 3)),))
    yield _distances_before("attention-distances-before", 4, 2, 16, 9, {})
    yield _distances_before("attention-distances-before-window", 6, 1, 20, 6, {"window": 5})
    yield _cross("attention-cross", causal=False)
    yield _cross("attention-cross-window", causal=True, window=2)
    yield _merged("attention-merged", 4, 2, 16, {}, ())
    yield _merged("attention-merged-window", 6, 1, 32, {"window": 3, "softcap": 2.0}, ())
    yield _merged("attention-merged-biased", 3, 3, 20, {}, ("slopes", "sinks"))
    for heads, size, top_k, schedule in ((3, 16, 5, SCHEDULE), (2, 24, 60, LONG), (1, 8, 300, SHORT)):
        yield _indexed(heads, size, top_k, schedule)
    for every, series, heads, size, top_k, schedule in (
            (4, 2, 4, 16, 0, SCHEDULE), (3, 1, 9, 24, 0, LONG), (70, 2, 2, 16, 0, LONG), (1, 1, 3, 20, 0, SHORT),
            (4, 2, 5, 48, 3, SCHEDULE), (2, 2, 8, 16, 40, LONG)):
        yield _entries(every, series, heads, size, top_k, schedule)
    for every, top_k, schedule in ((4, 2, SCHEDULE), (5, 3, LONG), (40, 1, LONG), (1, 6, SHORT)):
        yield _tokens_of_entries(every, top_k, schedule)
    for heads, kv_heads, size, block, top_k, local, schedule in (
            (4, 2, 16, 4, 3, 1, SCHEDULE), (6, 3, 20, 5, 2, 0, LONG), (2, 1, 64, 16, 4, 2, LONG),
            (5, 5, 48, 1, 7, 1, SHORT), (2, 2, 16, 128, 2, 1, LONG)):
        yield _blocks(heads, kv_heads, size, block, top_k, local, schedule)


def _blocks(heads, kv_heads, size, block, top_k, local, schedule):
    """Sparse attention to the blocks of keys that each index head selects for its key head. The index has keys of few
    values, so that scores tie."""
    b = Builder(f"block_select-{top_k}-of-{block}-{kv_heads}-heads")
    q, key, query, k, v = b.inputs(kv_heads * size, size, heads * 16, kv_heads * 16, kv_heads * 16)
    b.arrays["table.0"][:, :key.start + size] = np.sign(b.arrays["table.0"][:, :key.start + size])
    index, cache = b.cache(kv_heads=1, k_dim=size, prefix=size), b.cache(kv_heads=kv_heads, k_dim=16)
    words = -(-320 // (32 * block))
    chosen, y = b.buffer(kv_heads * words, dtype="i32"), b.buffer(heads * 16)
    b.step("cache_write", (key,), (), cache=index)
    b.step("block_select", (q,), (chosen,), cache=index, heads=kv_heads, block=block, top_k=top_k, local=local)
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (query, chosen), (y,), cache=cache, heads=heads, scale=0.25, block=block)
    return b.case(y, schedule, bound=2e-5)


def _attend(b, q, k, v, heads, head_dim, cache, params, weights=(), v_dim=None):
    shapes = {"slopes": (heads,), "sinks": (heads,), "buckets": (8, heads)}
    drawn = {role: b.weight(role, np.abs(b.normal(*shapes[role])) if role == "slopes" else b.normal(*shapes[role]))
             for role in weights}
    b.last = b.buffer(heads * (v_dim or head_dim))
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (q,), (b.last,), drawn, **{"scale": head_dim**-0.5, **params}, cache=cache, heads=heads)


def _distances_before(name, heads, kv_heads, head_dim, vectors, params):
    """Disentangled attention of queries only, to keys before them: vectors by distance (causal)."""
    b = Builder(name)
    q, k, v, of_queries = b.inputs(heads * head_dim, *[kv_heads * head_dim] * 2, heads * vectors)
    cache, y = b.cache(kv_heads=kv_heads, k_dim=head_dim), b.buffer(heads * head_dim)
    b.step("cache_write", (k, v), (), cache=cache)
    buckets = b.weight("position_buckets", np.r_[np.arange(vectors)[::-1], np.zeros(vectors - 1)].astype(np.float32))
    b.step("attention", (q, of_queries), (y,), {"position_buckets": buckets}, scale=head_dim**-0.5,
           cache=cache, heads=heads, **params)
    return b.case(y, SCHEDULE, bound=2e-5)


def _distances(name, heads, head_dim, vectors, reach, params, schedule=WHOLE):
    """Disentangled attention: products of queries and of keys with the vectors of distances are random inputs here."""
    b = Builder(name)
    q, k, v, of_queries, of_keys = b.inputs(*[heads * head_dim] * 3, *[heads * vectors] * 2)
    cache, y = b.cache(kv_heads=heads, k_dim=head_dim), b.buffer(heads * head_dim)
    b.step("cache_write", (k, v), (), cache=cache)
    buckets = b.weight("position_buckets", b.rng.integers(0, vectors, 2 * reach + 1).astype(np.float32))
    b.step("attention", (q, of_queries, of_keys), (y,), {"position_buckets": buckets}, cache=cache, heads=heads,
           **{"scale": head_dim**-0.5, "causal": False, **params})
    return b.case(y, schedule, bound=2e-5)


def _different_value_size():
    """Keys of 24 columns and values of 16."""
    b = Builder("attention-value-size")
    q, k, v = b.inputs(4 * 24, 2 * 24, 2 * 16)
    _attend(b, q, k, v, 4, 24, b.cache(kv_heads=2, k_dim=24, v_dim=16), {}, v_dim=16)
    return b.case(b.last, SCHEDULE, bound=2e-5)


def _values_in_keys(heads, kv_heads, k_dim, prefix, params, schedule):
    """Values are the first columns of keys and are not stored."""
    b = Builder(f"attention-values-in-keys-{k_dim}-{prefix}")
    q, k = b.inputs(heads * k_dim, kv_heads * k_dim)
    y, cache = b.buffer(heads * prefix), b.cache(kv_heads=kv_heads, k_dim=k_dim, prefix=prefix)
    b.step("cache_write", (k,), (), cache=cache)
    b.step("attention", (q,), (y,), **{"scale": k_dim**-0.5, **params}, cache=cache, heads=heads)
    return b.case(y, schedule, bound=2e-5)


def _indexed(heads, size, top_k, schedule):
    """Sparse attention to the keys that an index selects. The index has keys of few values, so that scores tie."""
    b = Builder(f"index_select-{top_k}-of-{heads}-heads")
    q, weights, key, query, k, v = b.inputs(heads * size, heads, size, 64, 32, 32)
    b.arrays["table.0"][:, :heads * (size + 1) + size] = np.sign(b.arrays["table.0"][:, :heads * (size + 1) + size])
    index, cache = b.cache(kv_heads=1, k_dim=size, prefix=size), b.cache(kv_heads=2, k_dim=16)
    chosen, y = b.buffer(11, dtype="i32"), b.buffer(64)
    b.step("cache_write", (key,), (), cache=index)
    b.step("index_select", (q, weights), (chosen,), cache=index, heads=heads, top_k=top_k)
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (query, chosen), (y,), cache=cache, heads=4, scale=0.25)
    return b.case(y, schedule, bound=2e-5)


def _entries(every, series, heads, size, top_k, schedule):
    """Entries are pooled from windows of tokens. Queries see the last keys, and all entries or the best top_k."""
    b = Builder(f"attention-entries-{series}-of-{every}{f'-best-{top_k}' * bool(top_k)}")
    q, k, rows, query, weights = b.inputs(heads * size, size, 2 * series * size, 6 * size, 6)
    last = b.cache(kv_heads=1, k_dim=rows.width, prefix=rows.width, every=1)
    own, entries = (b.cache(kv_heads=1, k_dim=size, prefix=size, every=of) for of in (0, every))
    entry, y = b.buffer(size), b.buffer(heads * size)
    b.step("cache_write", (rows,), (), cache=last)
    b.step("pool", (), (entry,), {"bias": b.weight("bias", b.normal(every, series * size))}, cache=last, every=every,
           series=series)
    b.step("cache_write", (entry,), (), cache=entries)
    b.step("cache_write", (k,), (), cache=own)
    chosen = (b.buffer(5, dtype="i32"),) if top_k else ()
    if top_k:
        b.step("index_select", (query, weights), chosen, cache=entries, heads=6, top_k=top_k)
    b.step("attention", (q, *chosen), (y,), {"sinks": b.weight("sinks", b.normal(heads))}, cache=own, heads=heads,
           scale=size**-0.5, window=5, entries=entries)
    return b.case(y, schedule, bound=2e-5)


def _tokens_of_entries(every, top_k, schedule):
    """Sparse attention to the tokens of the best entries, and to those of the incomplete window."""
    b = Builder(f"index_tokens-{top_k}-of-{every}")
    q, k, v, rows, query, weights = b.inputs(64, 32, 32, 2 * 16, 3 * 16, 3)
    last = b.cache(kv_heads=1, k_dim=rows.width, prefix=rows.width, every=1)
    entries, cache = b.cache(kv_heads=1, k_dim=16, prefix=16, every=every), b.cache(kv_heads=2, k_dim=16)
    entry, chosen, y = b.buffer(16), b.buffer(11, dtype="i32"), b.buffer(64)
    best = b.buffer(-(-11 // every), dtype="i32")
    b.step("cache_write", (rows,), (), cache=last)
    b.step("pool", (), (entry,), {"bias": b.weight("bias", b.normal(every, 16))}, cache=last, every=every)
    b.step("cache_write", (entry,), (), cache=entries)
    b.step("index_select", (query, weights), (best,), cache=entries, heads=3, top_k=top_k)
    b.step("index_tokens", (best,), (chosen,), every=every)
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (q, chosen), (y,), cache=cache, heads=4, scale=0.25)
    return b.case(y, schedule, bound=2e-5)


def _cross(name, **params):
    """Cross attention: decoder queries see all keys of the encoder, whatever the mask parameters are."""
    b = Builder(name)
    cache = b.cache(kv_heads=2, k_dim=16, kind="cross")
    k, v = b.inputs(32, 32, entry="encode")
    b.step("cache_write", (k, v), (), entry="encode", cache=cache)
    (q,) = b.inputs(64)
    y = b.buffer(64)
    b.step("attention", (q,), (y,), cache=cache, heads=4, scale=0.25, **params)
    return b.case(y, (((0, 3), (1, 1), (2, 4)), ((1, 2), (0, 1)), ((2, 1),)), encoder=(9, 33, 2), bound=2e-5)


def _merged(name, heads, kv_heads, size, params, weights):
    """One softmax over the decoder's own keys, which alone have masks and biases, and all keys of the encoder."""
    b = Builder(name)
    cross = b.cache(kv_heads=kv_heads, k_dim=size, kind="cross")
    k, v = b.inputs(kv_heads * size, kv_heads * size, entry="encode")
    b.step("cache_write", (k, v), (), entry="encode", cache=cross)
    q, k, v = b.inputs(heads * size, kv_heads * size, kv_heads * size)
    _attend(b, q, k, v, heads, size, b.cache(kv_heads=kv_heads, k_dim=size), params | {"cross": cross}, weights)
    return b.case(b.last, (((0, 37), (1, 1), (2, 4)), ((1, 2), (0, 1)), ((2, 1),)), encoder=(9, 133, 2), bound=2e-5)
