"""Projections to queries, keys and values, for all layouts of their matrices in files."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.channels import convolution, token_before
from numflow.network.steps.builder import Builder
from numflow.ops import View

_LEAST = 1e-20  # epsilon of the norm of queries and keys in compressed convolutional attention


@dataclass(frozen=True)
class Heads:
    """H query heads, G key/value heads, columns of a query/key head and of a value head."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


def projections(b: Builder, x: View, s: Heads, kv: tuple[View, View] | None = None) -> tuple[View, View, View]:
    """q [T, H*E], k [T, G*E], v [T, G*Ev], side by side in one buffer, for every layout of the file. kv: inputs of keys
    and values, if not x, for three matrices."""
    widths = (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.value_dim)
    qkv = b.view("qkv", sum(widths))
    starts = (0, widths[0], widths[0] + widths[1])
    q, k, v = (View(qkv.buffer, start, width) for start, width in zip(starts, widths, strict=True))
    layout = b.option("attention", "qkv")
    if layout == "separate":
        if b.option("attention", "gate_in_query"):
            b.expect_rows("attn_q", 2 * widths[0])
            b.linear("attn_q", x, q, query_and_gate_rows(s)[0], ".q")
        else:
            b.linear("attn_q", x, q)
        of_keys, of_values = kv or (x, x)
        b.linear("attn_k", of_keys, k)
        b.linear("attn_v", of_values, v, _paired_values(b, s) if b.option("attention", "differential") else None)
        return q, k, v
    first = s.heads * s.value_dim if layout == "gate_concat" else 0
    b.expect_rows("attn_qkv", first + sum(widths), exactly=True)
    if layout in ("concat", "gate_concat"):
        selects: list[Any] = [range(first + start, first + start + width) for start, width in zip(starts, widths)]
    else:
        selects = _grouped_rows(s) if layout == "groups" else _quartered_rows(b, widths)
    for view, rows, part in zip((q, k, v), selects, (".q", ".k", ".v"), strict=True):
        b.linear("attn_qkv", x, view, select=rows, suffix=part, biased=f"attn_{part[1]}")
    return q, k, v


