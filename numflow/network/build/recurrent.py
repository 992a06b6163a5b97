"""Blocks whose steps keep a state of each sequence: convolutions over the last tokens."""

from numflow.network.build.builder import Builder
from numflow.ops import CONV_KINDS, View


def short_convolution(b: Builder, x: View) -> View:
    """out(after * conv(before * x')), where (before, after, x') = in(x) (arXiv 2511.23404). Returns [T, D]."""
    width = x.width
    whole = b.view("conv_in", 3 * width)
    parts = [View(whole.buffer, at * width, width) for at in range(3)]
    for at, suffix in enumerate((".before", ".after", ".x")):
        b.linear("conv_in", x, parts[at], range(at * width, (at + 1) * width), suffix)
    before, after, inner = parts
    b.emit("mul", (before, inner), (inner,), "conv_before")
    y = convolution(b, "conv", inner, b.view("conv", width))
    b.emit("mul", (after, y), (y,), "conv_after")
    return b.linear("conv_out", y, b.view("branch", width))


def convolution(b: Builder, module: str, x: View, y: View, kind: str = "none", weight: str = "") -> View:
    """Causal depthwise convolution of x [T, C] with the taps [C, K] of a module, and its bias where the file has one.

    kind: the activation behind it, or "none". y: another view than x. weight: the taps, if not those of the module.
    """
    taps = b.option("conv", "taps")
    weights = {"weight": weight or b.matrix(module, x.width, taps)}
    if b.has(f"{module}.bias"):
        weights["bias"] = b.vector(module, "bias", x.width)
    within = kind if kind in CONV_KINDS else "none"
    b.emit("causal_conv", (x,), (y,), module, weights, state=b.state(module, taps - 1, x.width, axis=1), kind=within)
    if within != kind:
        b.emit("act", (y,), (y,), f"{module}_act", kind=kind)
    return y
