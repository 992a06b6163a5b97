"""Embeddings of hashed n-grams, which a layer adds to its residual streams.

A token has an n-gram of each length n = 2 .. size, which ends at it. A table has several parts for each n; a hash of
the n-gram chooses a row of each part. From the rows, side by side, two matrices compute a value [D] and a key [D] for
each stream. Stream s gets the value times the gate sigmoid(r), r = sign(p) sqrt(|p|), p = norm(key s) . norm(stream s)
/ sqrt(D); and a causal convolution of the norm of that product, whose taps are `size` tokens apart.
"""

import math
from dataclasses import replace

import numpy as np

from numflow.errors import SpecError
from numflow.network.steps.builder import Builder
from numflow.ops import View

_LEAST = 1e-6  # least |p| under the square root
_WINDOW = 1 << 16  # numbers that are searched for primes at a time
_MOST_ID = 1 << 24  # ids below are exact in float32, the type of states
_LAYER_SEED = 10007  # the seeds of two layers differ by this number
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
_WORD = (1 << 64) - 1


def add_ngrams(b: Builder, streams: View, count: int) -> None:
    """Add the values of the tokens' n-grams to `count` streams, side by side in `streams` [T, count * D]."""
    rows, size = _rows_of_ngrams(b), streams.width // count
    keys, gated = b.view("ngram_keys", streams.width), b.view("ngram_gated", streams.width)
    b.norm("ngram_k_norm", b.linear("ngram_k", rows, keys), keys, groups=count)
    value = b.linear("ngram_v", rows, b.view("ngram_value", size))
    b.norm("ngram_q_norm", streams, gated, groups=count)
    b.emit("mul", (keys, gated), (keys,), "ngram_products")
    ones = b.constant(f"ngram_sums.{count}x{size}", np.full((count, size), size ** -0.5, np.float32))
    b.weights[ones] = replace(b.weights[ones], groups=count)
    gates = b.view("ngram_gates", count)
    b.emit("head_linear", (keys,), (gates,), "ngram_sums", {"weight": ones}, heads=count)
    b.emit("signed_sqrt", (gates,), (gates,), "ngram_roots", least=_LEAST)
    b.emit("act", (gates,), (gates,), "ngram_gates", kind="sigmoid")
    b.emit("scale", (gated,), (gated,), "ngram_zero", scale=0.0)
    b.emit("mix", (gated, value, gates), (gated,), "ngram_gated", parts=count)
    b.norm("ngram_conv_norm", gated, keys, groups=count)
    b.emit("add", (streams, gated), (streams,), "ngram_add")
    b.emit("add", (streams, _convolved(b, keys, gated)), (streams,), "ngram_conv_add")


