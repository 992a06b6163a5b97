"""Attention cases of chosen sizes for tests and experiments, and the attention kernels of the compile test."""

import numpy as np

from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.survey import kernels_of
from numflow.learn.cases.attention_cases import attention_cases
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.ops import View
from numflow.quant.kv import CODED
from tests.cuda.matrices import rows_and_values, stored_as

FORMS = ("q8", "q6", "q3h")  # one type for each of the three ways in which codes are read


def attention_case(heads, kv_heads, k_dim, v_dim, schedule=(((0, 5),),), name="attention", product="", **params):
    """A case of `attention` with these sizes. product: stored type of a matrix that the output is multiplied with."""
    b = Builder(f"{name}-{heads}-{kv_heads}-{k_dim}-{v_dim}")
    q, k, v = b.inputs(heads * k_dim, kv_heads * k_dim, kv_heads * v_dim)
    y, cache = b.buffer(heads * v_dim), b.cache(kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim)
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (q,), (y,), cache=cache, heads=heads, scale=k_dim**-0.5, **params)
    if not product:
        return b.case(y, schedule)
    found = b.buffer(64)
    rows, matrix = rows_and_values(b, product, found.width, y.width, "random")
    weight = b.weight("weight", matrix)
    b.step("linear", (y,), (found,), {"weight": weight})
    return stored_as(b.case(found, schedule), {weight: (product, rows)})


def latent_case(heads, k_dim, prefix, schedule=(((0, 5),),)):
    """A case of latent attention: one key head, and values that are a prefix of the keys."""
    b = Builder(f"latent-{heads}-{k_dim}-{prefix}")
    q, k = b.inputs(heads * k_dim, k_dim)
    y, cache = b.buffer(heads * prefix), b.cache(kv_heads=1, k_dim=k_dim, prefix=prefix)
    b.step("cache_write", (k,), (), cache=cache)
    b.step("attention", (q,), (y,), cache=cache, heads=heads, scale=k_dim**-0.5)
    return b.case(y, schedule)


def entries_case(heads, size, every, top_k=0, schedule=(((0, 5),),), **params):
    """A case with a window of 8 keys and, if `every` is not 0, entries, of which an index may choose the best; with
    sinks."""
    b = Builder(f"entries-{heads}-{size}-{every}-{top_k}")
    q, k, entry, query, weights = b.inputs(heads * size, size, size, 2 * 128, 2)
    y, own = b.buffer(heads * size), b.cache(kv_heads=1, k_dim=size, prefix=size)
    b.step("cache_write", (k,), (), cache=own)
    chosen = (b.buffer(4, dtype="i32"),) if top_k else ()
    if every:
        entries, index = (b.cache(kv_heads=1, k_dim=columns, prefix=columns, every=every) for columns in (size, 128))
        b.step("cache_write", (entry,), (), cache=entries)
        params["entries"] = entries
    if top_k:
        b.step("cache_write", (View(entry.buffer, entry.start, 128),), (), cache=index)
        b.step("index_select", (query, weights), chosen, cache=index, heads=2, top_k=top_k)
    b.step("attention", (q, *chosen), (y,), {"sinks": b.weight("sinks", b.normal(heads))}, cache=own, heads=heads,
           scale=size**-0.5, window=8, **params)
    return b.case(y, schedule)


def blocks_case(heads, kv_heads, size, block, top_k, schedule=(((0, 5),),)):
    """A case of attention to the blocks of keys that an index selects for each key head."""
    b = Builder(f"blocks-{heads}-{kv_heads}-{size}-{top_k}-of-{block}")
    q, key, query, k, v = b.inputs(kv_heads * size, size, heads * size, kv_heads * size, kv_heads * size)
    b.arrays["table.0"][:, :key.start + size] = np.sign(b.arrays["table.0"][:, :key.start + size])  # sums without error
    chosen, y = b.buffer(2 * kv_heads, dtype="i32"), b.buffer(heads * size)
    index, cache = b.cache(kv_heads=1, k_dim=size, prefix=size), b.cache(kv_heads=kv_heads, k_dim=size)
    b.step("cache_write", (key,), (), cache=index)
    b.step("block_select", (q,), (chosen,), cache=index, heads=kv_heads, block=block, top_k=top_k, local=1)
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (query, chosen), (y,), cache=cache, heads=heads, scale=size**-0.5, block=block)
    return b.case(y, schedule)


def every_bias():
    """A case with softcap, slopes and sinks together, and heads of an odd size."""
    b = Builder("attention-every-bias")
    q, k, v = b.inputs(6 * 20, 2 * 20, 2 * 20)
    y, cache = b.buffer(6 * 20), b.cache(kv_heads=2, k_dim=20)
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (q,), (y,), {role: b.weight(role, b.normal(6)) for role in ("slopes", "sinks")}, cache=cache,
           heads=6, scale=0.2, softcap=2.0, window=7)
    return b.case(y)


def attention_kernels() -> dict[str, Kernel]:
    """Attention kernels by name: those on tensor cores, and the exact ones for decoding.

    All biases; every type of keys and values at an ordinary size; wide heads; latent attention; entries; blocks
    of keys; and a cross cache beside the own one.
    """
    found, usual, wide = {}, attention_case(4, 1, 128, 128), attention_case(4, 1, 256, 256)
    buckets, far, merged = (next(case for case in attention_cases() if case.name == f"attention-{name}")
                            for name in ("buckets-both-ways", "distances", "merged"))
    for case in (every_bias(), buckets, far, merged, attention_case(4, 1, 64, 64)):
        found |= kernels_of(case.network, case.weights, kv_type="f16")
    for kind in ("f16", *CODED):
        found |= kernels_of(usual.network, usual.weights, kv_type=kind)
    for kind in FORMS:
        found |= kernels_of(usual.network, usual.weights, kv_type=kind, activations="f32")
    for kind in ("f16", "q3h"):
        found |= kernels_of(wide.network, wide.weights, kv_type=kind)
    latent = latent_case(16, 576, 512)
    for kind in ("f16", *FORMS):
        for activations in ("int8", "f32"):
            found |= kernels_of(latent.network, latent.weights, kv_type=kind, activations=activations)
    for every, top_k in ((0, 0), (4, 0), (4, 4)):
        entries = entries_case(2, 512, every, top_k)
        for kind in ("f16", *FORMS):
            found |= kernels_of(entries.network, entries.weights, kv_type=kind)
    blocks = blocks_case(4, 2, 128, 128, 2)
    for kind in ("f16", *FORMS):
        found |= kernels_of(blocks.network, blocks.weights, kv_type=kind)
    case = attention_case(4, 4, 192, 128)
    return found | kernels_of(case.network, case.weights, kv_k="q5", kv_v="f16")
