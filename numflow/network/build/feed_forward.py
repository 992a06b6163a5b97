"""The feed-forward block: dense, gated or not, or routed to experts."""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from numflow.errors import SpecError
from numflow.network.build.builder import Builder
from numflow.ops import View

_ALWAYS_CHOSEN = 1e4  # bias of experts that are always chosen; scores are at most 1
_STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")


def feed_forward(b: Builder, x: View, routed_by: View | None = None) -> View:
    """The feed-forward block: x [T, D] -> [T, D]. routed_by: the router's input, if not x."""
    if not b.option("moe", "enabled"):
        return _dense(b, x)
    if not b.option("moe", "late"):
        return _experts(b, x, routed_by)
    _experts(b, x, routed_by, "late")
    return _dense(b, x)


def add_late(b: Builder, x: View) -> None:
    """At the end of a layer, add the output of the previous layer's experts, if these are `late`.

    Raises:
        SpecError: the last layer, or two layers in a row, have late experts.
    """
    late, before = (layer is not None and layer >= 0 and b.resolved.option("moe", "enabled", layer, b.stack)
                    and b.resolved.option("moe", "late", layer, b.stack)
                    for layer in (b.layer, None if b.layer is None else b.layer - 1))
    if late and (before or b.layer == b.option("stack", "layers") - 1):
        raise SpecError(f"{b.where}: moe.late: expected a layer without behind layer {b.layer}", ("moe.late",))
    if before:
        b.emit("add", (x, b.view("late", x.width)), (x,), "late_add")


def _dense(b: Builder, x: View, name: str = "branch") -> View:
    return _mlp(b, x, b.view(name, x.width), b.option("ffn", "width"), b.option("ffn", "layout"))


def dense_and_experts(b: Builder, x: View, stream: View) -> View:
    """A dense block, which reads x, and experts, which read the residual stream through their own norm, as does their
    router. Each output is normalised, then both are added."""
    dense = _dense(b, x, "dense")
    b.norm("ffn_post_norm_dense", dense, dense)
    routed_by = b.norm("ffn_gate_inp_norm", stream, b.view("router_normed", stream.width))
    y = _experts(b, b.norm("ffn_norm_exps", stream, b.view("normed_exps", stream.width)), routed_by)
    b.norm("ffn_post_norm_exps", y, y)
    b.emit("add", (y, dense), (y,), "dense_add")
    return y


def dense_and_early_experts(b: Builder, x: View, entry: View) -> View:
    """A dense block, which reads x, and experts, which read the layer's input `entry` through their own norm."""
    dense = _dense(b, x, "dense")
    early = b.norm("ffn_norm_exps", entry, b.view("normed_exps", entry.width))
    y = _experts(b, early, early)
    b.emit("add", (y, dense), (y,), "dense_add")
    return y


def adapter(b: Builder, x: View) -> None:
    """x += up(act(down(norm(x)))), or norm(x) + that, in place; x is the residual stream behind the feed-forward
    block."""
    h = x
    if any(b.names.candidates("adapter_norm", "weight", b.layer, b.stack)):
        h = b.norm("adapter_norm", x, b.view("normed", x.width))
    low = b.linear("adapter_down", h, b.view("adapter", b.option("ffn", "adapter_width")))
    b.emit("act", (low,), (low,), "adapter_act", kind=b.option("ffn", "activation"))
    y = b.linear("adapter_up", low, b.view("branch", x.width))
    b.emit("add", (h if b.option("ffn", "adapter_adds") == "normed" else x, y), (x,), "adapter_add")


def _mlp(b: Builder, x: View, y: View, width: int, layout: str, suffix: str = "") -> View:
    """y = down(act(gate(x)) * up(x)), or down(act(up(x))); suffix: "_shexp" for the modules of a shared expert."""
    hidden = b.view("ffn", width)
    if not b.option("ffn", "gated"):
        b.linear(f"ffn_up{suffix}", x, hidden)
        kind = b.option("ffn", "activation")
        b.emit("act", (hidden,), (hidden,), f"ffn_act{suffix}", kind=kind, **(_xielu(b) if kind == "xielu" else {}))
        return _down(b, hidden, y, suffix)
    gate, up = _gate_up_views(b, width, "tokens")
    if layout == "separate":
        b.linear(f"ffn_gate{suffix}", x, gate)
        b.linear(f"ffn_up{suffix}", x, up)
    else:
        rows_gate, rows_up = _halves(layout, width)
        b.linear(f"ffn_gate_up{suffix}", x, gate, rows_gate, ".gate")
        b.linear(f"ffn_gate_up{suffix}", x, up, rows_up, ".up")
    _times(b, "gate_scale", gate)
    if (sparsity := b.option("ffn", "sparsity")) and not suffix:
        b.emit("sparsify", (gate,), (gate,), "ffn_sparse", deviations=NormalDist().inv_cdf(sparsity))
    _gated(b, gate, up, hidden, f"ffn_act{suffix}", b.option("ffn", "activation"), b.option("ffn", "cut"))
    return _down(b, hidden, y, suffix)


