"""Blocks of linear attention: a state (sum of keys times values) in place of a KV cache.

State space models are linear attention too: their step sizes scale the values that are written.
"""

import math
from dataclasses import replace

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.attention import self_attention
from numflow.network.blocks.channels import convolution
from numflow.network.blocks.feed_forward import feed_forward
from numflow.network.steps.builder import Builder
from numflow.ops import View

_NORM_EPS = 1e-6  # epsilon of the L2 norm of queries and keys


def delta_rule(b: Builder, x: View) -> View:
    """Gated delta rule (arXiv 2412.06464, with a decay for each key column 2510.26692). Returns [T, D].

    Queries, keys and values pass a convolution. Queries and keys are L2-normalised. The output is normalised and gated.
    """
    heads, key_heads, key_dim, value_dim = _sizes(b)
    (q, k, v), z = _inputs(b, x, heads, key_heads, key_dim, value_dim)
    for view, label, scale in ((q, "q_norm", key_dim ** -0.5), (k, "k_norm", 1.0)):
        factor = scale * key_dim ** -0.5  # x / sqrt(sum(x^2) + eps) as an RMS norm
        weight = b.constant(f"{factor:.9g}.{key_dim}", np.full(key_dim, factor, np.float32))
        b.emit("rms_norm", (view,), (view,), label, {"weight": weight}, eps=_NORM_EPS / key_dim, groups=key_heads)
    beta, steps = _strengths(b, x, heads, key_heads, key_dim)
    y, rate = b.view("recurrent", heads * value_dim), _fading(b, steps, heads)
    b.emit("linear_attention", (q, k, v, steps, beta), (y,), "delta", {"rate": rate},
           state=_matrix(b, "delta", heads, key_dim, value_dim), heads=heads, key_heads=key_heads,
           tiled=b.option("recurrent", "tiled"))
    _gated(b, y, z, heads, value_dim)
    return b.linear("ssm_out", y, b.view("branch", x.width))


def decaying_attention(b: Builder, x: View) -> View:
    """Linear attention with a fixed decay for each head and layer (arXiv 2401.04658). Returns [T, D]."""
    heads, key_heads, key_dim, value_dim = _sizes(b)
    if key_heads != heads or key_dim != value_dim:
        raise SpecError(f"{b.where}: recurrent.key_heads and key_dim: expected {heads} and {value_dim}, as many and as "
                        f"wide as values, found {key_heads} and {key_dim}",
                        ("recurrent.key_heads", "recurrent.key_dim"))
    whole = b.view("qkv", 3 * heads * key_dim)
    b.expect_rows("attn_qkv", whole.width)
    parts = [View(whole.buffer, at * heads * key_dim, heads * key_dim) for at in range(3)]
    rows = np.arange(heads)[:, None] * 3 * key_dim + np.arange(key_dim)[None]
    for at, (view, suffix) in enumerate(zip(parts, (".q", ".k", ".v"))):
        b.linear("attn_qkv", x, view, (rows + at * key_dim).reshape(-1), suffix)
    b.emit("act", (whole,), (whole,), "qkv_act", kind=b.option("recurrent", "activation"))
    y = b.view("recurrent", heads * value_dim)
    last = b.option("stack", "layers") - 1
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads) * (1 - b.layer / (last + 1e-5) + 1e-5)
    rate = b.constant(f"{b.prefix}rate", -slopes.astype(np.float32))
    b.emit("linear_attention", tuple(parts), (y,), "linear_attention", {"rate": rate},
           state=_matrix(b, "linear", heads, key_dim, value_dim), heads=heads, key_heads=heads)
    _gated(b, y, b.linear("attn_gate", x, b.view("recurrent_gate", y.width)), 1, y.width)
    return b.linear("ssm_out", y, b.view("branch", x.width))


def _sizes(b: Builder) -> tuple[int, int, int, int]:
    """Heads, key heads, columns of a key and of a value head.

    Raises:
        SpecError: the heads cannot share the key heads.
    """
    heads, key_heads, *dims = (b.option("recurrent", key) for key in ("heads", "key_heads", "key_dim", "value_dim"))
    if heads % key_heads:
        raise SpecError(f"{b.where}: recurrent.heads: expected a multiple of recurrent.key_heads {key_heads}, "
                        f"found {heads}", ("recurrent.heads", "recurrent.key_heads"))
    return heads, key_heads, *dims


