"""Spec + checkpoint -> Network, the computation graph: a flat list of steps on named buffers and weights, plain
data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numflow.errors import SpecError, option
from numflow.formats.checkpoint import Checkpoint
from numflow.network.build.draft import draft_words, eagle_block, further_block
from numflow.network.build.stack import decoder_or_encoder, encoder_and_decoder
from numflow.network.describe import bits_per_weight
from numflow.network.new_spec_keys import check_confirmed
from numflow.network.passes.merge_linears import fuse_linears
from numflow.network.passes.order_columns import order_columns
from numflow.network.passes.select_rows import select_early
from numflow.network.steps.builder import Builder
from numflow.network.steps.checks import check_step, verify
from numflow.network.steps.names import TensorNames
from numflow.network.weights.source import RawMatrix, WeightSource
from numflow.ops import Network
from numflow.spec.detect import detect, on_parts
from numflow.spec.reader import Spec, load_spec
from numflow.spec.resolve import Resolved

__all__ = ["RawMatrix", "WeightSource", "bits_per_weight", "build", "build_draft", "check_step", "choose_spec",
           "further", "resolve", "verify", "with_further"]


def choose_spec(checkpoint: Checkpoint, spec: str | Path | None = None) -> Spec:
    """The given spec (file or name), else the one inside the model file, else the detected one.

    Raises:
        SpecError: the spec cannot be read, or no spec fits the checkpoint or its part (`extends_part`).
    """
    def has_for(candidate: Spec):
        return TensorNames(candidate, checkpoint).has

    if spec is not None:
        return on_parts(load_spec(spec), checkpoint, has_for)
    if "spec" in checkpoint.files:
        return on_parts(load_spec(checkpoint.files["spec"], enclosed=True), checkpoint, has_for)
    return detect(checkpoint, has_for)


def resolve(spec: Spec, checkpoint: Checkpoint) -> tuple[Resolved, TensorNames]:
    """The spec's values for this checkpoint, and its tensor names.

    Raises:
        SpecError: the spec is a draft with unconfirmed keys, or has no tensor names for this file format.
    """
    check_confirmed(spec)
    names = TensorNames(spec, checkpoint)
    file = str(checkpoint.files.get("config", "")) if checkpoint.naming == "hf" else f"the header of {checkpoint.path}"
    return Resolved(spec, checkpoint.config, checkpoint.naming, names.has, file), names


def build(spec: Spec, checkpoint: Checkpoint, fuse: bool = True, taps: Sequence[int] | None = None) -> Network:
    """The network that `spec` describes, with the sizes and tensors of `checkpoint`. Reads no weights.

    fuse: merge neighbouring matrix products and drop unwanted rows early (same results, less work).
    taps: residual streams that a draft reads (build/residuals.py), None without one.

    Raises:
        SpecError: a value or tensor is missing or wrong, or a tensor is unused.
        NetworkError: the steps do not fit together (a mistake in numflow or an impossible spec).
    """
    if spec.type == "draft":
        raise SpecError(f"{checkpoint.path}: {spec.title} drafts for another model and runs beside that one: "
                        f"load the model with {option('draft', str(checkpoint.path))}")
    resolved, names = resolve(spec, checkpoint)
    resolved.check_limits()
    builder = Builder(resolved, names, checkpoint)
    builder.taps = taps
    try:
        (encoder_and_decoder if spec.type == "encoder-decoder" else decoder_or_encoder)(builder)
    except SpecError as error:
        raise builder.with_keys(error) from error
    left = names.left_over(builder.option("stack", "layers"))
    if left:
        shown = ", ".join(map(repr, left[:4])) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise SpecError(f"{checkpoint.path}: spec {spec.name!r} has no place for tensor{'s' * (len(left) > 1)} "
                        f"{shown}; name it in a tensors table or in `ignore`")
    return _finished(builder, _facts(builder, spec), fuse)


def build_draft(spec: Spec, checkpoint: Checkpoint, model: Network, streams: int = 0, fuse: bool = True) -> Network:
    """The draft network for `model`: its MTP block, or, with a spec of type "draft", an EAGLE-3 draft that reads
    `streams` columns of the model's residual streams. Reads no weights.

    Raises:
        SpecError: there is no such block, a tensor is missing or of the wrong shape, or token ids do not fit the model.
    """
    resolved, names = resolve(spec, checkpoint)
    builder = Builder(resolved, names, checkpoint)
    words = None
    if spec.type == "draft":
        eagle_block(builder, streams)
        words = draft_words(builder, model.facts["vocabulary"])
    elif not any(names.candidates("mtp_proj", "weight", 0, "draft")):
        raise SpecError(f"{checkpoint.path}: spec {spec.name!r} names no block that predicts further tokens (mtp_proj)")
    else:
        further_block(builder)
    facts = {**model.facts, "layers": 1, "type": "decoder"} | ({} if words is None else {"words": words})
    return _finished(builder, facts, fuse)


def further(spec: Spec, checkpoint: Checkpoint, model: Network) -> Network | None:
    """The network of the model's MTP block, with fuse=False; None if the checkpoint has none."""
    if spec.type != "decoder":
        return None
    names = TensorNames(spec, checkpoint)
    layers = model.facts["layers"]
    if not all(names.has(f"{module}.weight", layers, "draft") for module in ("mtp_proj", "mtp_norm")):
        return None
    return build_draft(spec, checkpoint, model, fuse=False)


