"""Checks of steps that read or write KV caches: names, shapes and dtypes, against the op table."""

from numflow.errors import NetworkError, did_you_mean
from numflow.ops import Cache, Network, Step, View, param


def expect(step: Step, what: str, expected, found) -> None:
    if expected != found:
        raise NetworkError(f"{step}: {what} should be {expected}, is {found}")


def rows(step: Step, network: Network, view: View) -> str:
    return network.buffers[view.buffer].rows


def _cache(step: Step, network: Network, name: str = "") -> Cache:
    name = name or param(step, "cache")
    if name not in network.caches:
        raise NetworkError(f"{step}: no cache named {name!r}{did_you_mean(name, network.caches)}")
    return network.caches[name]


def cache_write(step: Step, network: Network) -> None:
    cache = _cache(step, network)
    if cache.prefix and (cache.v_dim or cache.prefix > cache.k_dim):
        raise NetworkError(f"{step}: values of {cache.prefix} columns are no prefix of keys of {cache.k_dim}, with "
                           f"{cache.v_dim} stored beside them")
    if cache.every and (cache.kv_heads, cache.prefix, cache.kind) != (1, cache.k_dim, "self"):
        raise NetworkError(f"{step}: entries have one head, whose keys are its values")
    expect(step, "number of inputs", 1 if cache.prefix else 2, len(step.inputs))
    for what, view, size in zip(("k", "v"), step.inputs, (cache.k_dim, cache.v_dim)):
        expect(step, f"width of {what}", cache.kv_heads * size, view.width)


def index_select(step: Step, network: Network) -> None:
    cache, heads, (q, weights), y = _cache(step, network), param(step, "heads"), step.inputs, step.outputs[0]
    expect(step, "key heads of the index", 1, cache.kv_heads)
    expect(step, "width of q", heads * cache.k_dim, q.width)
    expect(step, "width of weights", heads, weights.width)
    expect(step, "dtype of the output", "i32", network.buffers[y.buffer].dtype)


def block_select(step: Step, network: Network) -> None:
    cache, heads, (q,), (y,) = _cache(step, network), param(step, "heads"), step.inputs, step.outputs
    expect(step, "key heads and windows of the index", (1, 0), (cache.kv_heads, cache.every))
    expect(step, "width of q", heads * cache.k_dim, q.width)
    expect(step, "dtype of the output", "i32", network.buffers[y.buffer].dtype)
    if y.width % heads:
        raise NetworkError(f"{step}: {heads} heads do not divide {y.width} words")
    if param(step, "block") < 1 or not 0 <= param(step, "local") <= param(step, "top_k"):
        raise NetworkError(f"{step}: a block should have 1 key or more, and 0 to top_k {param(step, 'top_k')} blocks "
                           f"be local; they are {param(step, 'block')} and {param(step, 'local')}")


def index_tokens(step: Step, network: Network) -> None:
    (x,), (y,), every = step.inputs, step.outputs, param(step, "every")
    if every < 1:
        raise NetworkError(f"{step}: every should be 1 or more, is {every}")
    for what, view in (("input", x), ("output", y)):
        expect(step, f"dtype of the {what}", "i32", network.buffers[view.buffer].dtype)
    expect(step, "words of entries", -(-y.width // every), x.width)


def pool(step: Step, network: Network) -> None:
    """The cache has gates and values of each token; the bias has a row per position in a window."""
    cache, y, every, series = _cache(step, network), step.outputs[0], param(step, "every"), param(step, "series")
    if every < 1 or series < 1:
        raise NetworkError(f"{step}: every and series should be 1 or more, are {every} and {series}")
    expect(step, "tokens for which the cache has a row", 1, cache.every)
    expect(step, "columns of the cache", 2 * series * y.width, cache.k_dim)
    expect(step, "shape of bias", (every, series * y.width), network.weights[step.weights["bias"]].shape)
    expect(step, "rows of the output", "tokens", rows(step, network, y))


def attention(step: Step, network: Network) -> None:
    cache, heads = _cache(step, network), param(step, "heads")
    if name := param(step, "entries"):
        entries = _cache(step, network, name)
        biases = {"slopes", "buckets", "position_buckets"} & {*step.weights}
        if not entries.every or not param(step, "causal") or biases:
            raise NetworkError(f"{step}: attention over entries needs a cache of the past, causal, without a "
                               "relative-position bias")
        expect(step, "columns of entries", (cache.k_dim, cache.value_dim, 1),
               (entries.k_dim, entries.value_dim, cache.kv_heads))
    if name := param(step, "cross"):
        cross = _cache(step, network, name)
        expect(step, "kinds of both caches", ("self", "cross"), (cache.kind, cross.kind))
        expect(step, "heads and columns of the cross cache", (cache.kv_heads, cache.k_dim, cache.v_dim, cache.prefix),
               (cross.kv_heads, cross.k_dim, cross.v_dim, cross.prefix))
        if param(step, "entries") or cache.prefix:
            raise NetworkError(f"{step}: attention over a cross cache beside its own needs stored values, without "
                               "entries")
    if heads % cache.kv_heads:
        raise NetworkError(f"{step}: {cache.kv_heads} key/value heads do not divide {heads} query heads")
    expect(step, "width of q", heads * cache.k_dim, step.inputs[0].width)
    expect(step, "width of the output", heads * cache.value_dim, step.outputs[0].width)
    relative = "position_buckets" in step.weights
    for view in step.inputs[1:]:
        what = "products with relative positions" if relative else "chosen"
        expect(step, f"dtype of {what}", "f32" if relative else "i32", network.buffers[view.buffer].dtype)
        expect(step, f"width of {what}", step.inputs[1].width if relative else view.width, view.width)
    if param(step, "block") and (relative or param(step, "entries") or len(step.inputs) != 2
                                 or step.inputs[1].width % cache.kv_heads or cache.kind != "self"):
        raise NetworkError(f"{step}: selected blocks need words for each of the {cache.kv_heads} key heads, and no "
                           "entries or relative positions")
    count = len(step.inputs)
    expect(step, "number of inputs", max(count, 2) if relative else min(count, 2), count)
    if relative and (cache.kind, step.inputs[1].width % heads) != ("self", 0):
        raise NetworkError(f"{step}: relative positions need attention over the batch itself, and an equal "
                           "number of columns per head")
    if relative and len(step.inputs) == 3 and (param(step, "causal"), cache.kv_heads) != (False, heads):
        raise NetworkError(f"{step}: products of keys with relative positions need bidirectional attention, with as "
                           "many key heads as query heads")
    for role in ("slopes", "sinks"):
        if role in step.weights:
            expect(step, f"shape of {role}", (heads,), network.weights[step.weights[role]].shape)
