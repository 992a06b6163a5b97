"""The router of a mixture of experts: ids and gates of each token's experts."""

import numpy as np

from numflow.errors import SpecError
from numflow.network.steps.builder import Builder
from numflow.ops import View

_ALWAYS_CHOSEN = 1e4  # bias of experts that are always chosen; scores are at most 1


def route(b: Builder, x: View, experts: int, always: int) -> tuple[View, View, View]:
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
