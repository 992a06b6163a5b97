"""Per-layer embeddings: a second, wide table of which each layer reads columns of its own.

p [T, layers * P] is made once: (norm of each layer's columns of (per_layer_model x / sqrt(D)) + embeddings of the
tokens) / sqrt(2). Layer i adds norm(per_layer_proj (act(per_layer_gate x) * p[:, columns of i])) to its stream.
"""

import math
from dataclasses import replace

import numpy as np

from numflow.network.build.builder import Builder
from numflow.ops import Part, View


def per_layer_inputs(b: Builder, x: View) -> None:
    """Buffer "per_layer" [T, layers * P] from the tokens and from their embeddings x."""
    layers, width = b.option("stack", "layers"), b.option("per_layer", "width")
    p = b.linear("per_layer_model", x, b.view("per_layer", layers * width))
    b.emit("scale", (p,), (p,), "per_layer_model_scale", scale=x.width ** -0.5)
    b.norm("per_layer_norm", p, p, groups=layers)
    tokens = b.view("per_layer_tokens", layers * width)
    b.emit("embed", (), (tokens,), "per_layer_embd", {"table": _table(b, layers * width)},
           scale=b.option("per_layer", "scale"))
    b.emit("add", (p, tokens), (p,), "per_layer_add")
    b.emit("scale", (p,), (p,), "per_layer_scale", scale=math.sqrt(0.5))


def per_layer_branch(b: Builder, x: View, *streams: View) -> None:
    """Add what this layer makes of its columns and of x to each stream."""
    width = b.option("per_layer", "width")
    gate = b.linear("per_layer_gate", x, b.view("per_layer_gate", width))
    own = View("per_layer", b.layer * width, width)
    b.emit("act_mul", (gate, own), (gate,), "per_layer_act", kind=b.option("ffn", "activation"))
    y = b.linear("per_layer_proj", gate, b.view("branch", x.width))
    b.norm("per_layer_post_norm", y, y)
    for stream in streams:
        b.emit("add", (stream, y), (stream,), "per_layer_sum")


def _table(b: Builder, columns: int) -> str:
    """The table of these embeddings, with as many rows as the model has tokens: where it has fewer, tokens beyond them
    have its first row."""
    name = b.matrix("per_layer_embd", None, columns)
    table, vocabulary = b.weights[name], b.names.need("token_embd").rows
    if missing := max(vocabulary - table.shape[0], 0):
        first = Part(table.parts[0].tensor, np.zeros(missing, np.int64))
        b.weights[name] = replace(table, shape=(vocabulary, columns), parts=(*table.parts, first),
                                  types=table.types * 2)
    return name
