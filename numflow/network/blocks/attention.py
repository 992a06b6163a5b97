"""The attention block: projections, q/k norms, rotation, cache, attention, output projection."""

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.beside import Beside, distances, index, log_scaled, relative, temper, uneven_window
from numflow.network.blocks.channels import add_convolution, clip_length, convolve_by_token, times_vector
from numflow.network.blocks.projections import Heads, clip, convolved, projections, query_and_gate_rows
from numflow.network.blocks.rope import alibi_slopes, rotate
from numflow.network.steps.builder import Builder
from numflow.ops import Cache, View

_BIAS_COLUMNS = 8  # further columns of a key that hold the bias of its scores: the vector width of kernels


def self_attention(b: Builder, x: View, width: int = 0, kv: tuple[View, View] | None = None) -> View:
    """Self-attention of x [T, D], which the caller has normalised if the model does so.

    Returns [T, width]; width 0: as wide as x. kv: inputs of keys and values, if not x.
    """
    shape = Heads(*(b.option("attention", key) for key in ("heads", "kv_heads", "head_dim", "value_dim")))
    if shape.heads % shape.kv_heads:
        raise SpecError(f"{b.where}: attention.heads: expected a multiple of attention.kv_heads {shape.kv_heads}, "
                        f"found {shape.heads}", ("attention.heads", "attention.kv_heads"))
    if b.option("attention", "gate_by_head") and b.option("attention", "gate_in_query"):
        raise SpecError(f"{b.where}: attention.gate_by_head: expected false with attention.gate_in_query",
                        ("attention.gate_by_head", "attention.gate_in_query"))
    x = _times(b, "in_scale", x, b.view("attention_in", x.width)) if b.option("attention", "in_scale") != 1.0 else x
    y = _latent_heads(b, x, shape) if b.option("latent", "rank") else _heads(b, x, shape, kv)
    if b.option("attention", "out_norm") == "head":
        b.norm("attn_out_norm", y, y, groups=shape.heads)
    if b.option("attention", "gate"):
        _gate(b, x, y, shape)
    if b.option("attention", "sub_norm"):
        b.norm("attn_sub_norm", y, y)
    output = b.linear("attn_output", y, b.view("branch", width or x.width))
    return _times(b, "out_scale", output, output)


def _gate(b: Builder, x: View, y: View, shape: Heads) -> None:
    """y *= gate_kind(gate(x)), with one gate per column or per head of y."""
    by_head, plain = b.option("attention", "gate_by_head"), b.option("attention", "gate_kind") == "softplus"
    gate = b.view("attention_gate", shape.heads if by_head else y.width)
    if b.option("attention", "qkv") == "gate_concat":
        b.linear("attn_qkv", x, gate, range(gate.width), ".gate")
    elif by_head or not b.option("attention", "gate_in_query"):
        _gate_of(b, x, gate, shape)
    elif not b.option("latent", "rank"):  # latent attention has computed the gate with its queries
        b.linear("attn_q", x, gate, query_and_gate_rows(shape)[1], ".gate")
    if factor := b.option("attention", "gate_factor"):
        times_vector(b, "attn_gate_scale", gate, factor, 2)
    if plain:
        b.emit("softplus", (gate,), (gate,), "attn_gate_softplus")
    if by_head:
        b.emit("gate_rows", (y, gate), (y,), "attn_gated", plain=plain)
    elif plain:
        b.emit("mul", (gate, y), (y,), "attn_gated")
    else:
        b.emit("act_mul", (gate, y), (y,), "attn_gated", kind="sigmoid")