def _matrix(b: Builder, label: str, heads: int, key_dim: int, value_dim: int) -> str:
    """Declare the state [H, dk, dv] in the spec's storage type; its name.

    Raises:
        SpecError: value heads of one column need float32.
    """
    dtype = b.option("recurrent", "state_type")
    if value_dim == 1 and dtype != "f32":
        raise SpecError(f"{b.where}: recurrent.state_type: expected f32 where heads have one column, found {dtype}",
                        ("recurrent.state_type",))
    return b.state(label, heads, key_dim, value_dim, dtype=dtype)


def _rates(b: Builder, *shape: int) -> str:
    """Decay rates, negative, of this shape; files may store the logarithms of their absolute values."""
    name = b.vector("ssm_a", "weight", math.prod(shape), flat=True, written=shape)
    b.weights[name] = replace(b.weights[name], negative_exp=b.option("recurrent", "log_rates"))
    return name


def _gated(b: Builder, y: View, gate: View, groups: int, weights: int) -> None:
    """y = norm(y) * act(gate), norm(y * act(gate)), or y * act(gate) without a norm.

    groups: column groups of the norm. weights: number of its weights.
    """
    order, kind = b.option("recurrent", "norm"), b.option("recurrent", "gate")
    if order == "before_gate":
        _norm(b, y, groups, weights)
    b.emit("act_mul", (gate, y), (y,), "gated", kind=kind)
    if order == "after_gate":
        _norm(b, y, groups, weights)


