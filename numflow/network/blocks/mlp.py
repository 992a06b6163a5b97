"""A feed-forward network of one hidden layer, gated or not."""

import math
from statistics import NormalDist
from typing import Any

from numflow.network.blocks.channels import times_vector
from numflow.network.steps.builder import Builder
from numflow.ops import View


def mlp(b: Builder, x: View, y: View, width: int, layout: str, suffix: str = "") -> View:
    """y = down(act(gate(x)) * up(x)), or down(act(up(x))); suffix: "_shexp" for the modules of a shared expert."""
    hidden = b.view("ffn", width)
    if not b.option("ffn", "gated"):
        b.linear(f"ffn_up{suffix}", x, hidden)
        kind = b.option("ffn", "activation")
        b.emit("act", (hidden,), (hidden,), f"ffn_act{suffix}", kind=kind, **(_xielu(b) if kind == "xielu" else {}))
        return _down(b, hidden, y, suffix)
    gate, up = gate_up_views(b, width, "tokens")
    if layout == "separate":
        b.linear(f"ffn_gate{suffix}", x, gate)
        b.linear(f"ffn_up{suffix}", x, up)
    else:
        rows_gate, rows_up = halves(layout, width)
        b.linear(f"ffn_gate_up{suffix}", x, gate, rows_gate, ".gate")
        b.linear(f"ffn_gate_up{suffix}", x, up, rows_up, ".up")
    _times(b, "gate_scale", gate)
    if (factor := b.option("ffn", "in_factor")) and not suffix:
        for view, name in ((gate, "ffn_gate_scale"), (up, "ffn_up_scale")):
            times_vector(b, name, view, factor)
    if (sparsity := b.option("ffn", "sparsity")) and not suffix:
        b.emit("sparsify", (gate,), (gate,), "ffn_sparse", deviations=NormalDist().inv_cdf(sparsity))
    gated(b, gate, up, hidden, f"ffn_act{suffix}", b.option("ffn", "activation"), b.option("ffn", "cut"))
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


def gated(b: Builder, gate: View, up: View, y: View, label: str, kind: str, cut: float,
          caps: tuple[float, float] = (0.0, 0.0)) -> None:
    """y = act(gate) * up, both factors clamped to [-cut, cut] unless cut is 0. caps: moe.gate_softcap, up_softcap."""
    if caps[0]:
        b.emit("softcap", (gate,), (y,), f"{label}_gate_cap", cap=caps[0])
        b.emit("act_mul", (gate, y), (gate,), label, kind="sigmoid")
        if caps[1]:
            b.emit("softcap", (up,), (up,), f"{label}_up_cap", cap=caps[1])
        b.emit("mul", (gate, up), (y,), f"{label}_mul")
        return
    if cut:
        b.emit("act", (gate,), (gate,), label, kind=kind)
        for view, part in ((gate, "gate"), (up, "up")):
            b.emit("clamp", (view,), (view,), f"{label}_cut_{part}", limit=cut)
        b.emit("mul", (gate, up), (y,), f"{label}_mul")
        return
    keys = {"swiglu_clamp": ("limit", "alpha"), "silu_clamp": ("limit",)}.get(kind, ())
    clamp = {key: b.option("ffn", key) for key in keys}
    b.emit("act_mul", (gate, up), (y,), label, kind=kind, **clamp)


def gate_up_views(b: Builder, width: int, rows: str, name: str = "gate_up") -> tuple[View, View]:
    both = b.view(name, 2 * width, rows)
    return View(both.buffer, 0, width), View(both.buffer, width, width)


def halves(layout: str, width: int):
    """Row indices of gate and up in a fused matrix."""
    if layout == "interleaved":
        return range(0, 2 * width, 2), range(1, 2 * width, 2)
    first, second = range(width), range(width, 2 * width)
    return (first, second) if layout == "gate_up" else (second, first)