def _down(b: Builder, hidden: View, y: View, suffix: str) -> View:
    if b.option("ffn", "sub_norm") and not suffix:
        b.norm("ffn_sub_norm", hidden, hidden)
    y = _times(b, "out_scale", b.linear(f"ffn_down{suffix}", hidden, y))
    if not suffix and b.has("ffn_scale.weight"):
        b.emit("scale", (y,), (y,), "ffn_scale", scale=b.number("ffn_scale"))
    return y


def _times(b: Builder, key: str, x: View) -> View:
    """x *= option `key` of the section, in place."""
    if (factor := b.option("ffn", key)) != 1.0:
        b.emit("scale", (x,), (x,), f"ffn_{key}", scale=factor)
    return x


def _xielu(b: Builder) -> dict[str, Any]:
    """Parameters of xIELU (arXiv 2411.13010), from tensors where the spec names them, else from options."""
    positive, negative, beta, eps = (
        b.number(f"ffn_act_{name}") if any(b.names.candidates(f"ffn_act_{name}", "weight", b.layer, b.stack))
        else b.option("ffn", f"xielu_{name}") for name in ("positive", "negative", "beta", "eps"))
    return {"positive": _softplus(positive), "negative": beta + _softplus(negative), "beta": beta, "eps": eps}


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _gated(b: Builder, gate: View, up: View, y: View, label: str, kind: str, cut: float) -> None:
    """y = act(gate) * up, both factors clamped to [-cut, cut] unless cut is 0."""
    if cut:
        b.emit("act", (gate,), (gate,), label, kind=kind)
        for view, part in ((gate, "gate"), (up, "up")):
            b.emit("clamp", (view,), (view,), f"{label}_cut_{part}", limit=cut)
        b.emit("mul", (gate, up), (y,), f"{label}_mul")
        return
    keys = {"swiglu_clamp": ("limit", "alpha"), "silu_clamp": ("limit",)}.get(kind, ())
    clamp = {key: b.option("ffn", key) for key in keys}
    b.emit("act_mul", (gate, up), (y,), label, kind=kind, **clamp)


def _gate_up_views(b: Builder, width: int, rows: str, name: str = "gate_up") -> tuple[View, View]:
    both = b.view(name, 2 * width, rows)
    return View(both.buffer, 0, width), View(both.buffer, width, width)


def _halves(layout: str, width: int):
    """Row indices of gate and up in a fused matrix."""
    if layout == "interleaved":
        return range(0, 2 * width, 2), range(1, 2 * width, 2)
    first, second = range(width), range(width, 2 * width)
    return (first, second) if layout == "gate_up" else (second, first)


def _experts(b: Builder, x: View, routed_by: View | None = None, name: str = "branch") -> View:
    """Mixture of experts: router, gate and up of the chosen experts, down, weighted sum, shared expert. routed_by: the
    router's input, if not x."""
    experts, width = (b.option("moe", key) for key in ("experts", "width"))
    token = x
    through, void = (b.option("moe", key) for key in ("through_experts", "void_experts"))
    if not b.option("moe", "top_k") + b.option("moe", "always") + b.option("moe", "router_width"):
        return _none_chosen(b, x, b.view(name, x.width), experts + b.option("moe", "spare_experts") + through + void)
    scores, ids, gates = _route(b, x if routed_by is None else routed_by, experts + through + void,
                                b.option("moe", "always"))
    # With `first`, kernels skip expert ids outside the stack (identity and zero experts).
    subset = {"first": 0} if through or void else {}
    for expert in range(experts, experts + b.option("moe", "spare_experts") + through + void):
        for module in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            b.names.find(module, "weight", b.layer, b.stack, expert)
    weighted: dict[str, Any] = {}
    if b.option("moe", "gate_input"):
        x, weighted = b.view("expert_in", x.width, "routes"), {"weighted": False}
        b.emit("expert_scale", (token, gates), (x,), "expert_in")
    if latent := b.option("moe", "latent_width"):
        x = b.linear("ffn_latent_down", x, b.view("experts_latent", latent))
    hidden = _expert_hidden(b, x, ids, experts, width, subset)
    routed = b.view("expert_out", x.width, "routes")
    _expert_linear(b, "ffn_down_exps", hidden, ids, routed, experts, subset)
    y = b.view(name, token.width)
    total = b.view("experts_found", latent) if latent else y
    b.emit("expert_combine", (routed, gates), (total,), "experts_sum", **weighted)
    if latent:
        b.linear("ffn_latent_up", total, y)
    add_bias_of_experts(b, "ffn_exps_bias", y)
    if through:
        _pass_through(b, token, y, (scores, ids, gates), np.repeat([0, 1, 0], (experts, through, void)))
    if b.option("moe", "shared_width"):
        _shared_expert(b, token, y)
    return y


