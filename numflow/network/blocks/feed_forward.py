"""The feed-forward block: dense, routed to experts, or both."""

from numflow.errors import SpecError
from numflow.network.blocks.experts import mixture
from numflow.network.blocks.mlp import mlp
from numflow.network.steps.builder import Builder
from numflow.ops import View


def feed_forward(b: Builder, x: View, routed_by: View | None = None) -> View:
    """The feed-forward block: x [T, D] -> [T, D]. routed_by: the router's input, if not x."""
    if not b.option("moe", "enabled"):
        return _dense(b, x)
    if not b.option("moe", "late"):
        return mixture(b, x, routed_by)
    mixture(b, x, routed_by, "late")
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
    return mlp(b, x, b.view(name, x.width), b.option("ffn", "width"), b.option("ffn", "layout"))


def dense_and_experts(b: Builder, x: View, stream: View) -> View:
    """A dense block, which reads x, and experts, which read the residual stream through their own norm, as does their
    router. Each output is normalised, then both are added."""
    dense = _dense(b, x, "dense")
    b.norm("ffn_post_norm_dense", dense, dense)
    routed_by = b.norm("ffn_gate_inp_norm", stream, b.view("router_normed", stream.width))
    y = mixture(b, b.norm("ffn_norm_exps", stream, b.view("normed_exps", stream.width)), routed_by)
    b.norm("ffn_post_norm_exps", y, y)
    b.emit("add", (y, dense), (y,), "dense_add")
    return y


def dense_and_early_experts(b: Builder, x: View, entry: View) -> View:
    """A dense block, which reads x, and experts, which read the layer's input `entry` through their own norm."""
    dense = _dense(b, x, "dense")
    early = b.norm("ffn_norm_exps", entry, b.view("normed_exps", entry.width))
    y = mixture(b, early, early)
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
