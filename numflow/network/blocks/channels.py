"""Blocks with a state of a few values per channel: convolutions, gated recurrences, wkv; convolutions over the tokens
around each token."""

from dataclasses import replace

import numpy as np

from numflow.errors import SpecError
from numflow.network.steps.builder import Builder
from numflow.ops import CONV_KINDS, Cache, View

_ZERO_KEY = 8  # columns of keys that are all zero
_LEAST = 1e-20  # lower limit of a mean square that divides
_CERTAIN = 1e4  # a logit next to which the softmax of all others is 0


def short_convolution(b: Builder, x: View) -> View:
    """out(after * conv(before * x')), where (before, after, x') = in(x) (arXiv 2511.23404). Returns [T, D]."""
    width = x.width
    whole = b.view("conv_in", 3 * width)
    parts = [View(whole.buffer, i * width, width) for i in range(3)]
    for i, suffix in enumerate((".before", ".after", ".x")):
        b.linear("conv_in", x, parts[i], range(i * width, (i + 1) * width), suffix)
    before, after, inner = parts
    b.emit("mul", (before, inner), (inner,), "conv_before")
    y = convolution(b, "conv", inner, b.view("conv", width))
    b.emit("mul", (after, y), (y,), "conv_after")
    return b.linear("conv_out", y, b.view("branch", width))


def convolution(b: Builder, module: str, x: View, y: View, kind: str = "none", weight: str = "",
                biased: bool = True) -> View:
    """y = act(causal depthwise convolution of x [T, C]) with a module's weights [C, K] and its bias, if the file has
    one.

    kind: the activation, or "none". y: a view that does not overlap x. weight: name of other weights.
    biased: False for no bias. With K = 1 the convolution is a factor per column and needs no state.
    """
    taps = b.option("conv", "taps")
    bias = b.vector(module, "bias", x.width) if biased and b.has(f"{module}.bias") else ""
    if taps == 1:
        factors = weight or b.vector(module, "weight", x.width, flat=True)
        b.emit("scale", (x,), (y,), module, {"weight": factors} | ({"shift": bias} if bias else {}), scale=1.0)
        fused = "none"
    else:
        weights = {"weight": weight or b.matrix(module, x.width, taps)} | ({"bias": bias} if bias else {})
        fused = kind if kind in CONV_KINDS else "none"
        b.emit("causal_conv", (x,), (y,), module, weights, state=b.state(module, taps - 1, x.width, axis=1),
               kind=fused)
    if fused != kind:
        b.emit("act", (y,), (y,), f"{module}_act", kind=kind)
    return y


def add_convolution(b: Builder, module: str, x: View, scale: float = 1.0, weight: str = "") -> None:
    """x = scale * (x + causal depthwise convolution of x), in place. weight: name of other weights."""
    y = convolution(b, module, x, b.view("convolved", x.width), weight=weight)
    b.emit("add", (x, y), (x,), f"{module}_add")
    if scale != 1.0:
        b.emit("scale", (x,), (x,), f"{module}_scale", scale=scale)


def convolve_by_token(b: Builder, name: str, x: View, source: View, heads: int, scale: float) -> None:
    """x = scale * (x + causal convolution of x), in place; kernel of a head's columns: stored plus computed from
    `source`. name: "attn_k" or "attn_v"."""
    taps = b.option("conv", "taps")
    rows = np.arange(heads * taps).reshape(heads, taps).T.reshape(-1)  # the values of one distance side by side
    kernels = b.linear(f"{name}_taps", source, b.view("conv_kernels", heads * taps), rows)
    before, total = b.view("conv_before", x.width), b.view("conv_total", x.width)
    b.emit("copy", (x,), (before,), f"{name}_taps_0")
    b.emit("scale", (x,), (total,), f"{name}_taps_none", scale=0.0)
    for distance in range(taps):
        term = b.view("conv_term", x.width)
        if distance:
            token_before(b, f"{name}_before_{distance}", before, term)
            b.emit("copy", (term,), (before,), f"{name}_taps_{distance}")
        b.emit("gate_rows", (before, View(kernels.buffer, distance * heads, heads)), (term,), f"{name}_term_{distance}",
               plain=True)
        b.emit("add", (total, term), (total,), f"{name}_sum_{distance}")
    stored = b.numbers(f"{name}_conv", taps * x.width).reshape(taps, x.width)[::-1].T
    weight = b.constant(f"{b.prefix}{name}_conv", np.ascontiguousarray(stored if taps > 1 else stored[:, 0]))
    add_convolution(b, f"{name}_conv", x, weight=weight)
    b.emit("add", (x, total), (x,), f"{name}_taps_add")
    b.emit("scale", (x,), (x,), f"{name}_taps_scale", scale=scale)


def clip_length(b: Builder, label: str, x: View, heads: int, limit: float) -> None:
    """Each head x becomes x * min(1, limit / |x|), in place."""
    size = x.width // heads
    rms = limit / size ** 0.5
    like = b.view("clip_like", size)
    shift = b.constant(f"clip_like.{size}.{limit}", np.full(size, rms, np.float32))
    b.emit("scale", (View(x.buffer, x.start, size),), (like,), f"{label}_limit", {"shift": shift}, scale=0.0)
    b.emit("match_rms", (x, like), (x,), label, least=max(rms ** 2, _LEAST))


