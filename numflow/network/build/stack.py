"""A stack of layers: embeddings, layers, head. Functions are in the order of the data flow."""

import numpy as np

from numflow.errors import SpecError
from numflow.network.blocks.attention import cross_attention, cross_memory, self_attention
from numflow.network.blocks.channels import (
    add_convolution,
    convolution_around,
    gated_recurrence,
    shifted_feed_forward,
    short_convolution,
    times_vector,
    weighted_keys,
)
from numflow.network.blocks.compressed import attention_of_experts, compressed_attention
from numflow.network.blocks.feed_forward import (
    adapter,
    add_late,
    dense_and_early_experts,
    dense_and_experts,
    feed_forward,
)
from numflow.network.blocks.linear_attention import (
    begin_side,
    beside,
    decaying_attention,
    delta_rule,
    selective_scan,
    state_space,
    state_space_beside_attention,
)
from numflow.network.blocks.ngrams import add_ngrams
from numflow.network.blocks.rope import sinusoids
from numflow.network.build.depth import Depth
from numflow.network.build.passes import begin_pass, begin_passes, end_pass, restart
from numflow.network.build.residuals import (
    altup_layer,
    begin_hyper,
    begin_streams,
    end_hyper,
    end_streams,
    hyper_layer,
    per_layer_branch,
    per_layer_inputs,
    tap,
    tap_last,
)
from numflow.network.steps.builder import KEPT, Builder
from numflow.ops import View

# Token mixers by mixer.kind: x [T, D] -> [T, D].
MIXERS = {"attention": self_attention, "conv": short_convolution, "delta": delta_rule, "state_space": state_space,
          "scan": selective_scan, "decay": decaying_attention, "state_space_attention": state_space_beside_attention,
          "gated_recurrence": gated_recurrence, "wkv": weighted_keys, "compressed": compressed_attention,
          "experts": attention_of_experts,
          "linear": lambda b, x: b.linear("attn_output", x, b.view("branch", x.width))}


def decoder_or_encoder(b: Builder) -> None:
    """A model of one stack: entry "main", outputs "hidden" and "logits"."""
    x = embeddings(b)
    if b.option("per_layer", "width"):
        per_layer_inputs(b, x)
    begin_side(b, x)
    streams = begin_streams(b, x) if b.option("altup", "streams") else None
    hyper = begin_hyper(b, x) if b.option("hyper", "streams") else None
    passes = begin_passes(b, x) if b.option("passes", "layers") else None
    depth = Depth(b, x) if b.option("depth", "layers") else None
    first: View | None = None
    for layer in range(b.option("stack", "layers")):
        b.layer = layer
        if b.option("ngrams", "size"):
            if streams is not None:
                raise SpecError(f"{b.where}: ngrams.size: expected 0 with altup.streams", ("ngrams.size",))
            add_ngrams(b, x if hyper is None else hyper, b.option("hyper", "streams") or 1)
        if depth is not None:
            depth.layer()
        elif hyper is not None:
            hyper_layer(b, hyper, x, (("attn", _mixer), ("ffn", feed_forward)))
        elif streams is None:
            if passes is not None:
                begin_pass(b, passes, x)
            first = restart(b, x, first)
            tap(b, x)
            x = transformer_layer(b, x)
            if passes is not None:
                end_pass(b, passes, x)
        else:
            altup_layer(b, streams, x, lambda x: _residual_branch(b, x, "ffn", feed_forward))
    b.layer = None
    if streams is not None:
        end_streams(b, streams, x)
    if hyper is not None:
        end_hyper(b, hyper, x)
    if depth is not None:
        depth.end()
    tap_last(b, x)
    head(b, x)


def encoder_and_decoder(b: Builder) -> None:
    """Entry "encode" (the encoder, and the decoder's keys and values of cross-attention) and entry "main" (the
    decoder)."""
    b.entry, b.stack = "encode", "encoder"
    x = embeddings(b)
    for layer in range(b.option("stack", "layers")):
        b.layer = layer
        x = transformer_layer(b, x)
    b.layer = None
    memory = b.norm("output_norm", x, b.view("memory", x.width)) if b.option("head", "norm") else x
    selected = b.view("selected", x.width, "logits")
    b.stack = "decoder"
    for layer in range(b.option("stack", "layers")):
        b.layer = layer
        cross_memory(b, memory)
    b.layer = None
    b.emit("select_rows", (memory,), (selected,), "select_rows")
    b.outputs["encoder_hidden"] = selected
    b.entry = "main"
    x = embeddings(b)
    for layer in range(b.option("stack", "layers")):
        b.layer = layer
        x = transformer_layer(b, x, cross=not b.option("attention", "merged"))
    b.layer = None
    head(b, x)