def _rows_of_ngrams(b: Builder) -> View:
    """The rows of each token's n-grams, side by side: f32 [T, width]."""
    size, width = b.option("ngrams", "size"), b.option("ngrams", "width")
    parts = (size - 1) * b.option("ngrams", "parts")
    if size < 2 or width % parts:
        raise SpecError(f"{b.where}: ngrams.width: expected a multiple of the {parts} parts of the table, for n-grams "
                        f"of 2 tokens or more, found {width}", ("ngrams.width", "ngrams.parts", "ngrams.size"))
    earlier = sum(b.resolved.option("ngrams", "size", layer, b.stack) > 0 for layer in range(b.layer or 0))
    vocabulary, separator = b.option("ngrams", "vocabulary"), b.option("ngrams", "separator")
    if vocabulary > _MOST_ID or separator >= vocabulary:
        raise SpecError(f"{b.where}: ngrams.vocabulary: expected up to {_MOST_ID} token ids, with the separator "
                        f"{separator} among them, found {vocabulary}", ("ngrams.vocabulary", "ngrams.separator"))
    factors = _stored(b, "ngram_multipliers", size) or multipliers(
        vocabulary, size, b.option("ngrams", "seed") + _LAYER_SEED * earlier)
    sizes = _stored(b, "ngram_sizes", parts) or primes(b.option("ngrams", "rows"), (earlier + 1) * parts)[-parts:]
    offsets = np.cumsum([0, *sizes]).tolist()
    if _stored(b, "ngram_offsets", parts) not in ([], offsets[:-1]):
        raise SpecError(f"{b.where}: tensor ngram_offsets: expected parts of the table that follow each other")
    if not all(0 < factor <= ((1 << 63) - 1) // vocabulary for factor in factors) or min(sizes) < 1 \
            or offsets[-1] >= 1 << 31:
        raise SpecError(f"{b.where}: tensors ngram_multipliers and ngram_sizes: expected positive multipliers whose "
                        "products with token ids have up to 63 bits, and parts of fewer than 2^31 rows in all")
    ids, rows = b.view("ngram_ids", parts, dtype="i32"), b.view("ngram_rows", width)
    table = b.stacked_rows("ngram_embd", offsets[-1], width // parts)
    b.emit("ngram_ids", (), (ids,), "ngram_ids", state=b.state("ngrams", size - 1), multipliers=tuple(factors),
           sizes=tuple(sizes), separator=separator)
    b.emit("embed_ids", (ids,), (rows,), "ngram_embd", {"table": table})
    return rows


def _stored(b: Builder, module: str, count: int) -> list[int]:
    """A tensor of `count` integers, read now; [] if the file does not have it.

    Raises:
        SpecError: the tensor has another type or another number of elements.
    """
    tensor = b.names.find(module, "weight", b.layer, b.stack)
    if tensor is None:
        return []
    if tensor.type.name != "I64" or math.prod(tensor.shape) != count:
        raise SpecError(f"{b.checkpoint.path}: tensor {tensor.name!r} is {list(tensor.shape)} of {tensor.type.name}, "
                        f"expected {count} numbers of I64")
    return np.ascontiguousarray(tensor.read()).reshape(-1).view("<i8").tolist()


def multipliers(vocabulary: int, count: int, seed: int) -> list[int]:
    """Odd numbers of a SplitMix64 generator, whose products with token ids have at most 63 bits."""
    limit, found = max(1, ((1 << 63) - 1) // vocabulary // 2), []
    for index in range(count):
        value = (seed + _GAMMA * (index + 2)) & _WORD
        value = ((value ^ value >> 30) * _FIRST) & _WORD
        value = ((value ^ value >> 27) * _SECOND) & _WORD
        found.append(2 * ((value ^ value >> 31) % limit) + 1)
    return found


def primes(first: int, count: int) -> list[int]:
    """The first `count` prime numbers from `first` on, in rising order."""
    found: list[int] = []
    begin = max(first, 2)
    while len(found) < count:
        is_prime = np.ones(_WINDOW, bool)
        for divisor in range(2, math.isqrt(begin + _WINDOW) + 1):
            multiple = max(divisor * divisor, -(-begin // divisor) * divisor)
            is_prime[multiple - begin::divisor] = False
        found += (begin + np.flatnonzero(is_prime)).tolist()
        begin += _WINDOW
    return found[:count]


def _convolved(b: Builder, x: View, y: View) -> View:
    """y = silu(causal depthwise convolution of x, its taps `size` tokens apart). Between them, taps are 0."""
    taps, apart = b.option("ngrams", "taps"), b.option("ngrams", "size")
    weight = np.zeros((x.width, (taps - 1) * apart + 1), np.float32)
    weight[:, ::apart] = b.numbers("ngram_conv", x.width * taps).reshape(x.width, taps)
    b.emit("causal_conv", (x,), (y,), "ngram_conv", {"weight": b.constant(f"{b.prefix}ngram_conv.apart", weight)},
           state=b.state("ngram_conv", weight.shape[1] - 1, x.width, axis=1), kind="silu")
    return y
