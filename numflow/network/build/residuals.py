"""Several residual streams, per-layer embeddings, and streams as an output.

Alternating updates (AltUp, arXiv 2301.13310): a layer computes one stream. It predicts the other streams before, and
corrects them after, with coefficients that a router computes from a stream. Attention may have a learned low-rank
residual beside it (LAuReL, arXiv 2411.07501).

Hyper-connections (arXiv 2409.19606): a block reads a gated sum of all streams, and its output is added to each stream
by further gates. Gates are computed from all streams. The streams may also be mixed by a doubly stochastic matrix,
whose rows and columns sum to 1 (arXiv 2512.24880). With a rank, a block reads the mean of the normalised streams, each
column times a gate of its own, from two matrices of that rank.

Per-layer embeddings: p [T, layers * P] is computed once, (norm per layer of (per_layer_model x / sqrt(D)) + embeddings
of the tokens from a second table) / sqrt(2). Layer i adds norm(per_layer_proj (act(per_layer_gate x) * p[:, columns of
i])) to its stream. Without the table, p is the norm alone.

A draft may read a network's residual streams: output "streams", one row per token of the batch. `Builder.taps` lists
them. None: no output; (): the hidden state behind the last norm; else the stream before each of these layers, side by
side.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.attention import self_attention
from numflow.network.steps.builder import Builder
from numflow.ops import Part, View

_LEAST = 1e-5  # lower limit of a stream's mean square, where its RMS is matched to another stream's

# Options of a layer that several streams do not support: option -> its only value.
ONLY = {("block", "parallel"): False, ("block", "pre_norm"): True, ("block", "attention_norm"): True,
         ("block", "residual"): "plain", ("block", "residual_scale"): 1.0, ("block", "ffn_residual_scale"): 1.0,
         ("block", "mix"): "none", ("passes", "restart"): False,
         ("ffn", "enabled"): True, ("ffn", "token_shift"): False, ("moe", "beside"): False, ("moe", "early"): False}
_ONLY_ALTUP = {**ONLY, ("mixer", "kind"): "attention"}
_ONLY_HYPER = {**ONLY, ("block", "post_norm"): "none", ("block", "output_scale"): False, ("per_layer", "width"): 0,
               ("altup", "streams"): 0}


def begin_streams(b: Builder, x: View) -> View:
    """Streams [T, S * D]: the embeddings x, and projections of x with the RMS of x."""
    streams = b.view("streams", _count(b) * x.width)
    b.emit("copy", (x,), (_one(streams, x.width, 0),), "altup_first")
    if _count(b) == 1:
        return streams
    others = _others(streams, x.width)
    name = b.stack_of_matrices("altup_proj", _count(b) - 1, x.width, x.width)
    b.weights[name] = replace(b.weights[name], groups=1)  # one linear: all matrices read x
    b.emit("linear", (x,), (others,), "altup_proj", {"weight": name})
    b.emit("match_rms", (others, x), (others,), "altup_size", least=_LEAST)
    return streams


def altup_layer(b: Builder, streams: View, x: View, feed_forward: Callable[[View], None]) -> None:
    """One layer on all streams. x [T, D]: buffer of the computed stream, to which `feed_forward` adds."""
    check_layer(b, "altup.streams", _ONLY_ALTUP)
    active, count = b.option("altup", "active"), _count(b)
    predicted = b.view("predicted", streams.width)
    gates = b.linear("altup_predict", _modalities(b, _one(streams, x.width, active)), b.view("altup_gates", count ** 2))
    b.emit("mix", (streams, streams, gates), (predicted,), "altup_predicted", parts=count)
    before = _one(predicted, x.width, active)
    _attention(b, before, x)
    feed_forward(x)
    gates = b.linear("altup_correct", _modalities(b, x), b.view("altup_gates", count))
    change = b.view("altup_change", x.width)
    b.emit("add", (x, before), (change,), "altup_change", scale=-1.0)
    b.emit("mix", (predicted, change, gates), (streams,), "altup_corrected", parts=count, plus=1.0)
    if b.option("per_layer", "width"):
        first = _one(streams, x.width, active)
        if not b.option("altup", "scale"):
            b.names.find("altup_scale", "weight", b.layer, b.stack)  # mark as used: some files have it without need
        else:
            scaled = b.view("altup_scaled", x.width)
            b.emit("scale", (first,), (scaled,), "altup_scale", {"weight": b.vector("altup_scale", "weight", x.width)},
                   scale=1.0)
            first = scaled
        per_layer_branch(b, first, *(_one(streams, x.width, i) for i in range(1, count)))


def end_streams(b: Builder, streams: View, x: View) -> None:
    """x = mean of the first stream and of projections of the others, with the RMS of the first."""
    first, count = _one(streams, x.width, 0), _count(b)
    if count == 1:
        b.emit("copy", (first,), (x,), "altup_first")
        return
    others = b.view("predicted", (count - 1) * x.width)
    name = b.stack_of_matrices("altup_unembd", count - 1, x.width, x.width)
    b.emit("head_linear", (_others(streams, x.width),), (others,), "altup_unembd", {"weight": name}, heads=count - 1)
    b.emit("match_rms", (others, first), (others,), "altup_size", least=_LEAST)
    b.emit("copy", (first,), (x,), "altup_first")
    for i in range(count - 1):
        b.emit("add", (x, _one(others, x.width, i)), (x,), "altup_sum")
    b.emit("scale", (x,), (x,), "altup_mean", scale=1 / count)


def check_layer(b: Builder, because: str, only: dict[tuple[str, str], object]) -> None:
    """Check that options of the current layer have their only values beside the option `because`.

    Raises:
        SpecError: one has another value.
    """
    if b.option("mixer", "kind") == "none":
        only = {("mixer", "kind"): "attention", **only}
    for (of, key), value in only.items():
        if of == "moe" and not b.option("moe", "enabled"):
            continue
        if (found := b.option(of, key)) != value:
            raise SpecError(f"{b.where}: {of}.{key}: expected {value!r} with {because}, found {found!r}",
                            (f"{of}.{key}", because))


def _count(b: Builder) -> int:
    count, active = b.option("altup", "streams"), b.option("altup", "active")
    if active >= count:
        raise SpecError(f"{b.where}: altup.streams: expected more than altup.active {active}, found {count}",
                        ("altup.streams", "altup.active"))
    return count


def _one(streams: View, width: int, index: int) -> View:
    return View(streams.buffer, streams.start + index * width, width)


def _others(streams: View, width: int) -> View:
    return View(streams.buffer, streams.start + width, streams.width - width)


def _modalities(b: Builder, x: View) -> View:
    """tanh(router(norm(x)) / D) [T, S]."""
    normed = b.norm("altup_router_norm", x, b.view("altup_normed", x.width))
    y = b.linear("altup_router", normed, b.view("altup_modalities", _count(b)))
    b.emit("scale", (y,), (y,), "altup_router_scale", scale=1 / x.width)
    b.emit("act", (y,), (y,), "altup_router_act", kind="tanh")
    return y


def _attention(b: Builder, before: View, x: View) -> None:
    """x = before + attention, or with a learned residual of low rank (before + attention + residual) / sqrt(2)."""
    h = b.norm("attn_norm", before, b.view("normed", x.width))
    rank = b.option("altup", "laurel_rank")
    if rank:
        learned = b.linear("laurel_r", b.linear("laurel_l", h, b.view("laurel_low", rank)), b.view("laurel", x.width))
        b.norm("laurel_post_norm", learned, learned)
        b.emit("add", (learned, h), (learned,), "laurel_add")
    y = self_attention(b, h)
    b.norm("attn_post_norm", y, y)
    b.emit("add", (before, y), (x,), "attn_add")
    if rank:
        b.emit("add", (x, learned), (x,), "laurel_sum")
        b.emit("scale", (x,), (x,), "laurel_scale", scale=math.sqrt(0.5))


def begin_hyper(b: Builder, x: View) -> View:
    """Streams [T, S * D], each a copy of the embeddings x."""
    count = b.option("hyper", "streams")
    streams = b.view("streams", count * x.width)
    for i in range(count):
        b.emit("copy", (x,), (View(streams.buffer, i * x.width, x.width),), f"hyper_{i}")
    return streams


def hyper_layer(b: Builder, streams: View, x: View, blocks: Iterable[tuple[str, Callable]]) -> None:
    """One layer on all streams. x [T, D]: buffer of a block's input. blocks: ("attn", block), ("ffn", block)."""
    check_layer(b, "hyper.streams", _ONLY_HYPER)
    count, rank = b.option("hyper", "streams"), b.option("hyper", "rank")
    if rank and b.option("hyper", "balance"):
        raise SpecError(f"{b.where}: hyper.balance: expected 0 with hyper.rank", ("hyper.balance", "hyper.rank"))
    for name, block in blocks:
        base, write, h = (_read_columns if rank else _read_streams)(b, f"hyper_{name}", streams, x)
        y = block(b, h if rank else b.norm(f"{name}_norm", h, b.view("normed", x.width)))
        if (magnitude := b.option("hyper", "magnitude")) != 1.0:
            b.emit("scale", (write,), (write,), f"hyper_{name}_magnitude", scale=magnitude)
        b.emit("mix", (base, y, write), (streams,), f"hyper_{name}_write", parts=count,
               plus=b.option("hyper", "write_eps"))


