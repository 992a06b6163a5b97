"""Attention over depth (attention residuals): sums of blocks of layers instead of one residual stream.

The input of a layer's attention and of its feed-forward block is sum_i p_i n_i. n_i are the normalised sums of the
earlier blocks and, last, of the current one; p is the softmax of query . n_i / sqrt(D), with a learned query. A block's
first layer starts a new sum; the embeddings are the first sum.

Layers may run in a loop of several passes. Each pass begins with the sums before the loop. From the second pass on,
each layer reads messages: sums over the blocks that the pass before made, weighed as above, with a query for each
reader.
"""

from numflow.network.blocks.attention import self_attention
from numflow.network.blocks.channels import add_convolution
from numflow.network.blocks.feed_forward import feed_forward
from numflow.network.build.messages import PAST, Loop, copied, receive, weigh
from numflow.network.build.residuals import ONLY, check_layer
from numflow.network.steps.builder import Builder
from numflow.ops import View

# Options of a layer with attention over depth: option -> its only value.
_ONLY: dict[tuple[str, str], object] = {
    **ONLY, ("mixer", "kind"): "attention", ("block", "post_norm"): "none", ("block", "channel_scales"): False,
    ("block", "output_scale"): False, ("block", "norm_gate_rank"): 0, ("moe", "late"): False, ("conv", "around"): 0,
    ("ffn", "adapter_width"): 0, ("side", "enabled"): False, ("per_layer", "width"): 0, ("altup", "streams"): 0,
    ("hyper", "streams"): 0, ("passes", "layers"): 0, ("ngrams", "size"): 0}


class Depth:
    """The sums of a network that is being built. x [T, D]: the current block's sum."""

    def __init__(self, b: Builder, x: View):
        self.b, self.x = b, x
        self.count = self.before = 0  # earlier blocks, and those before the loop
        self.loop = Loop(b)
        size, layers = b.option("depth", "layers"), b.option("stack", "layers")
        layers -= self.loop.layers * (self.loop.passes - 1)
        self.sums = b.view("depth_sums", (-(-layers // size) + 1) * x.width)

    def layer(self) -> None:
        """One layer: attention, then the feed-forward block."""
        b, x = self.b, self.x
        check_layer(b, "depth.layers", _ONLY)
        assert b.layer is not None
        self._begin_pass()
        messages = self.loop.messages(b, x.width)
        first = b.layer % b.option("depth", "layers") == 0
        inputs = self._inputs("attn_depth") if b.layer else [x]
        if messages:
            inputs = [copied(b, view, f"depth_{i}") for i, view in enumerate((inputs * 3)[:3])]
            for name, view in zip(("attn", "attn_k", "attn_v"), inputs):
                receive(b, name, view, messages[name])
        y = self._attention(inputs)
        if first:
            if not b.layer:
                self._normalise(x)
            self.count += 1
            b.emit("copy", (y,), (x,), "depth_begin")
        else:
            b.emit("add", (x, y), (x,), "attn_add")
        (h,) = self._inputs("ffn_depth")
        if messages:
            receive(b, "ffn", h, messages["ffn"])
        y = feed_forward(b, b.norm("ffn_norm", h, b.view("normed", x.width)))
        self._convolve("ffn", y)
        b.emit("add", (x, y), (x,), "ffn_add")

    def end(self) -> None:
        """x = the input of the last norm."""
        (y,) = self._inputs("head_depth")
        self.b.emit("copy", (y,), (self.x,), "depth_end")

    def _begin_pass(self) -> None:
        """Before the first layer of a loop: keep the stream. Before that of a further pass: keep the blocks of the pass
        before, and begin with the stream before the loop again."""
        b, x, loop = self.b, self.x, self.loop
        if (turn := loop.turn(b)) is None or loop.place(b):
            return
        kept = b.view("loop_stream", x.width)
        if turn == 0:
            b.emit("copy", (x,), (kept,), "loop_keep")
            self.before = self.count
            return
        self._normalise(x)  # the blocks of a pass: all behind the stream before the loop, and the last sum
        parts = (self.count - self.before) * x.width
        past = View(self.sums.buffer, (self.before + 1) * x.width, parts)
        b.emit("copy", (past,), (b.view(PAST, parts),), "loop_past")
        b.emit("copy", (kept,), (x,), "loop_again")
        self.count = self.before

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
        tensor = b.names.find(module, "weight", b.layer, b.stack)
        rows = tensor.rows if tensor is not None and tensor.rows in (1, 3) else 1
        queries = b.numbers(module, width * rows).reshape(-1, width)
        return [weigh(b, f"{module}_{i}", query, View(self.sums.buffer, 0, count * width), b.view(f"depth_{i}", width))
                for i, query in enumerate(queries)]
