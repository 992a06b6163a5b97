"""A block whose state is one number for each channel (arXiv 2402.19427)."""

from numflow.network.build.builder import Builder
from numflow.network.build.recurrent import convolution
from numflow.ops import View


def gated_recurrence(b: Builder, x: View) -> View:
    """out(h * gelu(gate(x))), h the gated recurrence of a convolution of in(x). Returns [T, D]."""
    width, blocks = b.option("recurrent", "heads") * b.option("recurrent", "value_dim"), b.option("recurrent", "heads")
    size = width // blocks
    gate = b.linear("lru_gate", x, b.view("recurrent_gate", width))
    inner = convolution(b, "ssm_conv1d", b.linear("lru_in", x, b.view("lru_in", width)), b.view("lru_conv", width))
    both = b.view("lru_gates", 2 * width)
    parts = [View(both.buffer, start, width) for start in (0, width)]
    weights = {"rate": b.vector("lru_rate", "weight", width)}
    for view, name in zip(parts, ("entry", "fade")):
        # A matrix for each block of columns, stored [blocks, inputs, outputs]
        matrix = b.head_matrices(f"lru_{name}", blocks, size, range(size), size, "", turned=True)
        b.emit("head_linear", (inner,), (view,), f"lru_{name}", {"weight": matrix}, heads=blocks)
        weights[f"{name}_bias"] = b.vector(f"lru_{name}_bias", "weight", width, flat=True)
    y = b.view("recurrent", width)
    b.emit("gated_recurrence", (inner, *parts), (y,), "lru", weights, state=b.state("lru", width))
    b.emit("act_mul", (gate, y), (y,), "gated", kind="gelu_tanh")
    return b.linear("ssm_out", y, b.view("branch", x.width))