def _paired_values(b: Builder, s: Heads) -> np.ndarray:
    """Row indices of values in differential attention: each value head joins a head of the first half with the same
    head of the second half.

    Raises:
        SpecError: an odd number of heads, or values that are not twice as wide as keys.
    """
    if s.kv_heads % 2 or s.value_dim != 2 * s.head_dim:
        raise SpecError(f"{b.where}: attention.differential: expected an even number of key/value heads and values "
                        f"twice as wide as keys, found {s.kv_heads} heads of {s.value_dim} and {s.head_dim} columns",
                        ("attention.differential", "attention.kv_heads", "attention.value_dim"))
    b.expect_rows("attn_v", s.kv_heads * s.head_dim)
    first = np.arange(s.kv_heads) % (s.kv_heads // 2)
    heads = np.stack([first, first + s.kv_heads // 2], axis=1).reshape(-1)
    return (heads[:, None] * s.head_dim + np.arange(s.head_dim)).reshape(-1)


def clip(b: Builder, views: tuple[View, ...]) -> None:
    """Clamp queries, keys and values to [-clip, clip], unless attention.clip is 0."""
    limit = b.option("attention", "clip")
    for view in views if limit else ():
        b.emit("clamp", (view,), (view,), "qkv_clip", limit=limit)


def query_and_gate_rows(s: Heads) -> tuple[np.ndarray, np.ndarray]:
    """Row indices of queries and gates in a matrix [q gate] per head."""
    rows = np.arange(2 * s.heads * s.head_dim).reshape(s.heads, 2, s.head_dim)
    return rows[:, 0].reshape(-1), rows[:, 1].reshape(-1)


def _grouped_rows(s: Heads) -> list[np.ndarray]:
    """Row indices of q, k and v in a fused matrix [q .. q k v] per key/value head."""
    per_group = s.heads // s.kv_heads
    size = (per_group + 1) * s.head_dim + s.value_dim
    first = np.arange(s.kv_heads)[:, None] * size
    q = first + np.arange(per_group * s.head_dim)[None]
    k = first + per_group * s.head_dim + np.arange(s.head_dim)[None]
    v = first + (per_group + 1) * s.head_dim + np.arange(s.value_dim)[None]
    return [rows.reshape(-1) for rows in (q, k, v)]


def _quartered_rows(b: Builder, widths: tuple[int, int, int]) -> list[np.ndarray]:
    """Row indices of q, k and v in a fused matrix of four parts [q v k], each with a quarter of the columns.

    Raises:
        SpecError: the three are not equally wide, or their width is no multiple of 4.
    """
    size, left = divmod(widths[0], 4)
    if left or len(set(widths)) != 1:
        raise SpecError(f"{b.where}: attention.qkv: expected as many columns of queries, keys and values, a multiple "
                        f"of 4, found {', '.join(map(str, widths))}", ("attention.qkv",))
    q, v, k = ((3 * size * np.arange(4)[:, None] + size * part + np.arange(size)).reshape(-1) for part in range(3))
    return [q, k, v]


def convolved(b: Builder, x: View, s: Heads) -> tuple[View, View, View]:
    """Queries, keys and values of compressed convolutional attention (arXiv 2510.04476), as in `projections`.

    Queries and keys pass two convolutions. (q + k) / 2 of the inputs is added: to a query with the key of its head, to
    a key with the mean of its queries. Each is normalised to the length sqrt(E); keys are multiplied by a factor per
    head.
    """
    if s.value_dim != s.head_dim or s.kv_heads % 2 or b.option("attention", "qkv") != "separate":
        raise SpecError(f"{b.where}: attention.convolved: expected separate matrices, values as wide as keys and an "
                        "even number of key heads", ("attention.convolved", "attention.kv_heads"))
    q_width, k_width, size, per_head = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.head_dim, s.heads // s.kv_heads
    raw, mixed, qkv = (b.view(name, q_width + (1 + (name == "qkv")) * k_width)
                       for name in ("qk_raw", "qk_mixed", "qkv"))
    plain_q, plain_k = (b.linear(f"attn_{part}", x, View(raw.buffer, start, width))
                        for part, start, width in (("q", 0, q_width), ("k", q_width, k_width)))
    _two_convolutions(b, raw, View(qkv.buffer, 0, raw.width), mixed, s)
    q, k = View(qkv.buffer, 0, q_width), View(qkv.buffer, q_width, k_width)
    # both = (q + k) / 2 per query head, mean = its mean over the queries of a key head, by block-identity matrices.
    identity, mean = np.eye(size, dtype=np.float32), b.view("qk_mean", k_width)
    both = b.view("qk_both", q_width)
    by_head(b, "keys_to_queries", plain_k, both, np.tile(0.5 * identity, (per_head, 1)), s.kv_heads)
    b.emit("add", (both, plain_q), (both,), "qk_both", scale=0.5)
    by_head(b, "mean_of_queries", both, mean, np.tile(identity / per_head, (1, per_head)), s.kv_heads)
    b.emit("add", (q, both), (q,), "q_add")
    b.emit("add", (k, mean), (k,), "k_add")
    scales = b.constant(f"{b.prefix}attn_k_scale", np.repeat(b.numbers("attn_k_scale", s.kv_heads), size))
    b.emit("rms_norm", (q,), (q,), "q_length", eps=_LEAST, groups=s.heads)
    b.emit("rms_norm", (k,), (k,), "k_length", {"weight": scales}, eps=_LEAST, groups=s.kv_heads)
    v = View(qkv.buffer, q_width + k_width, k_width)
    half = k_width // 2
    b.linear("attn_v", x, View(qkv.buffer, v.start, half))
    later = b.linear("attn_v_before", x, b.view("v_later", half))
    token_before(b, "v_before", later, View(qkv.buffer, v.start + half, half))
    return q, k, v


def _two_convolutions(b: Builder, x: View, y: View, room: View, s: Heads) -> None:
    """y = second convolution (all columns of a head) of the first, depthwise convolution of x. room: the buffer
    between.

    Both biases are added at the end: positions before the text then count as the first bias in the second convolution.
    """
    heads, taps = s.heads + s.kv_heads, b.option("attention", "convolved")
    convolution(b, "attn_conv", x, room, biased=False)
    matrices = b.numbers("attn_conv_heads", x.width * s.head_dim * taps).reshape(heads, s.head_dim, s.head_dim, taps)
    bias = _bias(b, "attn_conv", x.width).reshape(heads, s.head_dim)
    bias = np.einsum("hnkt,hk->hn", matrices, bias).reshape(-1) + _bias(b, "attn_conv_heads", x.width)
    part = b.view("qk_part", x.width)
    for tap in range(taps - 1, -1, -1):
        target = y if tap == taps - 1 else part
        by_head(b, f"{b.prefix}attn_conv_heads.{tap}", room, target, np.ascontiguousarray(matrices[..., tap]), heads)
        if target is part:
            b.emit("add", (y, part), (y,), f"attn_conv_sum.{tap}")
        if tap:
            room = token_before(b, f"qk_before.{tap}", room, b.view(f"qk_before.{tap}", x.width))
    b.emit("scale", (y,), (y,), "attn_conv_bias", {"shift": b.constant(f"{b.prefix}attn_conv_bias", bias)}, scale=1.0)


def _bias(b: Builder, module: str, width: int) -> np.ndarray:
    """A module's bias f32 [width], read now; zeros if the file has none."""
    tensor = b.names.find(module, "bias", b.layer, b.stack)
    if tensor is None:
        return np.zeros(width, np.float32)
    if tuple(tensor.shape) != (width,):
        raise SpecError(f"{b.where}: tensor {tensor.name!r}: expected [{width}], found {list(tensor.shape)}")
    return np.asarray(tensor.f32(), np.float32).reshape(-1)


def by_head(b: Builder, name: str, x: View, y: View, matrices: np.ndarray, heads: int) -> None:
    """y = matrices [H, N, K] times the heads of x; a single matrix [N, K] serves all heads."""
    shape = matrices.shape[-2:]
    whole = np.ascontiguousarray(np.broadcast_to(matrices, (heads, *shape)), np.float32).reshape(-1, shape[1])
    weight = name if name.startswith(b.prefix) else f"{name}.{heads}.{shape[0]}.{shape[1]}"
    if weight not in b.weights:
        b.constant(weight, whole)
        b.weights[weight] = replace(b.weights[weight], groups=heads)
    b.emit("head_linear", (x,), (y,), name.removeprefix(b.prefix), {"weight": weight}, heads=heads)