def embeddings(b: Builder) -> View:
    """Token, position and type embeddings, norm and projection, as in section embedding. Returns x [T, D]."""
    width, table_width = b.option("stack", "width"), b.option("embedding", "width")
    x = b.view("x", width)
    table = x if table_width == width and not b.has("project_in.weight") else b.view("embedded", table_width)
    b.emit("embed", (), (table,), "token_embd", {"table": token_rows(b, "token_embd", table_width)},
           scale=b.option("embedding", "scale"))
    if b.option("embedding", "dropped_token") >= 0:
        if b.resolved.spec.type != "encoder":
            raise SpecError(f"{b.where}: embedding.dropped_token: expected -1 of a model that reads no whole "
                            "texts", ("embedding.dropped_token",))
        b.emit("gate_rows", (table, b.given(KEPT, 1)), (table,), "token_kept", plain=True)
    if table is x:
        return _add_embeddings(b, x)
    if b.option("embedding", "project") == "last":
        return b.linear("project_in", _add_embeddings(b, table), x)
    if b.option("embedding", "project") == "before_norm":
        b.linear("project_in", _add_embeddings(b, table, normed=False), x)
        return b.norm("token_embd_norm", x, x) if b.option("embedding", "norm") else x
    return _add_embeddings(b, b.linear("project_in", table, x))


def _add_embeddings(b: Builder, x: View, normed: bool = True) -> View:
    """Add positions and token types to x in place; the norm comes after or before. normed: False for no norm."""
    width = x.width
    norm, first = b.option("embedding", "norm") and normed, b.option("embedding", "norm_first")
    if b.option("embedding", "channel_scales"):
        scale, shift = (b.numbers(f"token_embd_{which}", width) for which in ("scale", "shift"))
        b.emit("scale", (x,), (x,), "token_embd_scale", {"weight": b.constant("token_embd_scale", scale),
                                                         "shift": b.constant("token_embd_shift", scale * shift)},
               scale=1.0)
    if norm and first:
        b.norm("token_embd_norm", x, x, eps=b.option("embedding", "norm_eps") or None)
    position, offset = b.option("embedding", "position"), b.option("embedding", "position_offset")
    if position == "learned":
        table = b.matrix("position_embd", None, width)
        b.emit("embed_position", (x,), (x,), "position_embd", {"table": table}, offset=offset)
    elif position == "sinusoidal":
        waves = sinusoids(b.option("stack", "context") + offset, width, b.option("embedding", "sinusoid"),
                          b.option("embedding", "sinusoid_span"))
        b.emit("embed_position", (x,), (x,), "position_embd", {"table": b.constant("sinusoids", waves)}, offset=offset)
    if b.option("embedding", "token_types"):
        b.emit("embed_type", (x,), (x,), "token_types", {"table": _token_types(b, width)})
    if norm and not first:
        b.norm("token_embd_norm", x, x, eps=b.option("embedding", "norm_eps") or None)
    return x


def _token_types(b: Builder, width: int) -> str:
    """The table of token types [n, D]. If the model has tasks, the embedding of task 0 is added to each row."""
    if not b.option("embedding", "task_types"):
        return b.matrix("token_types", None, width)
    tables = [b.names.need(module, "weight", None, b.stack) for module in ("token_types", "task_types")]
    for tensor in tables:
        if len(tensor.shape) != 2 or tensor.columns != width or not tensor.rows:
            raise SpecError(f"{b.checkpoint.path}: tensor {tensor.name!r} is {list(tensor.shape)}, expected rows of "
                            f"{width} columns")
    types, tasks = (tensor.f32().reshape(tensor.shape) for tensor in tables)
    return b.constant("token_types.of_task", types + tasks[:1])


def transformer_layer(b: Builder, x: View, cross: bool = False) -> View:
    """x + mixer(norm(x)), then x + feed_forward(norm(x)), with the norms and variants of the spec. Returns x."""
    if b.option("block", "parallel"):
        return _parallel_layer(b, x)
    around = b.option("conv", "around")
    early = b.option("moe", "enabled") and b.option("moe", "early")
    entry = _copy(b, x, "layer_input") if early or around else None
    if (kind := b.option("mixer", "kind")) != "none":
        _residual_branch(b, x, "attn", MIXERS[kind])
    if cross:
        _residual_branch(b, x, "cross", cross_attention)
    if b.option("ffn", "enabled"):
        _residual_branch(b, x, "ffn", _feed_forward(b, x, entry if early else None))
    add_late(b, x)
    if around and entry is not None:
        convolution_around(b, entry, x)
    if b.option("per_layer", "width"):
        per_layer_branch(b, x, x)
    if b.option("block", "output_scale"):
        b.emit("scale", (x,), (x,), "layer_scale", scale=b.number("layer_scale"))
    return x