def _gate_of(b: Builder, x: View, gate: View, shape: Heads) -> None:
    """gate = attn_gate(x). The bias may have one value per head, which is repeated over the head's columns."""
    bias = b.names.find("attn_gate", "bias", b.layer, b.stack)
    if bias is None or tuple(bias.shape) != (shape.heads,) or gate.width == shape.heads:
        b.linear("attn_gate", x, gate)
        return
    columns = np.repeat(np.arange(shape.heads), gate.width // shape.heads)
    b.emit("linear", (x,), (gate,), "attn_gate", {"weight": b.matrix("attn_gate", gate.width, x.width),
                                                  "bias": b.vector("attn_gate", "bias", gate.width, columns)})


def _times(b: Builder, key: str, x: View, y: View) -> View:
    """y = x * option `key` of the section; no step if the option is 1."""
    if (factor := b.option("attention", key)) != 1.0:
        b.emit("scale", (x,), (y,), f"attn_{key}", scale=factor)
    return y


def attend(b: Builder, q: View, y: View, cache: Cache, heads: int, beside: Beside) -> None:
    """Emit attention of `heads` query heads over a cache, with the spec's options. beside: further inputs and
    weights."""
    weights, chunk = position_biases(b, heads) | beside[1], b.option("attention", "chunk")
    scaled_alike = b.option("attention", "relative") and not b.option("attention", "token_sinks")
    for view in (q, *(beside[0] if scaled_alike else ())):
        temper(b, view)
    if b.option("attention", "log_scaled"):
        log_scaled(b, "attn", q, heads)
    window = b.option("attention", "window")
    block = b.option("indexer", "block") if b.option("indexer", "heads") else 0
    b.emit("attention", (q, *beside[0]), (y,), "attention", weights, cache=cache.name, heads=heads,
           window=max(window, b.option("attention", "ahead") + 1) if window else 0,
           **{key: b.option("attention", key) for key in ("scale", "causal", "softcap")},
           **({"cross": f"{b.prefix}cross"} if b.option("attention", "merged") else {}),
           **({"bucket_distance": b.option("attention", "bucket_distance")} if "buckets" in weights else {}),
           **({"block": block} if block else {}), **({"chunk": chunk} if chunk else {}))


def _heads(b: Builder, x: View, shape: Heads, kv: tuple[View, View] | None = None) -> View:
    """Write keys and values of this layer to its cache, then attend. Returns the outputs of all query heads [T,
    H*Ev]."""
    if (owner := _owner(b)) == b.layer:
        q, k, v = convolved(b, x, shape) if b.option("attention", "convolved") else projections(b, x, shape, kv)
        clip(b, (q, k, v))
        for name, view, source in zip(("attn_k", "attn_v"), (k, v), kv or (x, x)):
            if b.option("attention", "kv_taps"):
                convolve_by_token(b, name, view, source, shape.kv_heads, b.option("conv", "kv_scale"))
            elif b.option("attention", "kv_convolved"):
                add_convolution(b, f"{name}_conv", view, b.option("conv", "kv_scale"))
        if b.option("attention", "v_norm") == "head":
            b.norm("attn_v_norm", v, v, groups=shape.kv_heads)
        placed(b, [("q", q, shape.heads), ("k", k, shape.kv_heads)], shape)
        _times(b, "key_scale", k, k)
        name = f"{b.prefix}self"
        if b.option("attention", "key_bias"):
            q, k = _biased_keys(b, q, k, v, shape)
        cache = b.caches[name] = Cache(name, shape.kv_heads, k.width // shape.kv_heads, shape.value_dim)
        b.emit("cache_write", (k, v), (), "cache_write", cache=cache.name)
        biases = (distances(b, q, k, shape.heads) if b.option("attention", "distances") else
                  uneven_window(b, q, shape.heads) if b.option("attention", "ahead") else relative(b, x, shape.heads))
    else:
        biases = relative(b, x, shape.heads)
        q = b.linear("attn_q", x, b.view("qkv", shape.heads * shape.head_dim))
        clip(b, (q,))
        placed(b, [("q", q, shape.heads)], shape)
        for module in ("attn_k", "attn_v", "attn_k_norm"):  # mark as used: some files have them without need
            b.names.find(module, "weight", b.layer, b.stack)
        cache = b.caches[f"{b.prefix_of(owner)}self"]
    if b.option("indexer", "heads"):
        if biases[0]:
            raise SpecError(f"{b.where}: indexer.heads: expected 0 with relative position scores",
                            ("indexer.heads", "attention.distances", "attention.relative"))
        biases = (index(b, x, x), {})
    y = b.view("attention", shape.heads * shape.value_dim)
    attend(b, q, y, cache, shape.heads, biases)
    return _difference(b, y, shape) if b.option("attention", "differential") else y


def _difference(b: Builder, y: View, shape: Heads) -> View:
    """Differential attention: outputs of the first half of the heads minus lambda times those of the second half,
    then a norm per head and the factor 1 - lambda_init. lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init."""
    initial, size = b.option("attention", "differential"), shape.head_dim
    first, second = (View(y.buffer, y.start + half * y.width // 2, y.width // 2) for half in (0, 1))
    term1, term2 = (float(np.exp(np.sum(b.numbers(f"attn_diff_q{part}", size) * b.numbers(f"attn_diff_k{part}", size))))
                for part in (1, 2))
    b.emit("add", (first, second), (first,), "attn_difference", scale=term2 - term1 - initial)
    b.norm("attn_diff_norm", first, first, groups=shape.heads // 2)
    b.emit("scale", (first,), (first,), "attn_diff_scale", scale=1 - initial)
    return first


def _biased_keys(b: Builder, q: View, k: View, v: View, s: Heads) -> tuple[View, View]:
    """Queries and keys with further columns, whose products are the bias of a key's scores."""
    head_of = np.repeat(np.arange(s.kv_heads), _BIAS_COLUMNS)
    b.expect_rows("attn_key_bias", s.kv_heads)
    bias, ones = b.view("key_bias", len(head_of)), b.view("query_ones", _BIAS_COLUMNS)
    b.linear("attn_key_bias", v, bias, head_of)
    b.emit("softplus", (bias,), (bias,), "key_bias_softplus")
    rates = b.constant(f"{b.prefix}key_bias_rates", b.numbers("attn_key_bias_rate", s.kv_heads)[head_of])
    b.emit("scale", (bias,), (bias,), "key_bias_rate", {"weight": rates}, scale=1.0)
    b.emit("act", (bias,), (bias,), "key_bias", kind="exp")
    one = np.full(_BIAS_COLUMNS, 1 / (b.option("attention", "scale") * _BIAS_COLUMNS), np.float32)
    b.emit("scale", (View(k.buffer, k.start, _BIAS_COLUMNS),), (ones,), "query_ones",
           {"shift": b.constant(f"query_ones.{one[0]}", one)}, scale=0.0)
    wide = [b.view(name, heads * (s.head_dim + _BIAS_COLUMNS)) for name, heads in (
        ("biased_queries", s.heads), ("biased_keys", s.kv_heads))]
    b.emit("head_concat", (q, ones), (wide[0],), "biased_queries", heads=s.heads)
    b.emit("head_concat", (k, bias), (wide[1],), "biased_keys", heads=s.kv_heads)
    return wide[0], wide[1]


def _owner(b: Builder) -> int | None:
    """The layer whose keys and values this layer reads: itself; `shared_layer`; from `shared_from` on, the last one
    before that index with the same window.

    Raises:
        SpecError: there is no such layer, or it has none of its own.
    """
    if b.layer is not None and (other := b.option("attention", "shared_layer")) not in (-1, b.layer):
        if other > b.layer or b.resolved.option("attention", "shared_layer", other, b.stack) not in (-1, other):
            raise SpecError(f"{b.where}: attention.shared_layer: expected a layer before layer {b.layer} that has its "
                            f"own keys and values, found {other}", ("attention.shared_layer",))
        return other
    first, layer = b.option("attention", "shared_from"), b.layer
    if not first or layer is None or layer < first:
        return layer
    window = b.option("attention", "window")
    for other in range(first - 1, -1, -1):
        if b.resolved.option("attention", "window", other, b.stack) == window:
            return other
    raise SpecError(f"{b.where}: attention.shared_from: layer {layer} should read the keys and values of a layer "
                    f"before {first} with its window {window}, and there is none", ("attention.shared_from",))


def placed(b: Builder, views: list[tuple[str, View, int]], shape: Heads) -> None:
    """Emit norm and rotation of queries and keys in the spec's order. views: name, view and number of heads of each."""
    for step in ("rope", "norm") if b.option("attention", "norm_after_rope") else ("norm", "rope"):
        for name, view, heads in views:
            if step == "norm":
                normed(b, name, view, heads)
            elif step == "rope" and b.option("rope", "enabled"):
                rotate(b, view, heads, shape.head_dim, f"rope_{name}")
    if factor := b.option("attention", "q_factor"):
        for name, view, _ in views:
            if name == "q":
                times_vector(b, "attn_q_scale", view, factor, 2)


def normed(b: Builder, name: str, view: View, heads: int) -> None:
    """Emit the norm of queries ("q") or keys ("k"), if the spec has one."""
    kind = b.option("attention", "q_norm")
    if b.option("attention", "q_norm_kind") == "clip" and kind != "none":
        if b.has(f"attn_{name}_norm.weight"):
            weight = b.vector(f"attn_{name}_norm", "weight", view.width, flat=True)
            b.emit("scale", (view,), (view,), f"attn_{name}_norm_weights", {"weight": weight}, scale=1.0)
        clip_length(b, f"attn_{name}_norm", view, heads if kind == "head" else 1, b.option("attention", "q_norm_limit"))
    elif kind != "none":
        b.norm(f"attn_{name}_norm", view, view, groups=heads if kind == "head" else 1,
               eps=b.option("attention", "q_norm_eps") or None, kind=b.option("attention", "q_norm_kind"))


def cross_memory(b: Builder, memory: View) -> None:
    """In entry "encode": write keys and values of the encoder's output for one decoder layer's cross-attention, or for
    its merged attention."""
    shape, merged = _cross_shape(b), b.option("attention", "merged")
    if merged and not _plain_keys(b):
        raise SpecError(f"{b.where}: attention.merged: expected one matrix each for keys and values, which only a norm "
                        "of keys and a rotation may follow", ("attention.merged",))
    kv = b.view("cross_kv", shape.kv_heads * (shape.head_dim + shape.value_dim))
    k = View(kv.buffer, 0, shape.kv_heads * shape.head_dim)
    v = View(kv.buffer, k.width, shape.kv_heads * shape.value_dim)
    for name, view in (("k", k), ("v", v)):
        b.linear(f"{'attn' if merged else 'cross'}_{name}", memory, view)
    if merged:
        normed(b, "k", k, shape.kv_heads)
    cache = f"{b.prefix}cross"
    b.caches[cache] = Cache(cache, shape.kv_heads, shape.head_dim, shape.value_dim, kind="cross")
    b.emit("cache_write", (k, v), (), "cross_write", cache=cache)


def cross_attention(b: Builder, x: View) -> View:
    """Cross-attention of the decoder over the encoder's output. Returns [T, D]."""
    shape = _cross_shape(b)
    q = b.linear("cross_q", x, b.view("qkv", shape.heads * shape.head_dim))
    y = b.view("attention", shape.heads * shape.value_dim)
    b.emit("attention", (q,), (y,), "cross_attention", cache=f"{b.prefix}cross", heads=shape.heads,
           scale=b.option("attention", "scale"), causal=False, softcap=b.option("attention", "softcap"))
    return b.linear("cross_output", y, b.view("branch", x.width))


def position_biases(b: Builder, heads: int) -> dict[str, str]:
    """Weights of `attention` by role: ALiBi slopes, sinks, relative position buckets, as the spec has them."""
    weights = {}
    if b.option("attention", "alibi"):
        slopes = alibi_slopes(heads, b.option("attention", "alibi_max")) * b.option("attention", "alibi_scale")
        weights["slopes"] = b.constant(f"alibi.{heads}", slopes.astype(np.float32))
    if b.option("attention", "sinks"):
        weights["sinks"] = b.vector("attn_sinks", "weight", heads)
    if b.option("attention", "token_sinks"):  # scores are relative to the token's sink
        if not b.option("attention", "relative") or b.option("attention", "softcap") or weights:
            raise SpecError(f"{b.where}: attention.token_sinks: expected attention.relative, and neither softcap, "
                            "sinks nor ALiBi", ("attention.token_sinks",))
        weights["sinks"] = b.constant(f"sinks_zero.{heads}", np.zeros(heads, np.float32))
    if b.option("attention", "buckets"):
        layer = b.layer
        b.layer = layer if b.option("attention", "own_buckets") else 0
        weights["buckets"] = b.matrix("attn_rel_b", b.option("attention", "buckets"), heads)
        b.layer = layer
    return weights


def _cross_shape(b: Builder) -> Heads:
    return Heads(*(b.option("attention", key) for key in ("heads", "kv_heads", "head_dim", "value_dim")))


def _plain_keys(b: Builder) -> bool:
    """Whether keys and values are those of attn_k and attn_v, but for a norm of keys and a rotation."""
    usual = {"qkv": "separate", "v_norm": "none", "key_scale": 1.0, "clip": 0.0, "convolved": 0, "in_scale": 1.0,
             "differential": 0.0, "kv_convolved": False, "key_bias": False}
    return all(b.option("attention", key) == value for key, value in usual.items()) and \
        _owner(b) == b.layer and not b.option("latent", "rank")


def _latent_heads(b: Builder, x: View, s: Heads) -> View:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1) with absorbed matrices.

    The cache has one key per token: the compressed key/value c [rank] and a rotated part that all heads share. The
    first `rank` columns of the key are its value. c is not expanded to the keys W_k c and values W_v c of each head.
    Instead, queries are multiplied with W_k^T and each head's output with W_v: q . (W_k c) = (W_k^T q) . c.
    """
    rank, rope_dim, nope_dim = (b.option("latent", key) for key in ("rank", "rope_dim", "nope_dim"))
    plain, rotated, low_query = _latent_queries(b, x, s.heads, nope_dim, rope_dim)
    if b.option("rope", "enabled"):
        rotate(b, rotated, s.heads, rope_dim, "rope_q")
    cache = _latent_cache(b, x, rank, rope_dim)
    chosen = index(b, x, low_query) if b.option("indexer", "heads") else ()
    to_latent, from_latent = _latent_matrices(b, s, rank, nope_dim)
    in_latent, q = b.view("q_latent", s.heads * rank), b.view("q_heads", s.heads * (rank + rope_dim))
    b.emit("head_linear", (plain,), (in_latent if rope_dim else q,), "attn_k_b", {"weight": to_latent}, heads=s.heads)
    if rope_dim:
        b.emit("head_concat", (in_latent, rotated), (q,), "q_heads", heads=s.heads)
    attend(b, q, in_latent, cache, s.heads, (chosen, {}))
    y = b.view("attention", s.heads * s.value_dim)
    b.emit("head_linear", (in_latent,), (y,), "attn_v_b", {"weight": from_latent}, heads=s.heads)
    return y


def _latent_cache(b: Builder, x: View, rank: int, rope_dim: int) -> Cache:
    """The cache of this layer, with the compressed keys/values of x written to it; or the cache of an earlier layer.

    Raises:
        SpecError: the keys of that layer have another width.
    """
    if (owner := _owner(b)) != b.layer:
        cache = b.caches[f"{b.prefix_of(owner)}self"]
        if cache.k_dim != rank + rope_dim:
            raise SpecError(f"{b.where}: attention.shared_layer: expected a layer whose keys have {rank + rope_dim} "
                            f"columns; layer {owner} has {cache.k_dim}", ("attention.shared_layer",))
        return cache
    row = b.linear("attn_kv_a", x, b.view("kv_low", rank + rope_dim))
    low, k_rope = View(row.buffer, 0, rank), View(row.buffer, rank, rope_dim)
    _compressed(b, "attn_kv_a_norm", low, low, "scale")
    if b.option("latent", "rope_norm"):
        b.norm("attn_k_rope_norm", k_rope, k_rope, eps=b.option("latent", "norm_eps"))
    if b.option("rope", "enabled"):
        rotate(b, k_rope, 1, rope_dim, "rope_k")
    name = f"{b.prefix}self"
    cache = b.caches[name] = Cache(name, 1, rank + rope_dim, 0, prefix=rank)
    b.emit("cache_write", (row,), (), "cache_write", cache=name)
    return cache


def _latent_queries(b: Builder, x: View, heads: int, nope_dim: int, rope_dim: int) -> tuple[View, View, View]:
    """Queries of all heads: columns without rotation [T, H * nope_dim], columns to rotate [T, H * rope_dim]; and the
    compressed query. Also computes the output gate, where its rows are in the query matrix."""
    if q_rank := b.option("latent", "q_rank"):
        module, read = "attn_q_b", b.view("q_low", q_rank * (1 + b.option("latent", "q_raw")))
        low, raw = View(read.buffer, 0, q_rank), View(read.buffer, read.width - q_rank, q_rank)
        _compressed(b, "attn_q_a_norm", b.linear("attn_q_a", x, raw), low, "q_scale")
    else:
        module, read, low = "attn_q", x, x
    gate_dim = b.option("attention", "value_dim") if b.option("attention", "gate_in_query") else 0
    sizes, suffixes = (nope_dim, rope_dim, gate_dim), (".nope", ".rope", ".gate")
    b.expect_rows(module, heads * sum(sizes))
    both = b.view("q", heads * (nope_dim + rope_dim))
    views = View(both.buffer, 0, heads * nope_dim), View(both.buffer, heads * nope_dim, heads * rope_dim)
    gates = (b.view("attention_gate", heads * gate_dim),) if gate_dim else ()
    first, starts = np.arange(heads)[:, None] * sum(sizes), np.cumsum((0, *sizes))
    for view, start, size, suffix in zip((*views, *gates), starts, sizes, suffixes):
        if size:
            b.linear(module, read, view, (first + start + np.arange(size)).reshape(-1), suffix)
    return *views, low


def _compressed(b: Builder, norm: str, x: View, y: View, scale: str) -> None:
    """y = norm(x) * option `scale` of section latent."""
    b.norm(norm, x, y, eps=b.option("latent", "norm_eps"))
    if (factor := b.option("latent", scale)) != 1.0:
        b.emit("scale", (y,), (y,), f"{norm}_scale", scale=factor)


def _latent_matrices(b: Builder, s: Heads, rank: int, nope_dim: int) -> tuple[str, str]:
    """Absorbed matrices of every head: [rank, nope_dim] for queries, [value_dim, rank] for outputs."""
    if b.has("attn_k_b.weight"):  # files with both matrices of each head, the first transposed already
        return (b.stack_of_matrices("attn_k_b", s.heads, rank, nope_dim),
                b.stack_of_matrices("attn_v_b", s.heads, s.value_dim, rank))
    size, rows = nope_dim + s.value_dim, range(nope_dim)
    return (b.head_matrices("attn_kv_b", s.heads, size, rows, rank, ".k", turned=True),
            b.head_matrices("attn_kv_b", s.heads, size, range(nope_dim, size), rank, ".v"))