def with_further(spec: Spec, checkpoint: Checkpoint, model: Network) -> Network:
    """The network of a model, built with fuse=False, with the steps and weights of its MTP block as entry "further".
    For code that inspects tensors only: caches and buffers of the block are left out."""
    block = further(spec, checkpoint, model)
    if block is None:
        return model
    return replace(model, entries={**model.entries, "further": block.entries["main"]},
                   weights={**block.weights, **model.weights})


def _finished(builder: Builder, facts: Mapping[str, Any], fuse: bool) -> Network:
    network = builder.network(builder.resolved.spec.name, facts)
    if fuse:
        network = select_early(fuse_linears(order_columns(network, builder.checkpoint)))
    verify(network)
    return network


def _facts(b: Builder, spec: Spec) -> Mapping[str, Any]:
    """Facts of the model for the engine, such as vocabulary, layers and context."""
    stack = "decoder" if spec.type == "encoder-decoder" else ""
    tables = {step.label.rpartition(".")[2]: b.weights[step.weights["table"]].shape[0]
              for step in b.entries["main"] if "table" in step.weights}
    facts = {"type": spec.type, "vocabulary": tables["token_embd"],
             **{key: b.resolved.option("stack", key, None, stack) for key in ("layers", "width", "context")}}
    if b.resolved.option("head", "scores", None, stack):
        facts["labels"] = b.names.need("score_output").rows
    if in_turns := {part.tensor for weight in b.weights.values() if b.names.in_turns(weight.name)
                    for part in weight.parts}:
        facts["in_turns"] = tuple(sorted(in_turns))
    if (dropped := b.resolved.option("embedding", "dropped_token", None, stack)) >= 0:
        facts["dropped"] = dropped, b.resolved.option("embedding", "dropped_keep", None, stack)
    if stack:
        start, forced = (b.resolved.option("generation", key) for key in ("decoder_start", "forced_bos"))
        facts["decoder_start_token"] = start if start >= 0 else None
        facts["forced_bos_token"] = forced if forced >= 0 else None
    # Dynamically scaled frequencies reach original context * factor by default, and further on request.
    stretched = [step for step in b.entries["main"] if step.op == "rope_angles" and "stretch" in step.params]
    if stretched:
        facts["context"] = max(facts["context"], *(int(step.params["border"] * step.params["stretch"])
                                                   for step in stretched))
        if not any(step.op in ("index_select", "block_select") for step in b.entries["main"]):  # bits of all positions
            facts["stretches"] = True
    if b.resolved.option("embedding", "position", None, stack) == "learned":
        offset = b.resolved.option("embedding", "position_offset", None, stack)
        facts["context"] = min(facts["context"], tables["position_embd"] - offset)
    return facts
