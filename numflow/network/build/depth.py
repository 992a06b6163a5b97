"""Attention over depth (attention residuals): sums of blocks of layers instead of one residual stream.

The input of a layer's attention and of its feed-forward block is sum_i p_i n_i. n_i are the normalised sums of the
earlier blocks and, last, of the current one; p is the softmax of query . n_i / sqrt(D), with a learned query. A block's
first layer starts a new sum; the embeddings are the first sum.
"""

from dataclasses import replace

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.attention import self_attention
from numflow.network.blocks.channels import add_convolution
from numflow.network.blocks.feed_forward import feed_forward
from numflow.network.steps.builder import Builder
from numflow.ops import View


class Depth:
    """The sums of a network that is being built. x [T, D]: the current block's sum."""

    def __init__(self, b: Builder, x: View):
        self.b, self.x, self.count = b, x, 0  # count: earlier blocks
        size, layers = b.option("depth", "layers"), b.option("stack", "layers")
        self.sums = b.view("depth_sums", (-(-layers // size) + 1) * x.width)

    def layer(self) -> None:
        """One layer: attention, then the feed-forward block."""
        b, x = self.b, self.x
        if b.layer is None or b.option("mixer", "kind") != "attention" or b.option("block", "parallel"):
            raise SpecError(f"{b.where}: depth.layers: expected layers of attention and then a feed-forward block",
                            ("depth.layers",))
        first = b.layer % b.option("depth", "layers") == 0
        y = self._attention(self._inputs("attn_depth") if b.layer else [x])
        if first:
            if not b.layer:
                self._normalise(x)
            self.count += 1
            b.emit("copy", (y,), (x,), "depth_begin")
        else:
            b.emit("add", (x, y), (x,), "attn_add")
        (h,) = self._inputs("ffn_depth")
        y = feed_forward(b, b.norm("ffn_norm", h, b.view("normed", x.width)))
        self._convolve("ffn", y)
        b.emit("add", (x, y), (x,), "ffn_add")

    def end(self) -> None:
        """x = the input of the last norm."""
        (y,) = self._inputs("head_depth")
        self.b.emit("copy", (y,), (self.x,), "depth_end")

    def _attention(self, inputs: list[View]) -> View:
        """Attention of one input, or of the inputs of query, key and value, each with its norm."""
        b, width = self.b, self.x.width
        h = b.norm("attn_norm", inputs[0], b.view("normed", width))
        kv = None
        if len(inputs) > 1 or b.has("attn_k_in_norm.weight"):
            k, v = (b.norm(f"attn_{name}_in_norm" if b.has(f"attn_{name}_in_norm.weight") else "attn_norm", each,
                           b.view(f"normed_{name}", width)) for name, each in zip("kv", (inputs * 3)[1:3]))
            kv = k, v
        y = self_attention(b, h, kv=kv)
        self._convolve("attn", y)
        return y

    def _convolve(self, name: str, y: View) -> None:
        if self.b.option("block", "convolved"):
            add_convolution(self.b, f"{name}_branch_conv", y, self.b.option("conv", "scale"))

    def _normalise(self, x: View) -> None:
        """Write the normalised current sum behind those of earlier blocks."""
        one = View(self.sums.buffer, self.count * x.width, x.width)
        self.b.emit("rms_norm", (x,), (one,), "depth_norm", eps=self.b.option("depth", "eps"))

    def _inputs(self, module: str) -> list[View]:
        """sum_i p_i n_i for each query of a module."""
        b, width = self.b, self.x.width
        self._normalise(self.x)
        count = self.count + 1
        tensor = b.names.need(module, "weight", b.layer, b.stack)
        queries = b.numbers(module, width * (tensor.rows if tensor.rows in (1, 3) else 1)).reshape(-1, width)
        return [weigh(b, f"{module}_{i}", query, View(self.sums.buffer, 0, count * width), b.view(f"depth_{i}", width))
                for i, query in enumerate(queries)]


def weigh(b: Builder, label: str, query: np.ndarray, parts: View, y: View) -> View:
    """y [T, D] = sum_i p_i n_i over the parts n_i [T, D] of `parts`, p the softmax of query . n_i / sqrt(D)."""
    width = len(query)
    count = parts.width // width
    weight = b.constant(f"{b.prefix}{label}", np.tile(query / np.float32(width ** 0.5), (count, 1)))
    b.weights[weight] = replace(b.weights[weight], groups=count)
    scores, order = b.view("depth_scores", count), b.view("depth_order", count)
    b.emit("head_linear", (parts,), (scores,), label, {"weight": weight}, heads=count)
    # A softmax of all scores, in their order: a route to experts that are given.
    shift = b.constant(f"depth_order.{count}", np.arange(count, dtype=np.float32))
    b.emit("scale", (scores,), (order,), f"{label}_order", {"shift": shift}, scale=0.0)
    ids, shares = b.view("depth_ids", count, dtype="i32"), b.view("depth_shares", count)
    b.emit("moe_route", (scores, order), (ids, shares), f"{label}_softmax", {}, score="softmax")
    b.emit("scale", (View(parts.buffer, parts.start, width),), (y,), f"{label}_zero", scale=0.0)
    b.emit("mix", (y, parts, shares), (y,), f"{label}_sum", parts=1)
    return y
