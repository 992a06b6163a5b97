"""Vectors of distances between tokens: what queries meet beside keys, and keys beside queries.

A table has a vector for each distance, or for several; the layer makes a key and a query of each, as it does of tokens.
The score of query i and key j is q_i . k_j + q_i . K[n] + Q[n] . k_j, n the number of their distance.
"""

import math
from dataclasses import replace

import numpy as np

from numflow.errors import SpecError
from numflow.network.build.builder import Builder
from numflow.network.build.projections import by_head
from numflow.ops import View

Beside = tuple[tuple[View, ...], dict[str, str]]  # further inputs of an attention, and weights for them
_FARTHEST = 1 << 20  # distance up to which numbers are told apart


def distances(b: Builder, q: View, k: View, heads: int) -> Beside:
    """Further inputs and weights of `attention`: products of q [T, H*E] and k [T, H*E] with keys and queries of
    distances; none where the spec has no such vectors.

    Raises:
        SpecError: they do not go with other options, or the numbers of distances make no sense.
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
    numbers, found = f"places.{count}.{reach}", []
    if numbers not in b.weights:
        b.constant(numbers, places(b, count, reach))
    for x, name, made, letter in ((q, "of_queries", "keys", "k"), (k, "of_keys", "queries", "q")):
        y = b.view(name, heads * count)
        if which in ("both", made):
            matrix = _projected(b, f"{'dist' if own else 'attn'}_{letter}", name, count, heads, size)
        else:
            matrix = b.constant(f"no_{made}.{heads * count}", np.zeros((heads * count, size), np.float32))
            b.weights[matrix] = replace(b.weights[matrix], groups=heads)
        b.emit("head_linear", (x,), (y,), name, {"weight": matrix}, heads=heads)
        found.append(y)
    return tuple(found), {"places": numbers}


def relative(b: Builder, x: View, heads: int) -> Beside:
    """The further input and weight of `attention` where each head of a token has a number for each distance to a key
    before it: sums of some learned numbers by distance, by shares that a matrix reads off x. Else nothing."""
    if not (reach := b.option("attention", "relative")):
        return (), {}
    size = b.option("attention", "relative_dim")
    shares = b.linear("attn_rel", x, b.view("relative", heads * size))
    # The score is multiplied as a whole; farther keys have the zero behind the last number.
    numbers = b.numbers("attn_rel_numbers", size * reach).reshape(size, reach) / b.option("attention", "scale")
    y, away = b.view("of_queries", heads * (reach + 1)), np.arange(reach, -reach - 1, -1)
    by_head(b, f"{b.prefix}attn_rel_numbers", shares, y, np.pad(numbers.T, ((0, 1), (0, 0))), heads)
    name = f"places_before.{reach}"
    if name not in b.weights:
        b.constant(name, np.where((away >= 0) & (away < reach), away, reach).astype(np.float32))
    return (y,), {"places": name}


def places(b: Builder, count: int, reach: int) -> np.ndarray:
    """The number 0 .. count - 1 of the vector for each distance (key - query position): f32 [2R + 1], -R .. R.

    Half of the vectors are for keys before the query, nearest last. With a reach the nearer half of each side is exact,
    and the others grow logarithmically up to it.

    Raises:
        SpecError: there are too few vectors, an odd number of them, or the reach is no farther than what is exact.
    """
    side, exact = count // 2, count // 4
    if count % 2 or (reach and (exact < 2 or reach < exact + 2)):
        raise SpecError(f"{b.where}: attention.distances: expected an even number, and 8 or more with a reach of more "
                        f"than a quarter of it and 1, found {count} with a reach of {reach}",
                        ("attention.distances", "attention.distance_reach"))
    farthest = side
    if reach:
        farthest = math.ceil(exact * ((reach - 1) / exact) ** ((side - exact) / (exact - 1))) + 1
    away = np.arange(min(farthest, _FARTHEST) + 1)
    if reach:  # in float32, as those who train such models
        far = np.log(np.maximum(away, exact).astype(np.float32) / np.float32(exact))
        far /= np.log(np.float32((reach - 1) / exact))
        away = np.where(away <= exact, away, exact + np.ceil(far * np.float32(exact - 1)).astype(np.int64))
    before = np.minimum(side + away, count - 1)
    return np.concatenate([before[:0:-1], np.maximum(side - away, 0)]).astype(np.float32)


def _projected(b: Builder, module: str, name: str, count: int, heads: int, size: int) -> str:
    """The keys or queries that the matrix of a module makes of the vectors, `count` rows for each head."""
    width = b.option("stack", "width")
    roles: dict[str, tuple[str, str, tuple[int, ...]]] = {
        "table": ("dist_embd", "weight", (count, width)), "matrix": (module, "weight", (heads * size, width))}
    if b.has(f"{module}.bias"):
        roles["bias"] = (module, "bias", (heads * size,))
    if b.option("attention", "distance_norm"):
        roles |= {"norm": ("dist_norm", "weight", (width,)), "norm_bias": ("dist_norm", "bias", (width,))}
    return b.projected(f"{name}.weight", roles, (heads * count, size), heads, b.option("norm", "eps"))