def end_hyper(b: Builder, streams: View, x: View) -> None:
    """x = gated sum of the streams, with gates of the head; or their mean."""
    count = b.option("hyper", "streams")
    if b.option("hyper", "head") == "mean":
        _mean(b, "hyper_head", streams, x)
    elif b.option("hyper", "rank"):
        _mean(b, "hyper_head", _gated_columns(b, "hyper_head", streams)[0], x)
    else:
        gates = _gates(b, "hyper_head", streams, (count,))
        b.emit("act", (gates,), (gates,), "hyper_head_act", kind="sigmoid")
        _read(b, "hyper_head", streams, gates, x)


def _read_streams(b: Builder, module: str, streams: View, x: View) -> tuple[View, View, View]:
    """The streams that a block's output is added to, the gates of that [T, S], and the block's input: x, a sum of the
    streams with a gate for each."""
    count, times = b.option("hyper", "streams"), b.option("hyper", "balance")
    gates = _gates(b, module, streams, (count, count, count ** 2) if times else (count, count))
    read_write = View(gates.buffer, 0, 2 * count)
    b.emit("act", (read_write,), (read_write,), f"{module}_act", kind="sigmoid")
    _read(b, module, streams, View(gates.buffer, 0, count), x)
    base = _mixed(b, module, streams, View(gates.buffer, 2 * count, count ** 2)) if times else streams
    return base, View(gates.buffer, count, count), x