def _mixer(b: Builder, x: View) -> View:
    return MIXERS[b.option("mixer", "kind")](b, x)


def _copy(b: Builder, x: View, name: str) -> View:
    """A copy of x, because later steps change x in place."""
    copy = b.view(name, x.width)
    b.emit("copy", (x,), (copy,), name)
    return copy


def _feed_forward(b: Builder, stream: View, entry: View | None):
    """The feed-forward block of this layer. stream: the residual stream before the pre-norm, which some experts read.
    entry: the layer's input, if the router reads it."""
    if b.option("moe", "beside"):
        return lambda b, x: dense_and_experts(b, x, stream) if entry is None else dense_and_early_experts(b, x, entry)
    if entry is not None:
        return lambda b, x: feed_forward(b, x, entry)
    return shifted_feed_forward if b.option("ffn", "token_shift") else feed_forward


def _residual_branch(b: Builder, x: View, name: str, block) -> None:
    """x = x + block(norm(x)) in place, with the norms and factors of section block. name: "attn", "cross" or "ffn"."""
    pre = b.option("block", "pre_norm") and (name != "attn" or b.option("block", "attention_norm"))
    source = beside(b, x) if name == "attn" and b.option("side", "enabled") else x
    h = b.norm(f"{name}_norm", source, b.view("normed", x.width)) if pre else source
    if (rank := b.option("block", "norm_gate_rank")) and pre and b.has(f"{name}_norm_down.weight"):
        low = b.linear(f"{name}_norm_down", h, b.view("norm_low", rank))
        b.emit("act", (low,), (low,), f"{name}_norm_act", kind="silu")
        b.emit("act_mul", (b.linear(f"{name}_norm_up", low, b.view("norm_gate", h.width)), h), (h,),
               f"{name}_norm_gated", kind="sigmoid")
    y = block(b, h)
    if b.option("block", "convolved"):
        add_convolution(b, f"{name}_branch_conv", y, b.option("conv", "scale"))
    if b.option("block", "channel_scales"):
        _scaled_channels(b, x, y, name)
    post = b.option("block", "post_norm") if name != "attn" or b.option("block", "attention_post_norm") else "none"
    before = _copy(b, x, "attn_input") if name == "attn" and b.has("attn_post_norm_2.weight") else None
    post_norm = {"eps": b.option("block", "post_norm_eps") or None,
                 "weights_first": b.option("block", "post_norm_input")}
    if post == "branch":
        b.norm(f"{name}_post_norm", y, y, **post_norm)
    part = "ffn_" if name == "ffn" else ""
    skipped, skip = h if b.option("block", "residual") == "normed" else x, b.option("block", f"{part}skip_scale")
    mixed = _mix_vectors(b, name, y) if b.option("block", "mix") != "none" else {}
    if skipped is h or skip != 1.0 or mixed:
        b.emit("scale", (skipped,), (x,), f"{name}_skip", mixed, scale=skip)
    b.emit("add", (x, y), (x,), f"{name}_add", scale=b.option("block", f"{part}residual_scale"))
    if name == "ffn" and b.option("ffn", "adapter_width"):
        adapter(b, x)
    if post == "residual":
        b.norm(f"{name}_post_norm", x, x, **post_norm)
    if before is not None:
        b.emit("add", (x, before), (x,), "attn_add_2")
        b.norm("attn_post_norm_2", x, x)


def _mix_vectors(b: Builder, name: str, y: View) -> dict[str, str]:
    """Multiply a block's output y by the vector b of block.mix, in place; the weight a of the residual stream."""
    v = b.option("block", "mix_scale") * b.numbers(f"{name}_mix", y.width)
    if b.option("block", "mix") == "gate":
        share = 1 / (1 + np.exp(-v))
        kept = np.sqrt(np.maximum(1 - share ** 2, b.option("block", "mix_floor")))
    else:
        share = np.abs(v)
        kept = 1 - share
    of_y, of_x = (b.constant(f"{b.prefix}{name}_{which}", vector.astype(np.float32))
                  for which, vector in (("mix", share), ("mix_skip", kept)))
    b.emit("scale", (y,), (y,), f"{name}_mix", {"weight": of_y}, scale=1.0)
    return {"weight": of_x}


def _scaled_channels(b: Builder, x: View, y: View, name: str) -> None:
    """Residual stream x and block output y each become (value + shift) * scale, with stored vectors [D]."""
    skip, skip_shift, branch, branch_shift = (
        b.numbers(f"{name}_{which}", x.width) if b.has(f"{name}_{which}.weight") else
        np.full(x.width, which.endswith("scale"), np.float32)
        for which in ("skip_scale", "skip_shift", "branch_scale", "branch_shift"))
    shift = b.constant(f"{b.prefix}{name}_shift", skip * skip_shift + branch * branch_shift)
    b.emit("scale", (x,), (x,), f"{name}_skip_scale", {"weight": b.constant(f"{b.prefix}{name}_skip_scale", skip),
                                                       "shift": shift}, scale=1.0)
    b.emit("scale", (y,), (y,), f"{name}_branch_scale",
           {"weight": b.constant(f"{b.prefix}{name}_branch_scale", branch)}, scale=1.0)