def _norm(b: Builder, y: View, groups: int, weights: int) -> None:
    """RMS norm with plain weights, independent of section norm."""
    shape = (groups, weights // groups) if weights == y.width else (weights,)
    weight = {"weight": b.vector("ssm_norm", "weight", weights, flat=True, written=shape)}
    b.emit("rms_norm", (y,), (y,), "ssm_norm", weight, eps=b.option("recurrent", "norm_eps"), groups=groups)


def _inputs(b: Builder, x: View, heads: int, key_heads: int, key_dim: int,
            value_dim: int) -> tuple[list[View], View]:
    """q, k and v after their convolution, and the output gate."""
    widths = (key_heads * key_dim, key_heads * key_dim, heads * value_dim)
    starts = (0, widths[0], 2 * widths[0])
    before, after = b.view("qkv", sum(widths)), b.view("qkv_conv", sum(widths))
    gate, layout = b.view("recurrent_gate", widths[2]), b.option("recurrent", "qkv")
    parts = [View(before.buffer, start, width) for start, width in zip(starts, widths)]
    if layout == "groups":
        b.expect_rows("ssm_in", sum(widths) + widths[2])
        rows = grouped_rows(key_heads, (key_dim, key_dim, *2 * [heads // key_heads * value_dim]))
        for view, chosen, suffix in zip((*parts, gate), rows, (".q", ".k", ".v", ".z")):
            b.linear("ssm_in", x, view, chosen, suffix)
    elif layout == "whole":
        b.expect_rows("ssm_in", sum(widths) + widths[2])
        for view, start, suffix in zip((*parts, gate), (*starts, sum(widths)), (".q", ".k", ".v", ".z")):
            b.linear("ssm_in", x, view, range(start, start + view.width), suffix)
    elif layout == "concat":
        b.expect_rows("attn_qkv", before.width)
        for view, start, suffix in zip(parts, starts, (".q", ".k", ".v")):
            b.linear("attn_qkv", x, view, range(start, start + view.width), suffix)
    else:
        for module, view in zip(("attn_q", "attn_k", "attn_v"), parts):
            b.linear(module, x, view)
    if layout in ("separate", "concat"):
        _gate(b, x, gate)
    found = [View(after.buffer, start, width) for start, width in zip(starts, widths)]
    kind = b.option("recurrent", "activation")
    if layout == "separate":
        modules, taps = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), b.option("conv", "taps")
        stored = [b.names.find(module, "weight", b.layer, b.stack) for module in modules]
        heights = [0 if tensor is None else tensor.rows for tensor in stored]
        # Some programs split one convolution [q k v] into three tensors of equal size, although the widths differ.
        resplit = heights != [*widths] and sum(heights) == sum(widths)
        for module, view, y, start, width in zip(modules, parts, found, starts, widths):
            weight = b.matrix_across(modules, module, start, width, taps) if resplit else ""
            if resplit and taps == 1:
                values = np.concatenate([tensor.f32().reshape(-1) for tensor in stored if tensor is not None])
                weight = b.constant(weight, values[start:start + width])
            convolution(b, module, view, y, kind, weight)
    else:
        convolution(b, "ssm_conv1d", before, after, kind)
    return found, gate


def _gate(b: Builder, x: View, gate: View) -> None:
    """The output gate, from one matrix or from two low-rank ones."""
    if b.has("ssm_g_a.weight"):
        x = b.linear("ssm_g_a", x, b.view("low_rank", b.option("recurrent", "value_dim")))
        b.linear("ssm_g_b", x, gate)
    else:
        b.linear("attn_gate", x, gate)


def _strengths(b: Builder, x: View, heads: int, key_heads: int, key_dim: int) -> tuple[View, View]:
    """beta [T, H], the write strength, and the decay steps [T, H] or [T, H * dk]."""
    both = b.view("strengths", heads * (1 + key_dim) if b.option("recurrent", "by_column") else 2 * heads)
    beta, steps = View(both.buffer, 0, heads), View(both.buffer, heads, both.width - heads)
    layout = "whole" if b.option("recurrent", "qkv") == "whole" else b.option("recurrent", "strengths")
    if layout != "separate" and b.option("recurrent", "fade"):
        raise SpecError(f"{b.where}: recurrent.fade: expected 0 where recurrent.strengths is 'groups' or recurrent.qkv "
                        f"'whole'", ("recurrent.fade", "recurrent.strengths", "recurrent.qkv"))
    if layout == "whole":
        first = 2 * (key_heads * key_dim + heads * b.option("recurrent", "value_dim"))
        b.expect_rows("ssm_in", first + both.width)
        for view, suffix in ((beta, ".b"), (steps, ".a")):
            b.linear("ssm_in", x, view, range(first + view.start, first + view.start + view.width), suffix)
    elif layout == "groups":
        b.expect_rows("ssm_ba", 2 * heads)
        for view, rows, suffix in zip((beta, steps), grouped_rows(key_heads, 2 * (heads // key_heads,)), (".b", ".a")):
            b.linear("ssm_ba", x, view, rows, suffix)
    else:
        b.linear("ssm_beta", x, beta)
        if b.has("ssm_f_a.weight"):
            _steps(b, "ssm_f_b", b.linear("ssm_f_a", x, b.view("low_rank", key_dim)), steps)
        else:
            _steps(b, "ssm_alpha", x, steps)
    b.emit("act", (beta,), (beta,), "beta_act", kind="sigmoid")
    if (factor := b.option("recurrent", "beta")) != 1.0:
        b.emit("scale", (beta,), (beta,), "beta_scale", scale=factor)
    return beta, steps


def _steps(b: Builder, module: str, x: View, steps: View) -> None:
    """Decay steps from a matrix; with their bias, unless a later softplus adds the bias."""
    if not b.option("recurrent", "fade"):
        b.linear(module, x, steps)
        return
    weights = {"weight": b.matrix(module, steps.width, x.width)}
    if b.has("ssm_dt.bias"):
        weights["bias"] = b.vector("ssm_dt", "bias", steps.width, flat=True)
    b.emit("linear", (x,), (steps,), module, weights)


def _fading(b: Builder, steps: View, heads: int) -> str:
    """Apply the activation to the decay steps in place; returns the name of the rates that multiply them."""
    fade = b.option("recurrent", "fade")
    if not fade:
        _softplus(b, steps)
        return _rates(b, heads, *[1] * (steps.width > heads))
    head_of = np.repeat(np.arange(heads), steps.width // heads)
    name = b.vector("ssm_a", "weight", steps.width, head_of, flat=True)
    b.weights[name] = replace(b.weights[name], negative_exp=b.option("recurrent", "log_rates"))
    b.emit("scale", (steps,), (steps,), "steps_scale", {"weight": name}, scale=-1.0)
    b.emit("act", (steps,), (steps,), "steps_act", kind="sigmoid")
    return b.constant(f"{b.prefix}fade", np.full(heads, -fade, np.float32))


def _softplus(b: Builder, steps: View) -> None:
    """steps = softplus(steps + bias), clamped to [least_step, most_step]."""
    weights = {"bias": b.vector("ssm_dt", "bias", steps.width, flat=True)} if b.has("ssm_dt.bias") else {}
    limits = {key: b.option("recurrent", f"{key}_step") for key in ("least", "most")}
    b.emit("softplus", (steps,), (steps,), "softplus", weights, **limits)


def grouped_rows(groups: int, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Row indices of each part in a matrix that stores, group by group, `sizes` rows of every part."""
    first, starts = np.arange(groups)[:, None] * sum(sizes), np.cumsum((0, *sizes))
    return [(first + start + np.arange(size)).reshape(-1) for start, size in zip(starts, sizes)]


def state_space(b: Builder, x: View) -> View:
    """State space model: one step and one rate per head, B and C shared by groups of heads (arXiv 2405.21060). [T,
    D]."""
    heads, groups, size, head_dim = _sizes(b)
    inner, shared = heads * head_dim, groups * size
    whole = b.linear("ssm_in", _scaled(b, x, "in_scale"), b.view("ssm_in", 2 * inner + 2 * shared + heads))
    _multiply_parts(b, whole, (inner, inner, shared, shared, heads))
    z, steps = View(whole.buffer, 0, inner), View(whole.buffer, 2 * (inner + shared), heads)
    mixed = convolution(b, "ssm_conv1d", View(whole.buffer, inner, inner + 2 * shared),
                        b.view("ssm_conv", inner + 2 * shared), b.option("recurrent", "activation"))
    v, k, q = (View(mixed.buffer, start, width) for start, width in
               ((0, inner), (inner, shared), (inner + shared, shared)))
    _softplus(b, steps)
    y = _scan(b, q, k, v, steps, heads, groups, _rates(b, heads, 1))
    _gated(b, y, z, groups, inner)
    return _scaled(b, b.linear("ssm_out", y, b.view("branch", x.width)), "out_scale")


def selective_scan(b: Builder, x: View) -> View:
    """Selective scan: one step per channel, one rate per element of the channel's state (arXiv 2312.00752). Heads with
    several values have one step and one rate each. Returns [T, D]."""
    heads, _, size, value_dim = _sizes(b)
    inner, groups = heads * value_dim, b.option("recurrent", "groups")
    if heads % groups:
        raise SpecError(f"{b.where}: recurrent.groups: expected a divisor of recurrent.heads {heads}, found {groups}",
                        ("recurrent.groups", "recurrent.heads"))
    z, v = _gate_and_values(b, x, heads, value_dim)
    v = convolution(b, "ssm_conv1d", v, b.view("ssm_conv", inner), b.option("recurrent", "activation"))
    steps, k, q = (_steps_and_keys if groups == 1 else _steps_and_keys_of_groups)(b, v, size)
    if b.option("recurrent", "inner_norms"):
        for module, view in (("ssm_dt_norm", steps), ("ssm_b_norm", k), ("ssm_c_norm", q)):
            b.norm(module, view, view, eps=b.option("recurrent", "inner_norm_eps"))
    if groups == 1:
        steps = b.linear("ssm_dt", steps, b.view("ssm_steps", heads))
        b.emit("softplus", (steps,), (steps,), "softplus")
    else:
        wide = b.view("ssm_steps", heads)
        weight = b.stack_of_matrices("ssm_dt", groups, heads // groups, steps.width // groups)
        b.emit("head_linear", (steps,), (wide,), "ssm_dt", {"weight": weight}, heads=groups)
        _softplus(b, wide)
        steps = wide
    y = _scan(b, q, k, v, steps, heads, groups, _rates(b, heads, size if value_dim == 1 else 1))
    _gated(b, y, z, 1, inner)
    return b.linear("ssm_out", y, b.view("branch", x.width))


def _gate_and_values(b: Builder, x: View, heads: int, value_dim: int) -> tuple[View, View]:
    """Output gate and values of a scan, [T, heads * value_dim] each."""
    inner = heads * value_dim
    whole = b.view("ssm_in", 2 * inner)
    first, second = View(whole.buffer, 0, inner), View(whole.buffer, inner, inner)
    if (order := b.option("recurrent", "rows")) == "parts":
        b.linear("ssm_in", x, whole)
        return second, first
    b.expect_rows("ssm_in", 2 * inner)
    rows = np.arange(2 * inner).reshape((heads, 2, value_dim) if order == "heads" else (inner, 2, 1))
    for view, at, suffix in ((first, int(order == "pairs"), ".gate"), (second, int(order == "heads"), ".values")):
        b.linear("ssm_in", x, view, rows[:, at].reshape(-1), suffix)
    return first, second


def _steps_and_keys(b: Builder, v: View, size: int) -> tuple[View, View, View]:
    """Low-rank input of the steps, keys B and queries C."""
    rank = b.option("recurrent", "rank")
    low = b.linear("ssm_x", v, b.view("ssm_x", rank + 2 * size))
    start, keys = (2 * size, 0) if b.option("recurrent", "rows") == "heads" else (0, rank)
    return View(low.buffer, start, rank), View(low.buffer, keys, size), View(low.buffer, keys + size, size)


def _steps_and_keys_of_groups(b: Builder, v: View, size: int) -> tuple[View, View, View]:
    """The same for each group of channels, all groups side by side."""
    groups, rank = b.option("recurrent", "groups"), b.option("recurrent", "rank")
    views, start = [], 0
    for suffix, count in ((".steps", rank), (".b", size), (".c", size)):
        view = b.view(f"ssm_x{suffix}", groups * count)
        weight = b.stack_of_matrices("ssm_x", groups, count, v.width // groups, range(start, start + count),
                                     suffix=suffix)
        b.emit("head_linear", (v,), (view,), f"ssm_x{suffix}", {"weight": weight}, heads=groups)
        views.append(view)
        start += count
    return views[0], views[1], views[2]


def state_space_beside_attention(b: Builder, x: View) -> View:
    """State space model and attention on the same input, outputs added (arXiv 2507.22448). Returns [T, D]."""
    y = b.view("beside", x.width)
    b.emit("copy", (state_space(b, x),), (y,), "ssm_keep")
    attended = self_attention(b, x)
    b.emit("add", (y, attended), (attended,), "mixers_add")
    return attended


def begin_side(b: Builder, x: View) -> None:
    """Copy the embeddings x for layers with a side block (section side), if there are any."""
    if any(b.resolved.option("side", "enabled", layer, b.stack) for layer in range(b.option("stack", "layers"))):
        b.emit("copy", (x,), (b.view("embeddings", x.width),), "side_embeddings")


def beside(b: Builder, x: View) -> View:
    """x + side_output(feed_forward(norm(attention(norm([x, embeddings]))))), a block whose weights several layers share
    (arXiv 2411.15242). Returns [T, D] in another buffer than x."""
    both = b.view("side_both", 2 * x.width)
    b.emit("copy", (x,), (View(both.buffer, 0, x.width),), "side_input")
    b.emit("copy", (b.view("embeddings", x.width),), (View(both.buffer, x.width, x.width),), "side_beside")
    b.norm("side_norm", both, both)
    hidden = feed_forward(b, b.norm("ffn_norm", self_attention(b, both, x.width), b.view("normed", x.width)))
    y = b.linear("side_output", hidden, b.view("side", x.width))
    b.emit("add", (x, y), (y,), "side_add")
    return y


def _scan(b: Builder, q: View, k: View, v: View, steps: View, heads: int, groups: int, rate: str) -> View:
    """The step `linear_attention` of a state space model; its output [T, H * dv]."""
    y, size = b.view("recurrent", v.width), q.width // groups
    shape = (heads,) if v.width == heads else (heads, 1)
    weights = {"rate": rate, "skip": b.vector("ssm_d", "weight", heads, flat=True, written=shape)}
    b.emit("linear_attention", (q, k, v, steps), (y,), "scan", weights, heads=heads, key_heads=groups, scaled=True,
           state=_matrix(b, "ssm", heads, size, v.width // heads))
    return y


def _scaled(b: Builder, x: View, key: str) -> View:
    """x * option `key` of the section: a copy for in_scale, in place for out_scale."""
    factor = b.option("recurrent", key)
    if factor == 1.0:
        return x
    y = b.view("ssm_scaled", x.width) if key == "in_scale" else x
    b.emit("scale", (x,), (y,), f"ssm_{key}", scale=factor)
    return y


def _multiply_parts(b: Builder, whole: View, widths: tuple[int, ...]) -> None:
    """Multiply the parts z, x, B, C and steps of the input projection by their options."""
    start = 0
    for name, width in zip(("z", "x", "b", "c", "dt"), widths):
        factor = b.option("recurrent", f"{name}_scale")
        if factor != 1.0:
            part = View(whole.buffer, start, width)
            b.emit("scale", (part,), (part,), f"ssm_{name}_scale", scale=factor)
        start += width
