"""Hyper-connections (arXiv 2409.19606): several residual streams in place of one. A block reads a sum of them, and what
it finds is added to each, by gates that are read off all of them.
"""

from collections.abc import Callable, Iterable

import numpy as np

from numflow.network.build.builder import Builder
from numflow.ops import View


def begin_hyper(b: Builder, x: View) -> View:
    """Streams [T, S * D], each of them the embeddings x."""
    count = b.option("hyper", "streams")
    streams = b.view("streams", count * x.width)
    for i in range(count):
        b.emit("copy", (x,), (View(streams.buffer, i * x.width, x.width),), f"hyper_{i}")
    return streams


def hyper_layer(b: Builder, streams: View, x: View, blocks: Iterable[tuple[str, Callable]]) -> None:
    """One layer on all streams; x [T, D] is room for what a block reads. blocks: "attn" and "ffn" with their blocks."""
    count = b.option("hyper", "streams")
    for name, block in blocks:
        gates = _gates(b, f"hyper_{name}", streams, 2)
        _read(b, f"hyper_{name}", streams, View(gates.buffer, 0, count), x)
        y = block(b, b.norm(f"{name}_norm", x, b.view("normed", x.width)))
        back = View(gates.buffer, count, count)
        if (magnitude := b.option("hyper", "magnitude")) != 1.0:
            b.emit("scale", (back,), (back,), f"hyper_{name}_magnitude", scale=magnitude)
        b.emit("mix", (streams, y, back), (streams,), f"hyper_{name}_write", parts=count, plus=b.option("hyper", "eps"))


def end_hyper(b: Builder, streams: View, x: View) -> None:
    """x = a sum of the streams by gates of its own."""
    _read(b, "hyper_head", streams, _gates(b, "hyper_head", streams, 1), x)


def _read(b: Builder, label: str, streams: View, gates: View, x: View) -> None:
    """x = the sum of the streams, each times its gate and eps."""
    b.emit("scale", (View(streams.buffer, 0, x.width),), (x,), f"{label}_zero", scale=0.0)
    b.emit("mix", (x, streams, gates), (x,), f"{label}_read", parts=1, plus=b.option("hyper", "eps"))


def _gates(b: Builder, module: str, streams: View, parts: int) -> View:
    """sigmoid(scale * (W norm(streams)) + base) [T, parts * S], for each part and stream; each part has a scale."""
    width = parts * b.option("hyper", "streams")
    normed = b.view("streams_normed", streams.width)
    b.emit("rms_norm", (streams,), (normed,), f"{module}_norm", eps=b.option("norm", "eps"))
    mixed = b.linear(module, normed, b.view("hyper_mixed", width))
    scales = np.repeat(b.numbers(f"{module}_scale", parts), width // parts)
    factors = b.constant(f"{b.prefix}{module}_factors", np.diag(scales))
    gates = b.view("hyper_gates", width)
    b.emit("linear", (mixed,), (gates,), f"{module}_scaled",
           {"weight": factors, "bias": b.vector(f"{module}_base", "weight", width)})
    b.emit("act", (gates,), (gates,), f"{module}_act", kind="sigmoid")
    return gates
