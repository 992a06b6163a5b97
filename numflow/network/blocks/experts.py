"""A mixture of experts: products of the experts that the router chose, their weighted sum, and shared experts."""

from dataclasses import replace
from typing import Any

import numpy as np

from numflow.network.blocks.mlp import gate_up_views, gated, halves, mlp
from numflow.network.blocks.router import route
from numflow.network.steps.builder import Builder
from numflow.ops import View

_STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")


def mixture(b: Builder, x: View, routed_by: View | None = None, name: str = "branch") -> View:
    """Mixture of experts: router, gate and up of the chosen experts, down, weighted sum, shared expert. routed_by: the
    router's input, if not x."""
    experts, width = (b.option("moe", key) for key in ("experts", "width"))
    token = x
    through, void = (b.option("moe", key) for key in ("through_experts", "void_experts"))
    if not b.option("moe", "top_k") + b.option("moe", "always") + b.option("moe", "router_width"):
        return _none_chosen(b, x, b.view(name, x.width), experts + b.option("moe", "spare_experts") + through + void)
    scores, ids, gates = route(b, x if routed_by is None else routed_by, experts + through + void,
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
        if b.option("moe", "latent_norm"):
            b.norm("ffn_latent_norm", x, x)
    hidden = _expert_hidden(b, x, ids, experts, width, subset)
    routed = b.view("expert_out", x.width, "routes")
    _expert_linear(b, "ffn_down_exps", hidden, ids, routed, experts, subset)
    if b.option("moe", "out_norm"):
        b.norm("ffn_out_norm_exps", routed, routed, eps=b.option("block", "post_norm_eps") or None,
               weights_first=b.option("block", "post_norm_input"))
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
    for module in ("ffn_gate_inp", "exp_probs_b", "ffn_scale_exps", "ffn_latent_down", "ffn_latent_norm",
                   "ffn_out_norm_exps", "ffn_latent_up", *_STACKS):
        for expert in (None, *range(experts if module in _STACKS else 0)):
            for role in ("weight", "bias"):
                b.names.find(module, role, b.layer, b.stack, expert)
    b.emit("scale", (x,), (y,), "no_experts", scale=0.0)
    if b.option("moe", "shared_width"):
        _shared_expert(b, x, y)
    return y


def _pass_through(b: Builder, x: View, y: View, choice: tuple[View, View, View], through: np.ndarray) -> None:
    """Add x times the gates of the chosen identity experts. through [X]: 1 for identity experts, else 0.

    The gates are summed by an expert product of one row per expert: weight 0, bias `through`.
    """
    (scores, ids, gates), experts = choice, len(through)
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
    gate, up = gate_up_views(b, width, "routes", "expert_gate_up")
    layout = b.option("moe", "layout")
    if layout == "separate":
        _expert_linear(b, "ffn_gate_exps", x, ids, gate, experts, subset)
        _expert_linear(b, "ffn_up_exps", x, ids, up, experts, subset)
    else:
        rows_gate, rows_up = halves(layout, width)
        _expert_linear(b, "ffn_gate_up_exps", x, ids, gate, experts, subset, rows_gate, ".gate")
        _expert_linear(b, "ffn_gate_up_exps", x, ids, up, experts, subset, rows_up, ".up")
    gated(b, gate, up, hidden, "experts_act", b.option("moe", "activation"), b.option("moe", "cut"),
          (b.option("moe", "gate_softcap"), b.option("moe", "up_softcap")))
    return hidden


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
        whole, rows, suffix = "ffn_gate_up_shexp", halves(layout, shape[0])[part == "up"], f".{part}"
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
    shared = mlp(b, x, b.view("shared", x.width), width, layout, "_shexp")
    if b.option("moe", "shared_gate"):
        weight = b.linear("ffn_gate_inp_shexp", x, b.view("shared_gate", 1))
        b.emit("gate_rows", (shared, weight), (shared,), "shared_gated")
    b.emit("add", (y, shared), (y,), "shared_add")