def _read_columns(b: Builder, module: str, streams: View, x: View) -> tuple[View, View, View]:
    """The same, where x is the mean of the normalised streams with a gate for each column."""
    gated, normed = _gated_columns(b, module, streams)
    count = b.option("hyper", "streams")
    mixed = b.linear(f"{module}_write", normed, b.view("hyper_mixed", count))
    write = b.view("hyper_gates", count)  # a product with a constant, as in _gates: the matrix is not quantised
    b.emit("linear", (mixed,), (write,), f"{module}_write_scaled",
           {"weight": b.constant(f"hyper_write_factors.{count}", np.eye(count, dtype=np.float32) / count)})
    b.emit("act", (write,), (write,), f"{module}_write_act", kind="sigmoid")
    _mean(b, module, gated, x)
    return streams, write, x


def _gated_columns(b: Builder, module: str, streams: View) -> tuple[View, View]:
    """sigmoid(up(silu(down(normed) / S))) * normed, and normed, the normalised streams: [T, S * D] each."""
    count = b.option("hyper", "streams")
    normed = b.norm(f"{module}_norm", streams, b.view("streams_normed", streams.width), groups=count)
    low = b.linear(f"{module}_down", normed, b.view("hyper_low", b.option("hyper", "rank")))
    b.emit("scale", (low,), (low,), f"{module}_down_scale", scale=1 / count)
    b.emit("act", (low,), (low,), f"{module}_down_act", kind="silu")
    gates = b.linear(f"{module}_up", low, b.view("hyper_columns", streams.width))
    b.emit("act_mul", (gates, normed), (gates,), f"{module}_gated", kind="sigmoid")
    return gates, normed


def _mean(b: Builder, label: str, streams: View, x: View) -> None:
    """x = mean of the streams."""
    count = streams.width // x.width
    b.emit("scale", (_one(streams, x.width, 0),), (x,), f"{label}_first", scale=1 / count)
    for i in range(1, count):
        b.emit("add", (x, _one(streams, x.width, i)), (x,), f"{label}_{i}", scale=1 / count)


def _read(b: Builder, label: str, streams: View, gates: View, x: View) -> None:
    """x = sum of the streams, each times (its gate + eps)."""
    b.emit("scale", (View(streams.buffer, 0, x.width),), (x,), f"{label}_zero", scale=0.0)
    b.emit("mix", (x, streams, gates), (x,), f"{label}_read", parts=1, plus=b.option("hyper", "eps"))


def _mixed(b: Builder, label: str, streams: View, scores: View) -> View:
    """Streams mixed by the doubly stochastic matrix computed from scores [T, S * S]."""
    count, y = b.option("hyper", "streams"), b.view("hyper_streams", streams.width)
    matrix = b.view("hyper_matrix", scores.width)
    b.emit("balance", (scores,), (matrix,), f"{label}_balance", times=b.option("hyper", "balance"),
           eps=b.option("hyper", "eps"))
    b.emit("scale", (streams,), (y,), f"{label}_nothing", scale=0.0)
    b.emit("mix", (y, streams, matrix), (y,), f"{label}_mix", parts=count)
    return y


