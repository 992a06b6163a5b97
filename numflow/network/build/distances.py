"""Relative position scores (disentangled attention), and convolutions over the tokens around each token.

A table has one embedding per bucket of distances. The layer projects each embedding to a key K and a query Q, as it
projects tokens. The score of query i and key j is q_i . k_j + q_i . K[n] + Q[n] . k_j, n the bucket of their distance.
"""

import math
from dataclasses import replace

import numpy as np

from numflow.errors import SpecError
from numflow.network.build.builder import Builder
from numflow.network.build.projections import by_head
from numflow.ops import Cache, View

Beside = tuple[tuple[View, ...], dict[str, str]]  # further inputs and weights of an attention step
_ZERO_KEY = 8  # columns of keys that are all zero
_CERTAIN = 1e4  # a logit next to which the softmax of all others is 0
_FARTHEST = 1 << 20  # limit of the bucket table


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
    # Divided by the scale, which multiplies the whole score. Keys beyond the reach have the zero behind the last value.
    values = b.numbers("attn_rel_numbers", size * reach).reshape(size, reach) / b.option("attention", "scale")
    y, distance = b.view("of_queries", heads * (reach + 1)), np.arange(reach, -reach - 1, -1)
    by_head(b, f"{b.prefix}attn_rel_numbers", weights, y, np.pad(values.T, ((0, 1), (0, 0))), heads)
    name = f"position_buckets_before.{reach}"
    if name not in b.weights:
        b.constant(name, np.where((distance >= 0) & (distance < reach), distance, reach).astype(np.float32))
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


def convolution_around(b: Builder, entry: View, x: View) -> None:
    """x = norm(x + act(conv(entry))), a convolution over the tokens around each token. Needs whole texts.

    Raises:
        SpecError: attention is causal, an option is wrong, or the tensor has another shape.
    """
    taps, groups = b.option("conv", "around"), b.option("conv", "around_groups")
    tensor = b.names.need("around", "weight", b.layer, b.stack)
    if b.option("attention", "causal") or taps % 2 == 0 or x.width % groups:
        raise SpecError(f"{b.where}: conv.around: expected an odd number, of attention both ways, with columns that "
                        "conv.around_groups divides", ("conv.around",))
    if tuple(tensor.shape) != (x.width, x.width // groups, taps):
        raise SpecError(f"{b.checkpoint.path}: tensor {tensor.name!r} is {list(tensor.shape)}, expected "
                        f"{[x.width, x.width // groups, taps]}")
    matrix = np.zeros((groups, x.width // groups, groups, x.width // groups, taps), np.float32)
    group = np.arange(groups)
    matrix[group, :, group] = tensor.f32().reshape(groups, x.width // groups, x.width // groups, taps)
    matrix = matrix.reshape(x.width, x.width, taps).transpose(0, 2, 1).reshape(x.width, -1)
    around, y = tokens_around(b, entry, taps), b.view("branch", x.width)
    weights = {"weight": b.constant(f"{b.prefix}around.weight", np.ascontiguousarray(matrix))}
    if b.has("around.bias"):
        weights["bias"] = b.vector("around", "bias", x.width)
    b.emit("linear", (around,), (y,), "around", weights)
    b.emit("act", (y,), (y,), "around_act", kind=b.option("conv", "around_activation"))
    b.emit("add", (x, y), (x,), "around_add")
    b.norm("around_norm", x, x)


def tokens_around(b: Builder, x: View, taps: int) -> View:
    """Rows of the `taps` tokens around each token, earliest first, zeros beyond the ends of the text: [T, taps * D].

    The gather is an attention step. The heads of one distance give all probability to the token at that distance; where
    there is no such token, a sink takes the probability.
    """
    half, parts, width = taps // 2, b.option("attention", "heads"), x.width
    heads = taps * parts
    index = np.arange(-1, taps + 1)  # for distances -half - 1 .. half + 1
    table = b.constant(f"around_position_buckets.{taps}", np.where(index < 0, taps, index).astype(np.float32))
    logits = np.repeat(np.eye(taps, taps + 1, dtype=np.float32) * _CERTAIN, parts, axis=0).reshape(-1)
    of_queries, of_keys = b.view("around_queries", len(logits)), b.view("around_keys", len(logits))
    one = View(x.buffer, x.start, 1)
    none = {"weight": b.constant(f"around_none.{len(logits)}", np.zeros((len(logits), 1), np.float32))}
    b.emit("linear", (one,), (of_queries,), "around_distances",
           {**none, "bias": b.constant(f"around_sure.{taps}.{parts}", logits)})
    b.emit("scale", (of_queries,), (of_keys,), "around_no_queries", scale=0.0)
    k, v = b.view("around_k", heads * _ZERO_KEY), b.view("around_v", taps * width)
    b.emit("linear", (one,), (k,), "around_zero",
           {"weight": b.constant(f"around_none.{k.width}", np.zeros((k.width, 1), np.float32))})
    for i in range(taps):
        b.emit("copy", (x,), (View(v.buffer, i * width, width),), "around_copy")
    cache = b.caches[f"{b.prefix}around"] = Cache(f"{b.prefix}around", heads, _ZERO_KEY, width // parts)
    b.emit("cache_write", (k, v), (), "around_write", cache=cache.name)
    y = b.view("around", v.width)
    sinks = b.constant(f"around_sinks.{heads}", np.full(heads, _CERTAIN / 2, np.float32))
    b.emit("attention", (k, of_queries, of_keys), (y,), "around_tokens", {"position_buckets": table, "sinks": sinks},
           cache=cache.name, heads=heads, scale=1.0, causal=False, window=half + 1)
    return y
