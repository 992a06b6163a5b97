"""Blocks of state space models: linear attention whose steps scale what is written, with what surrounds it."""

import numpy as np

from numflow.network.build.attention import self_attention
from numflow.network.build.builder import Builder
from numflow.network.build.channels import convolution
from numflow.network.build.feed_forward import feed_forward
from numflow.network.build.linear_attention import gated, matrix, rates, sizes, softplus
from numflow.ops import View


def state_space(b: Builder, x: View) -> View:
    """One step and one rate for each head, keys and queries (B, C) shared by groups (arXiv 2405.21060). [T, D]."""
    heads, groups, size, head_dim = sizes(b)
    inner, shared = heads * head_dim, groups * size
    whole = b.linear("ssm_in", _scaled(b, x, "in_scale"), b.view("ssm_in", 2 * inner + 2 * shared + heads))
    _multiply_parts(b, whole, (inner, inner, shared, shared, heads))
    z, steps = View(whole.buffer, 0, inner), View(whole.buffer, 2 * (inner + shared), heads)
    mixed = convolution(b, "ssm_conv1d", View(whole.buffer, inner, inner + 2 * shared),
                        b.view("ssm_conv", inner + 2 * shared), b.option("recurrent", "activation"))
    v, k, q = (View(mixed.buffer, start, width) for start, width in
               ((0, inner), (inner, shared), (inner + shared, shared)))
    softplus(b, steps)
    y = _scan(b, q, k, v, steps, heads, groups, rates(b, heads, 1))
    gated(b, y, z, groups, inner)
    return _scaled(b, b.linear("ssm_out", y, b.view("branch", x.width)), "out_scale")


def selective_scan(b: Builder, x: View) -> View:
    """A step for each channel and a rate for each number of its state (arXiv 2312.00752); where heads have several
    values, one step and one rate for each head. Returns [T, D]."""
    heads, _, size, value_dim = sizes(b)
    inner = heads * value_dim
    z, v = _gate_and_values(b, x, heads, value_dim)
    v = convolution(b, "ssm_conv1d", v, b.view("ssm_conv", inner), b.option("recurrent", "activation"))
    steps, k, q = _steps_and_keys(b, v, size)
    if b.option("recurrent", "inner_norms"):
        for module, view in (("ssm_dt_norm", steps), ("ssm_b_norm", k), ("ssm_c_norm", q)):
            b.norm(module, view, view, eps=b.option("recurrent", "inner_norm_eps"))
    steps = b.linear("ssm_dt", steps, b.view("ssm_steps", heads))
    b.emit("softplus", (steps,), (steps,), "softplus")
    y = _scan(b, q, k, v, steps, heads, 1, rates(b, heads, size if value_dim == 1 else 1))
    gated(b, y, z, 1, inner)
    return b.linear("ssm_out", y, b.view("branch", x.width))


def _gate_and_values(b: Builder, x: View, heads: int, value_dim: int) -> tuple[View, View]:
    inner = heads * value_dim
    whole = b.view("ssm_in", 2 * inner)
    first, second = View(whole.buffer, 0, inner), View(whole.buffer, inner, inner)
    if b.option("recurrent", "rows") == "parts":
        b.linear("ssm_in", x, whole)
        return second, first
    rows = np.arange(2 * inner).reshape(heads, 2, value_dim)
    for view, at, suffix in ((first, 0, ".gate"), (second, 1, ".values")):
        b.linear("ssm_in", x, view, rows[:, at].reshape(-1), suffix)
    return first, second


def _steps_and_keys(b: Builder, v: View, size: int) -> tuple[View, View, View]:
    """Inputs of the steps, keys B and queries C."""
    rank = b.option("recurrent", "rank")
    low = b.linear("ssm_x", v, b.view("ssm_x", rank + 2 * size))
    start, keys = (0, rank) if b.option("recurrent", "rows") == "parts" else (2 * size, 0)
    return View(low.buffer, start, rank), View(low.buffer, keys, size), View(low.buffer, keys + size, size)


def state_space_beside_attention(b: Builder, x: View) -> View:
    """Both mixers on the same input, and the sum of what they return (arXiv 2507.22448). Returns [T, D]."""
    y = b.view("beside", x.width)
    b.emit("copy", (state_space(b, x),), (y,), "ssm_keep")
    found = self_attention(b, x)
    b.emit("add", (y, found), (found,), "mixers_add")
    return found


def begin_side(b: Builder, x: View) -> None:
    """Keep the embeddings x for layers that read them beside their input, where there are such layers."""
    if any(b.resolved.option("side", "enabled", layer, b.stack) for layer in range(b.option("stack", "layers"))):
        b.emit("copy", (x,), (b.view("embeddings", x.width),), "side_embeddings")


def beside(b: Builder, x: View) -> View:
    """x and what attention and a feed-forward part, which several layers share, make of it and of the embeddings
    (arXiv 2411.15242). Between the two there is a norm, and no residual. Returns [T, D], apart from x."""
    both = b.view("side_both", 2 * x.width)
    b.emit("copy", (x,), (View(both.buffer, 0, x.width),), "side_input")
    b.emit("copy", (b.view("embeddings", x.width),), (View(both.buffer, x.width, x.width),), "side_beside")
    b.norm("side_norm", both, both)
    found = feed_forward(b, b.norm("ffn_norm", self_attention(b, both, x.width), b.view("normed", x.width)))
    y = b.linear("side_output", found, b.view("side", x.width))
    b.emit("add", (x, y), (y,), "side_add")
    return y


def _scan(b: Builder, q: View, k: View, v: View, steps: View, heads: int, groups: int, rate: str) -> View:
    y, size = b.view("recurrent", v.width), q.width // groups
    shape = (heads,) if v.width == heads else (heads, 1)
    weights = {"rate": rate, "skip": b.vector("ssm_d", "weight", heads, flat=True, written=shape)}
    b.emit("linear_attention", (q, k, v, steps), (y,), "scan", weights, heads=heads, key_heads=groups, scaled=True,
           state=matrix(b, "ssm", heads, size, v.width // heads))
    return y


def _scaled(b: Builder, x: View, key: str) -> View:
    """x times an option of the section: a new view of the input, the output in place."""
    factor = b.option("recurrent", key)
    if factor == 1.0:
        return x
    y = b.view("ssm_scaled", x.width) if key == "in_scale" else x
    b.emit("scale", (x,), (y,), f"ssm_{key}", scale=factor)
    return y


def _multiply_parts(b: Builder, whole: View, widths: tuple[int, ...]) -> None:
    """A factor for each of the parts z, x, B, C and steps of the input projection."""
    start = 0
    for name, width in zip(("z", "x", "b", "c", "dt"), widths):
        factor = b.option("recurrent", f"{name}_scale")
        if factor != 1.0:
            part = View(whole.buffer, start, width)
            b.emit("scale", (part,), (part,), f"ssm_{name}_scale", scale=factor)
        start += width
