"""Layers that run in passes: two streams that passes replace in turn, or a stream that starts again.

Passes (arXiv 2506.21734): a pass reads the sum of two streams and replaces one of them. Passes repeat the same layers.
With passes.restart, the stream before a pass becomes its norm plus the norm of the stream before the first pass.
"""

import numpy as np

from numflow.errors import SpecError
from numflow.network.steps.builder import Builder
from numflow.ops import View


def begin_passes(b: Builder, x: View) -> tuple[View, View]:
    """Two streams [T, D]: the embeddings x, and a stored vector in each row.

    Raises:
        SpecError: the number of layers is no multiple of passes.layers, or the last pass is not of the first stream.
    """
    count, layers = b.option("passes", "layers"), b.option("stack", "layers")
    if not layers or layers % count or not b.resolved.option("passes", "first", layers - 1, b.stack):
        raise SpecError(f"{b.where}: passes.layers: expected passes that make up {layers} layers, the last of them of "
                        f"the first stream, found {count}", ("passes.layers",))
    first, second = b.view("stream_first", x.width), b.view("stream_second", x.width)
    b.emit("copy", (x,), (first,), "stream_first")
    # A layer norm with weight 0 writes its bias.
    weights = {"weight": b.constant("no_weights", np.zeros(x.width, np.float32)),
               "bias": b.vector("pass_start", "weight", x.width, flat=True)}
    b.emit("layer_norm", (x,), (second,), "stream_second", weights, eps=b.option("norm", "eps"))
    return first, second


def begin_pass(b: Builder, streams: tuple[View, View], x: View) -> None:
    """At the first layer of a pass: x = sum of both streams."""
    if b.layer is not None and b.layer % b.option("passes", "layers") == 0:
        b.emit("add", streams, (x,), "pass_in")


def end_pass(b: Builder, streams: tuple[View, View], x: View) -> None:
    """At the last layer of a pass: x = norm(x), which replaces one of the streams."""
    if b.layer is not None and (b.layer + 1) % b.option("passes", "layers") == 0:
        b.norm("pass_norm", x, x)
        b.emit("copy", (x,), (streams[0 if b.option("passes", "first") else 1],), "pass_out")


def restart(b: Builder, x: View, first: View | None) -> View | None:
    """Before a layer of passes.restart: x = norm(x) + first, in place. Returns first, the norm of the stream before the
    first such layer."""
    if not b.option("passes", "restart"):
        return first
    b.norm("pass_norm", x, x)
    if first is None:
        first = b.view("pass_first", x.width)
        b.emit("copy", (x,), (first,), "pass_first")
    b.emit("add", (x, first), (x,), "pass_restart")
    return first
