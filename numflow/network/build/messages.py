"""Sums over the blocks of a network with attention over depth, and messages from one pass of a loop to the next."""

from dataclasses import dataclass, field, replace

import numpy as np

from numflow.errors import SpecError
from numflow.network.steps.builder import Builder
from numflow.ops import View

PAST = "loop_blocks"  # buffer of the normalised blocks of the pass before
_READERS = ("attn", "attn_k", "attn_v", "ffn")


@dataclass
class Loop:
    """The loop of section depth.

    Raises:
        SpecError: passes do not consist of whole blocks, or do not fit the number of layers.
    """

    b: Builder
    first: int = field(init=False)
    layers: int = field(init=False)
    passes: int = field(init=False)

    def __post_init__(self):
        b = self.b
        self.first, self.layers = b.option("depth", "loop_first"), b.option("depth", "loop_layers")
        self.passes = b.option("depth", "loop_passes") if self.layers else 1
        size = b.option("depth", "layers")
        if self.layers and (self.first < 1 or self.first % size or self.layers % size
                            or self.first + self.layers * self.passes > b.option("stack", "layers")):
            raise SpecError(f"{b.where}: depth.loop_layers: expected whole blocks of {size} layers, not from the first "
                            f"layer on, found {self.passes} passes of {self.layers} layers from layer {self.first} on",
                            ("depth.loop_first", "depth.loop_layers", "depth.layers"))

    def turn(self, b: Builder) -> int | None:
        """The pass of the current layer, from 0; None outside the loop."""
        behind = self.first + self.layers * self.passes
        if b.layer is None or not self.first <= b.layer < behind:
            return None
        return (b.layer - self.first) // self.layers

    def place(self, b: Builder) -> int:
        """The index of the current layer in its pass."""
        assert b.layer is not None
        return (b.layer - self.first) % self.layers

    def messages(self, b: Builder, width: int) -> dict[str, View]:
        """Messages to the current layer by reader; none in the first pass and outside the loop."""
        turn = self.turn(b)
        if not turn:
            if turn == 0:  # mark as used: one pass reads no messages
                for name in _READERS:
                    for part in ("down", "forget", "gain"):
                        b.names.find(f"{name}_message_{part}", "weight", b.layer, b.stack)
                for module in ("message_queries", "message_kv_queries"):
                    b.names.find(module)
            return {}
        queries, kv = (b.numbers(module, 2 * self.layers * width).reshape(self.layers, 2, width)[self.place(b)]
                       for module in ("message_queries", "message_kv_queries"))
        past = View(PAST, 0, b.buffers[PAST].width)
        return {name: weigh(b, f"{name}_message", query, past, b.view(f"{name}_message", width))
                for name, query in zip(_READERS, (queries[0], *kv, queries[1]))}


def receive(b: Builder, name: str, x: View, message: View) -> None:
    """x = (1 - tanh(forget(z))) * x + tanh(gain(z)) * message, z = down(norm(x), norm(message)), in place."""
    both = b.view("message_both", 2 * x.width)
    for i, view in enumerate((x, message)):
        b.emit("rms_norm", (view,), (View(both.buffer, i * x.width, x.width),), f"{name}_message_norm_{i}",
               eps=b.option("norm", "eps"))
    low = b.linear(f"{name}_message_down", both, b.view("message_low", b.option("depth", "gate_rank")))
    forget, gain = (b.linear(f"{name}_message_{part}", low, b.view(f"message_{part}", x.width))
                    for part in ("forget", "gain"))
    for gate, other in ((forget, x), (gain, message)):
        b.emit("act", (gate,), (gate,), f"{name}_message_act", kind="tanh")
        b.emit("mul", (gate, other), (gate,), f"{name}_message_gated")
    b.emit("add", (x, forget), (x,), f"{name}_message_forget_sum", scale=-1.0)
    b.emit("add", (x, gain), (x,), f"{name}_message_sum")


def copied(b: Builder, x: View, name: str) -> View:
    """x itself if it is the first view of buffer `name`, else a copy of x there."""
    y = b.view(name, x.width)
    if x != y:
        b.emit("copy", (x,), (y,), f"{name}_copy")
    return y


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