def add_bias_of_experts(b: Builder, module: str, y: View) -> View:
    """Add a bias to y, a sum over experts, in place, where the file has one."""
    if b.has(f"{module}.weight") or b.has(f"{module}.bias"):
        role = "weight" if b.has(f"{module}.weight") else "bias"
        b.emit("scale", (y,), (y,), module, {"shift": b.vector(module, role, y.width)}, scale=1.0)
    return y


def _none_chosen(b: Builder, x: View, y: View, experts: int) -> View:
    """y = 0 (top_k is 0), plus the shared expert. Tensors of routed experts are marked as used."""
    for module in ("ffn_gate_inp", "exp_probs_b", "ffn_scale_exps", "ffn_latent_down", "ffn_latent_up", *_STACKS):
        for expert in (None, *range(experts if module in _STACKS else 0)):
            for role in ("weight", "bias"):
                b.names.find(module, role, b.layer, b.stack, expert)
    b.emit("scale", (x,), (y,), "no_experts", scale=0.0)
    if b.option("moe", "shared_width"):
        _shared_expert(b, x, y)
    return y


def _pass_through(b: Builder, x: View, y: View, route: tuple[View, View, View], through: np.ndarray) -> None:
    """Add x times the gates of the chosen identity experts. through [X]: 1 for identity experts, else 0.

    The gates are summed by an expert product of one row per expert: weight 0, bias `through`.
    """
    (scores, ids, gates), experts = route, len(through)
    weight = b.constant(f"no_rows.{experts}", np.zeros((experts, 1), np.float32))
    b.weights[weight] = replace(b.weights[weight], groups=experts)
    bias = b.constant(f"{b.prefix}passes", through.astype(np.float32))
    b.weights[bias] = replace(b.weights[bias], groups=experts)
    passes, total = b.view("passes", 1, "routes"), b.view("passed_gate", 1)
    b.emit("expert_linear", (View(scores.buffer, scores.start, 1), ids), (passes,), "passes",
           {"weight": weight, "bias": bias})
    b.emit("expert_combine", (passes, gates), (total,), "passes_sum")
    passed = b.view("passed", x.width)
    b.emit("gate_rows", (x, total), (passed,), "passed", plain=True)
    b.emit("add", (y, passed), (y,), "passed_add")


def _expert_hidden(b: Builder, x: View, ids: View, experts: int, width: int, subset: dict[str, int]) -> View:
    """Hidden activations of the chosen experts [T * S, width], one row per route."""
    hidden = b.view("expert_hidden", width, "routes")
    if not b.option("ffn", "gated"):
        _expert_linear(b, "ffn_up_exps", x, ids, hidden, experts, subset)
        b.emit("act", (hidden,), (hidden,), "experts_act", kind=b.option("moe", "activation"))
        return hidden
    gate, up = _gate_up_views(b, width, "routes", "expert_gate_up")
    layout = b.option("moe", "layout")
    if layout == "separate":
        _expert_linear(b, "ffn_gate_exps", x, ids, gate, experts, subset)
        _expert_linear(b, "ffn_up_exps", x, ids, up, experts, subset)
    else:
        rows_gate, rows_up = _halves(layout, width)
        _expert_linear(b, "ffn_gate_up_exps", x, ids, gate, experts, subset, rows_gate, ".gate")
        _expert_linear(b, "ffn_gate_up_exps", x, ids, up, experts, subset, rows_up, ".up")
    _gated(b, gate, up, hidden, "experts_act", b.option("moe", "activation"), b.option("moe", "cut"))
    return hidden