def _gates(b: Builder, module: str, streams: View, parts: tuple[int, ...]) -> View:
    """scale * (W norm(streams)) + base: [T, sum of parts], one scale per part."""
    width = sum(parts)
    normed = b.view("streams_normed", streams.width)
    b.emit("rms_norm", (streams,), (normed,), f"{module}_norm", eps=b.option("norm", "eps"))
    mixed = b.linear(module, normed, b.view("hyper_mixed", width))
    scales = np.repeat(b.numbers(f"{module}_scale", len(parts)), parts)
    factors = b.constant(f"{b.prefix}{module}_factors", np.diag(scales))
    gates = b.view("hyper_gates", width)
    b.emit("linear", (mixed,), (gates,), f"{module}_scaled",
           {"weight": factors, "bias": b.vector(f"{module}_base", "weight", width)})
    return gates


def tap(b: Builder, x: View) -> None:
    """Copy the residual stream that enters the current layer to output "streams", if `taps` lists the layer."""
    for index, layer in enumerate(b.taps or ()):
        if layer == b.layer:
            _keep(b, x, index)


def tap_last(b: Builder, x: View) -> None:
    """Copy the residual stream behind the last layer to output "streams", if `taps` lists it.

    Raises:
        SpecError: the network has several residual streams, or `taps` lists no layer of it.
    """
    if b.taps is None:
        return
    several = [f"{key}.streams" for key in ("altup", "hyper") if b.option(key, "streams")]
    if several := several + ["depth.layers"] * bool(b.option("depth", "layers")):
        raise SpecError(f"{b.where}: nothing can draft by a network of several residual streams ({several[0]})",
                        (several[0],))
    layers = b.option("stack", "layers")
    if wrong := [layer for layer in b.taps if not 0 <= layer <= layers]:
        raise SpecError(f"{b.where}: a draft reads the stream of layer {wrong[0]}: expected 0 .. {layers}")
    if not b.taps:
        stream = b.outputs["streams"] = b.view("streams", x.width)
        if b.option("head", "norm"):
            b.norm("output_norm", x, stream)
        else:
            b.emit("copy", (x,), (stream,), "streams")
    for index, layer in enumerate(b.taps):
        if layer == layers:
            _keep(b, x, index)


def _keep(b: Builder, x: View, index: int) -> None:
    assert b.taps is not None
    b.outputs["streams"] = b.view("streams", len(b.taps) * x.width)
    b.emit("copy", (x,), (View("streams", index * x.width, x.width),), f"stream_{index}")


def per_layer_inputs(b: Builder, x: View) -> None:
    """Buffer "per_layer" [T, layers * P], from token ids and token embeddings x."""
    layers, width = b.option("stack", "layers"), b.option("per_layer", "width")
    p = b.linear("per_layer_model", x, b.view("per_layer", layers * width))
    b.emit("scale", (p,), (p,), "per_layer_model_scale", scale=x.width ** -0.5)
    b.norm("per_layer_norm", p, p, groups=layers)
    if not b.option("per_layer", "tokens"):
        return
    tokens = b.view("per_layer_tokens", layers * width)
    b.emit("embed", (), (tokens,), "per_layer_embd", {"table": _per_layer_table(b, layers * width)},
           scale=b.option("per_layer", "scale"))
    b.emit("add", (p, tokens), (p,), "per_layer_add")
    b.emit("scale", (p,), (p,), "per_layer_scale", scale=math.sqrt(0.5))


def per_layer_branch(b: Builder, x: View, *streams: View) -> None:
    """Add norm(per_layer_proj (act(per_layer_gate x) * columns of this layer)) to each stream."""
    width = b.option("per_layer", "width")
    gate = b.linear("per_layer_gate", x, b.view("per_layer_gate", width))
    columns = View("per_layer", b.layer * width, width)
    b.emit("act_mul", (gate, columns), (gate,), "per_layer_act", kind=b.option("ffn", "activation"))
    y = b.linear("per_layer_proj", gate, b.view("branch", x.width))
    b.norm("per_layer_post_norm", y, y)
    for stream in streams:
        b.emit("add", (stream, y), (stream,), "per_layer_sum")


def _per_layer_table(b: Builder, columns: int) -> str:
    """The table of per-layer embeddings with one row per token id. Ids beyond the stored rows get the first row."""
    name = b.matrix("per_layer_embd", None, columns)
    table, vocabulary = b.weights[name], b.names.need("token_embd").rows
    if missing := max(vocabulary - table.shape[0], 0):
        first = Part(table.parts[0].tensor, np.zeros(missing, np.int64))
        b.weights[name] = replace(table, shape=(vocabulary, columns), parts=(*table.parts, first),
                                  types=table.types * 2)
    return name