def _parallel_layer(b: Builder, x: View) -> View:
    """Parallel residual: mixer and feed-forward block read the same x, through one norm or one each."""
    h = b.norm("attn_norm", x, b.view("normed", x.width))
    two = b.has("ffn_norm.weight") and b.names.find("ffn_norm", layer=b.layer) is not b.names.find(
        "attn_norm", layer=b.layer)  # a spec may map both names to one tensor
    h_ffn = b.norm("ffn_norm", x, b.view("normed_ffn", x.width)) if two else h
    attended = b.view("attended", x.width)
    y = _mixer(b, h)
    b.emit("copy", (y,), (attended,), "attn_keep")
    y = feed_forward(b, h_ffn)
    scale = b.option("block", "residual_scale")
    b.emit("add", (x, attended), (x,), "attn_add", scale=scale)
    b.emit("add", (x, y), (x,), "ffn_add", scale=scale)
    return x


def head(b: Builder, x: View, norm: str = "output_norm") -> None:
    """Selection of the wanted rows, final norm, output matrix; outputs "hidden" and "logits"."""
    hidden = b.view("hidden", x.width, "logits")
    b.emit("select_rows", (x,), (hidden,), "select_rows")
    if b.option("head", "norm"):
        b.norm(norm, hidden, hidden, eps=b.option("head", "norm_eps") or None,
               offset=b.option("head", "norm_offset"))
    if columns := b.option("head", "hidden_width"):
        hidden = b.linear("hidden_proj", hidden, b.view("hidden_projected", columns, "logits"))
    b.outputs["hidden"] = hidden
    for module in ("pooled_1", "pooled_2"):  # mark as used: applied to the pooled row, outside the network
        b.names.find(module)
    if b.option("head", "scores"):  # computed from one pooled row, outside the network
        for module in ("score_dense", "score_norm", "score_output"):
            for role in ("weight", "bias"):
                b.names.find(module, role)
        return
    if not b.option("head", "enabled"):
        return
    h, table_width = hidden, b.option("embedding", "width")
    if b.option("head", "transform") != "none":
        h = b.linear("head_dense", h, b.view("transformed", b.option("head", "width"), "logits"))
        b.emit("act", (h,), (h,), "head_act", kind=b.option("head", "transform"))
        if b.option("head", "transform_norm"):
            b.norm("head_norm", h, h)
        if b.has("head_dense_2.weight"):
            h = b.linear("head_dense_2", h, b.view("transformed_2", x.width, "logits"))
            b.emit("act", (h,), (h,), "head_act_2", kind=b.option("head", "transform"))
    if table_width != h.width and (h is hidden or b.option("embedding", "project") == "first"):
        h = b.linear("project_out", h, b.view("projected", table_width, "logits"))
    if b.option("head", "scale") != 1.0:
        scaled = b.view("head_scaled", h.width, "logits")
        b.emit("scale", (h,), (scaled,), "head_scale", scale=b.option("head", "scale"))
        h = scaled
    logits_of(b, h)


def token_rows(b: Builder, module: str, columns: int, suffix: str = "") -> str:
    """Declare the embedding table or the output matrix [V, columns]. suffix: ".normalized" for rows of length 1."""
    count = b.option("embedding", "rows")
    if count:
        b.expect_rows(module, count)
    return b.matrix(module, count or None, columns, range(count) if count else None, suffix, bool(suffix))


def logits_of(b: Builder, h: View) -> None:
    """Output matrix and softcap; output "logits"."""
    tied = b.option("head", "tied")
    module = "token_embd" if tied else "output"
    if tied and b.has("output.weight"):
        b.names.find("output")
    suffix = ".normalized" if b.option("head", "normalize") else ""
    weight = token_rows(b, module, h.width, suffix)
    logits = b.view("logits", b.weights[weight].shape[0], "logits")
    weights = {"weight": weight}
    if b.has("output.bias"):
        weights["bias"] = b.vector("output", "bias", logits.width)
    b.emit("linear", (h,), (logits,), "output", weights)
    if factor := b.option("head", "factor"):
        times_vector(b, "output_scale", logits, factor)
    cap = b.option("head", "softcap")
    if cap:
        b.emit("softcap", (logits,), (logits,), "softcap", cap=cap)
    b.outputs["logits"] = logits