def _route(b: Builder, x: View, experts: int, always: int) -> tuple[View, View, View]:
    """Router logits, and the ids and gates of each token's experts. The last `always` experts are always chosen."""
    top_k = b.option("moe", "top_k")
    rules = {key: b.option("moe", key) for key in ("score", "normalize", "scale", "groups", "top_groups", "group_best")}
    _check_rules(b.where, experts, top_k, **rules)
    experts, top_k = experts + always, top_k + always
    if b.has("ffn_scale_gates.weight"):
        rules["scale"] *= b.number("ffn_scale_gates")
    if rules["score"] == "sparsemixer":
        rules["jitter"] = b.option("moe", "jitter")
    if rules["normalize"] and (least := b.option("moe", "least_sum")):
        rules["least_sum"] = least
    if width := b.option("moe", "router_width"):
        x = _deep_router(b, x, width)
    scores = b.linear("ffn_gate_inp", x, b.view("router", experts))
    if (scale := b.option("moe", "router_scale")) != 1.0:
        b.emit("scale", (scores,), (scores,), "router_scale", scale=scale)
    if cap := b.option("moe", "softcap"):
        b.emit("softcap", (scores,), (scores,), "router_softcap", cap=cap)
    weights = {}
    table = _experts_of(b, top_k, **rules) if b.option("moe", "by_token") else ()
    if always:
        weights["bias"] = _bias_of_all(b, experts, always)
    elif rules["score"] != "sparsemixer" and not table and (b.has("exp_probs_b.weight") or b.has("exp_probs_b.bias")):
        role = "weight" if b.has("exp_probs_b.weight") else "bias"
        spare = b.option("moe", "spare_experts")
        weights["bias"] = b.vector("exp_probs_b", role, experts, range(experts) if spare else None, flat=spare > 0)
    if b.has("ffn_scale_exps.weight"):
        weights["scales"] = b.vector("ffn_scale_exps", "weight", experts)
    ids, gates = b.view("route_ids", top_k, dtype="i32"), b.view("route_gates", top_k)
    b.emit("moe_route", (scores, *table), (ids, gates), "route", weights, **rules)
    return scores, ids, gates


def _bias_of_all(b: Builder, experts: int, always: int) -> str:
    """Selection bias of all experts; for the last ones, which are always chosen, larger than any score.

    Raises:
        SpecError: scores have no upper limit, or groups or a table choose experts.
    """
    otherwise = b.option("moe", "groups") > 1 or b.option("moe", "by_token")
    if otherwise or b.option("moe", "score") not in ("softmax", "sigmoid"):
        raise SpecError(f"{b.where}: moe.always: expected scores of softmax or sigmoid, and neither groups nor a table "
                        "of experts", ("moe.always",))
    bias = np.full(experts, _ALWAYS_CHOSEN, np.float32)
    roles = [role for role in ("bias", "weight") if b.has(f"exp_probs_b.{role}")]
    bias[:-always] = 0
    if roles:
        b.weights.pop(b.vector("exp_probs_b", roles[0], experts - always))
        bias[:-always] = b.names.need("exp_probs_b", roles[0], b.layer, b.stack).f32().reshape(-1)
    return b.constant(f"{b.prefix}exp_probs_b.of_all", bias)


def _deep_router(b: Builder, x: View, width: int) -> View:
    """Input of the router's last matrix: act(W2 act(W1 norm(h))), h = down(x) + factors * h of the layer before. [T,
    width]."""
    carried = b.view("router_carried", width)
    low = b.linear("router_down", x, b.view("router_low", width))
    if b.layer and b.has("router_carry.weight"):
        b.emit("scale", (carried,), (carried,), "router_carry", {"weight": b.vector("router_carry", "weight", width)},
               scale=1.0)
        b.emit("add", (carried, low), (carried,), "router_sum")
    else:
        b.emit("copy", (low,), (carried,), "router_begin")
    y = b.norm("router_norm", carried, b.view("router_normed", width))
    for module, view in (("router_1", low), ("router_2", y)):
        y = b.linear(module, y, view)
        b.emit("act", (y,), (y,), f"{module}_act", kind="gelu")
    return y


