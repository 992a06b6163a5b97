"""The feed-forward block: dense, gated or not, or routed to experts."""

from numflow.errors import SpecError
from numflow.network.build.builder import Builder
from numflow.ops import View


def feed_forward(b: Builder, x: View) -> View:
    """x [T, D] -> [T, D]."""
    return _experts(b, x) if b.option("moe", "enabled") else _dense(b, x)


def _dense(b: Builder, x: View) -> View:
    return _mlp(b, x, b.view("branch", x.width), b.option("ffn", "width"), b.option("ffn", "layout"))


def _mlp(b: Builder, x: View, y: View, width: int, layout: str, suffix: str = "") -> View:
    """y = down(act(gate(x)) * up(x)), or down(act(up(x))); suffix: "_shexp" for the modules of a shared expert."""
    hidden = b.view("ffn", width)
    if not b.option("ffn", "gated"):
        b.linear(f"ffn_up{suffix}", x, hidden)
        b.emit("act", (hidden,), (hidden,), f"ffn_act{suffix}", kind=b.option("ffn", "activation"))
        return b.linear(f"ffn_down{suffix}", hidden, y)
    gate, up = _gate_up_views(b, width, "tokens")
    if layout == "separate":
        b.linear(f"ffn_gate{suffix}", x, gate)
        b.linear(f"ffn_up{suffix}", x, up)
    else:
        rows_gate, rows_up = _halves(layout, width)
        b.linear(f"ffn_gate_up{suffix}", x, gate, rows_gate, ".gate")
        b.linear(f"ffn_gate_up{suffix}", x, up, rows_up, ".up")
    _gated(b, gate, up, hidden, f"ffn_act{suffix}")
    return b.linear(f"ffn_down{suffix}", hidden, y)


def _gated(b: Builder, gate: View, up: View, y: View, label: str) -> None:
    kind = b.option("ffn", "activation")
    clamp = {key: b.option("ffn", key) for key in ("limit", "alpha")} if kind == "swiglu_clamp" else {}
    b.emit("act_mul", (gate, up), (y,), label, kind=kind, **clamp)


def _gate_up_views(b: Builder, width: int, rows: str, name: str = "gate_up") -> tuple[View, View]:
    both = b.view(name, 2 * width, rows)
    return View(both.buffer, 0, width), View(both.buffer, width, width)


def _halves(layout: str, width: int):
    """Rows of gate and of up in a fused matrix."""
    if layout == "interleaved":
        return range(0, 2 * width, 2), range(1, 2 * width, 2)
    first, second = range(width), range(width, 2 * width)
    return (first, second) if layout == "gate_up" else (second, first)


def _experts(b: Builder, x: View) -> View:
    """Mixture of experts: route, gate and up of the chosen experts, down, weighted sum, shared expert."""
    experts, top_k, width = (b.option("moe", key) for key in ("experts", "top_k", "width"))
    rules = {key: b.option("moe", key) for key in ("score", "normalize", "scale", "groups", "top_groups", "group_best")}
    _check_rules(b.where, experts, top_k, **rules)
    scores = b.linear("ffn_gate_inp", x, b.view("router", experts))
    ids, gates = b.view("route_ids", top_k, dtype="i32"), b.view("route_gates", top_k)
    bias = {"bias": b.vector("exp_probs_b", "weight" if b.has("exp_probs_b.weight") else "bias", experts)} \
        if b.has("exp_probs_b.weight") or b.has("exp_probs_b.bias") else {}
    b.emit("moe_route", (scores,), (ids, gates), "route", bias, **rules)
    gate, up = _gate_up_views(b, width, "routes", "expert_gate_up")
    layout = b.option("moe", "layout")
    if layout == "separate":
        _expert_linear(b, "ffn_gate_exps", x, ids, gate, experts)
        _expert_linear(b, "ffn_up_exps", x, ids, up, experts)
    else:
        rows_gate, rows_up = _halves(layout, width)
        _expert_linear(b, "ffn_gate_up_exps", x, ids, gate, experts, rows_gate, ".gate")
        _expert_linear(b, "ffn_gate_up_exps", x, ids, up, experts, rows_up, ".up")
    hidden = b.view("expert_hidden", width, "routes")
    _gated(b, gate, up, hidden, "experts_act")
    routed = b.view("expert_out", x.width, "routes")
    _expert_linear(b, "ffn_down_exps", hidden, ids, routed, experts)
    y = b.view("branch", x.width)
    b.emit("expert_combine", (routed, gates), (y,), "experts_sum")
    if b.option("moe", "shared_width"):
        _shared_expert(b, x, y)
    return y


def _check_rules(where: str, experts: int, top_k: int, groups: int, top_groups: int, group_best: int, **_) -> None:
    """That so many experts, groups and choices go together."""
    if experts < 1 or experts % groups:
        raise SpecError(f"{where}: moe.experts: expected a multiple of moe.groups {groups}, found {experts}")
    if top_groups > groups > 1:
        raise SpecError(f"{where}: moe.top_groups: expected up to moe.groups {groups}, found {top_groups}")
    if groups > 1 and group_best > experts // groups:
        raise SpecError(f"{where}: moe.group_best: expected up to the {experts // groups} experts of a group, found "
                        f"{group_best}")
    most = experts // groups * min(groups, top_groups)
    if not 1 <= top_k <= most:
        raise SpecError(f"{where}: moe.top_k: expected 1 to {most}, the experts that may be chosen, found {top_k}")


def _expert_linear(b: Builder, module: str, x: View, ids: View, y: View, experts: int, select=None,
                   suffix: str = "") -> None:
    transposed = b.option("moe", "transposed")
    weights = {"weight": b.stack_of_matrices(module, experts, y.width, x.width, select, transposed, suffix)}
    if b.has(f"{module}.bias"):
        weights["bias"] = b.stack_of_vectors(module, "bias", experts, y.width, select, suffix)
    b.emit("expert_linear", (x, ids), (y,), module + suffix, weights)


def _shared_expert(b: Builder, x: View, y: View) -> None:
    """Add the expert that every token uses to y, gated by sigmoid(w . x) where the model does so."""
    width, layout = b.option("moe", "shared_width"), b.option("moe", "shared_layout")
    shared = _mlp(b, x, b.view("shared", x.width), width, layout, "_shexp")
    if b.option("moe", "shared_gate"):
        weight = b.linear("ffn_gate_inp_shexp", x, b.view("shared_gate", 1))
        b.emit("gate_rows", (shared, weight), (shared,), "shared_gated")
    b.emit("add", (y, shared), (y,), "shared_add")