def gated_recurrence(b: Builder, x: View) -> View:
    """out(h * act(gate(x))), h the gated linear recurrence over conv(in(x)) (arXiv 2402.19427). Returns [T, D]."""
    width, blocks = b.option("recurrent", "heads") * b.option("recurrent", "value_dim"), b.option("recurrent", "heads")
    size = width // blocks
    gate = b.linear("lru_gate", x, b.view("recurrent_gate", width))
    inner = convolution(b, "ssm_conv1d", b.linear("lru_in", x, b.view("lru_in", width)), b.view("lru_conv", width))
    both = b.view("lru_gates", 2 * width)
    parts = [View(both.buffer, start, width) for start in (0, width)]
    weights = {"rate": b.vector("lru_rate", "weight", width)}
    for view, name in zip(parts, ("entry", "fade")):
        # Block-diagonal: a matrix per block of columns, stored [blocks, inputs, outputs]
        matrix = b.head_matrices(f"lru_{name}", blocks, size, range(size), size, "", turned=True)
        b.emit("head_linear", (inner,), (view,), f"lru_{name}", {"weight": matrix}, heads=blocks)
        weights[f"{name}_bias"] = b.vector(f"lru_{name}_bias", "weight", width, flat=True)
    y = b.view("recurrent", width)
    b.emit("gated_recurrence", (inner, *parts), (y,), "lru", weights, state=b.state("lru", width))
    b.emit("act_mul", (gate, y), (y,), "gated", kind=b.option("recurrent", "activation"))
    return b.linear("ssm_out", y, b.view("branch", x.width))


def weighted_keys(b: Builder, x: View) -> View:
    """out(sigmoid(gate(x)) * wkv), wkv the mean of values with weights e^key that decay (arXiv 2305.13048). [T, D]."""
    width = b.option("recurrent", "heads") * b.option("recurrent", "value_dim")
    before = token_before(b, "shift", x, b.view("before", x.width))
    gate, k, v = (b.linear(module, _mix(b, f"{module}_mix", x, before), b.view(module, width))
                  for module in ("attn_gate", "attn_k", "attn_v"))
    weights = {"decay": b.vector("wkv_decay", "weight", width, flat=True),
               "first": b.vector("wkv_first", "weight", width, flat=True)}
    b.weights[weights["decay"]] = replace(b.weights[weights["decay"]], negative_exp=True)
    y = b.view("recurrent", width)
    b.emit("wkv", (k, v), (y,), "wkv", weights, state=b.state("wkv", 3, width, axis=1))
    b.emit("act_mul", (gate, y), (y,), "gated", kind="sigmoid")
    return b.linear("attn_output", y, b.view("branch", x.width))


def shifted_feed_forward(b: Builder, x: View) -> View:
    """sigmoid(gate(x)) * down(act(up(x))), where gate and up read a mix of x and the previous token's x. [T, D]."""
    before = token_before(b, "ffn_shift", x, b.view("before", x.width))
    hidden = b.view("ffn", b.option("ffn", "width"))
    gate = b.linear("ffn_gate", _mix(b, "ffn_gate_mix", x, before), b.view("ffn_gate", x.width))
    b.linear("ffn_up", _mix(b, "ffn_up_mix", x, before), hidden)
    b.emit("act", (hidden,), (hidden,), "ffn_act", kind=b.option("ffn", "activation"))
    y = b.linear("ffn_down", hidden, b.view("branch", x.width))
    b.emit("act_mul", (gate, y), (y,), "ffn_gated", kind="sigmoid")
    return y


def times_vector(b: Builder, module: str, x: View, factor: float, power: int = 1) -> None:
    """x *= (factor * v)^power in place, v the vector of a module."""
    vector = b.constant(f"{b.prefix}{module}", (factor * b.numbers(module, x.width)) ** power)
    b.emit("scale", (x,), (x,), module, {"weight": vector}, scale=1.0)


def token_before(b: Builder, label: str, x: View, y: View) -> View:
    """y = x of the previous token, 0 for the first: a causal convolution with weights 1, 0."""
    taps = b.constant(f"shift.{x.width}", np.tile(np.array([1, 0], np.float32), (x.width, 1)))
    b.emit("causal_conv", (x,), (y,), label, {"weight": taps}, state=b.state(label, 1, x.width, axis=1))
    return y


def _mix(b: Builder, module: str, x: View, before: View) -> View:
    """before + mix * (x - before), with a module's vector mix [D]."""
    y = b.view("between", x.width)
    b.emit("add", (x, before), (y,), f"{module}.change", scale=-1.0)
    b.emit("scale", (y,), (y,), module, {"weight": b.vector(module, "weight", x.width, flat=True)}, scale=1.0)
    b.emit("add", (y, before), (y,), f"{module}.sum")
    return y


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