def _experts_of(b: Builder, top_k: int, score: str, groups: int, **_) -> tuple[View]:
    """Expert ids of each token, looked up in a table by token id.

    Raises:
        SpecError: options need a choice by score, or the table has ids that are no experts.
    """
    if score == "sparsemixer" or groups > 1:
        raise SpecError(f"{b.where}: moe.by_token: expected neither groups of experts nor the score 'sparsemixer'",
                        ("moe.by_token", "moe.score", "moe.groups"))
    tensor, experts = b.names.need("ffn_experts_of", "weight", b.layer, b.stack), b.option("moe", "experts")
    if tensor.columns != top_k:
        raise SpecError(f"{b.checkpoint.path}: tensor {tensor.name!r}: expected {top_k} experts of each token, found "
                        f"{tensor.columns}")
    table = np.array(tensor.f32().reshape(-1, top_k), np.float32)
    if not ((table >= 0) & (table < experts) & (table == np.floor(table))).all():
        raise SpecError(f"{b.checkpoint.path}: tensor {tensor.name!r}: expected numbers of experts, 0 .. {experts - 1}")
    y = b.view("experts_of", top_k)
    b.emit("embed", (), (y,), "experts_of", {"table": b.constant(f"{b.prefix}experts_of", table)}, scale=1.0)
    return (y,)


def _check_rules(where: str, experts: int, top_k: int, groups: int, top_groups: int, group_best: int, **_) -> None:
    """Check that the numbers of experts, groups and choices fit together."""
    if experts < 1 or experts % groups:
        raise SpecError(f"{where}: moe.experts: expected a multiple of moe.groups {groups}, found {experts}",
                        ("moe.experts", "moe.groups"))
    if top_groups > groups > 1:
        raise SpecError(f"{where}: moe.top_groups: expected up to moe.groups {groups}, found {top_groups}",
                        ("moe.top_groups", "moe.groups"))
    if groups > 1 and group_best > experts // groups:
        raise SpecError(f"{where}: moe.group_best: expected up to the {experts // groups} experts of a group, found "
                        f"{group_best}", ("moe.group_best",))
    most = experts // groups * min(groups, top_groups)
    if not 1 <= top_k <= most:
        raise SpecError(f"{where}: moe.top_k: expected 1 to {most}, the experts that may be chosen, found {top_k}",
                        ("moe.top_k",))


def _expert_linear(b: Builder, module: str, x: View, ids: View, y: View, experts: int, subset: dict[str, int],
                   select=None, suffix: str = "") -> None:
    transposed = b.option("moe", "transposed") or module in b.transposed
    weights = {"weight": b.stack_of_matrices(module, experts, y.width, x.width, select, transposed, suffix)}
    if b.has(f"{module}.bias"):
        weights["bias"] = b.stack_of_vectors(module, "bias", experts, y.width, select, suffix)
    if always := b.option("moe", "always"):
        for role, name in weights.items():
            _join_shared(b, name, role, suffix[1:] or module.split("_")[1], always, (y.width, x.width))
    b.emit("expert_linear", (x, ids), (y,), module + suffix, weights, **subset)


def _join_shared(b: Builder, name: str, role: str, part: str, count: int, shape: tuple[int, int]) -> None:
    """Append the matrices [count, *shape] of shared experts, or their biases, to the stack of routed experts.
    part: "gate", "up" or "down"."""
    layout, whole = b.option("moe", "shared_layout"), f"ffn_{part}_shexp"
    rows, suffix = None, ""
    if part != "down" and layout != "separate":
        whole, rows, suffix = "ffn_gate_up_shexp", _halves(layout, shape[0])[part == "up"], f".{part}"
    shared = b.stack_of_matrices(whole, count, *shape, rows, suffix=suffix) if role == "weight" else \
        b.stack_of_vectors(whole, role, count, shape[0], rows, suffix)
    routed, appended = b.weights[name], b.weights.pop(shared)
    # Parts get explicit rows, because parts of both stacks may differ in size.
    parts = tuple(replace(part, rows=range(stack.shape[0] // len(stack.parts)) if part.rows is None else part.rows)
                  for stack in (routed, appended) for part in stack.parts)
    b.weights[name] = replace(routed, shape=(routed.shape[0] + appended.shape[0], *routed.shape[1:]), parts=parts,
                              groups=routed.groups + appended.groups, types=routed.types + appended.types)


def _shared_expert(b: Builder, x: View, y: View) -> None:
    """Add the shared expert's output to y, multiplied by sigmoid(w . x) if the model has a gate."""
    width, layout = b.option("moe", "shared_width"), b.option("moe", "shared_layout")
    shared = _mlp(b, x, b.view("shared", x.width), width, layout, "_shexp")
    if b.option("moe", "shared_gate"):
        weight = b.linear("ffn_gate_inp_shexp", x, b.view("shared_gate", 1))
        b.emit("gate_rows", (shared, weight), (shared,), "shared_gated")
    b.emit("add", (y, shared), (y,), "shared_add")
