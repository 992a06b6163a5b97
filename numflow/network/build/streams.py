"""Streams of a network that something drafts by: output "streams", of every row of the batch.

`Builder.taps` says which: None: none; (): the hidden state behind the last norm; else the stream before each of these
layers, side by side.
"""

from numflow.errors import SpecError
from numflow.network.build.builder import Builder
from numflow.ops import View


def tap(b: Builder, x: View) -> None:
    """Keep the stream that enters the layer which is being built, where it is wanted."""
    for place, layer in enumerate(b.taps or ()):
        if layer == b.layer:
            _keep(b, x, place)


def tap_last(b: Builder, x: View) -> None:
    """Keep what leaves the last layer, where it is wanted.

    Raises:
        SpecError: streams of this network cannot be had.
    """
    if b.taps is None:
        return
    if several := [key for key in ("altup", "hyper") if b.option(key, "streams")]:
        raise SpecError(f"{b.where}: nothing can draft by a network of several residual streams ({several[0]}.streams)",
                        (f"{several[0]}.streams",))
    layers = b.option("stack", "layers")
    if wrong := [layer for layer in b.taps if not 0 <= layer <= layers]:
        raise SpecError(f"{b.where}: a draft reads the stream of layer {wrong[0]}: expected 0 .. {layers}")
    if not b.taps:
        kept = b.outputs["streams"] = b.view("streams", x.width)
        if b.option("head", "norm"):
            b.norm("output_norm", x, kept)
        else:
            b.emit("copy", (x,), (kept,), "streams")
    for place, layer in enumerate(b.taps):
        if layer == layers:
            _keep(b, x, place)


def _keep(b: Builder, x: View, place: int) -> None:
    assert b.taps is not None
    b.outputs["streams"] = b.view("streams", len(b.taps) * x.width)
    b.emit("copy", (x,), (View("streams", place * x.width, x.width),), f"stream_{place}")
