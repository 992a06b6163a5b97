"""Discovery of draft blocks, which read the model's residual streams: the model's own (MTP), or of another checkpoint
(EAGLE-3)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from numflow import formats, network, registry
from numflow.formats.checkpoint import Checkpoint
from numflow.network.steps.names import TensorNames
from numflow.ops import Network
from numflow.spec.reader import Spec

OWN = "mtp"  # name that requests the model's own block


@dataclass(frozen=True)
class Block:
    """Spec and checkpoint of a draft block. taps: indices of the streams that it reads (network/build/residuals.py)."""

    spec: Spec
    checkpoint: Checkpoint
    taps: Sequence[int]


def find_block(draft: str | Path | None, spec: Spec, checkpoint: Checkpoint, offline: bool,
               progress: bool) -> Block | None:
    """Find the draft block that `draft` names, for the model of a spec and checkpoint. None: `draft` is a draft model
    or None.

    Raises:
        as numflow.load: the block cannot be found or read.
    """
    if draft is None or not isinstance(draft, str | Path):
        return None
    if str(draft) == OWN:
        return Block(spec, checkpoint, ())
    token_ids = registry.token_ids(draft, offline)
    if token_ids is not None and token_ids != network.build(spec, checkpoint).facts["vocabulary"]:
        return None  # a draft with another vocabulary is refused later, before it is fetched
    found = formats.open_checkpoint(registry.resolve(draft, offline=offline, progress=progress))
    chosen = network.choose_spec(found)
    if chosen.type != "draft":
        return None
    values, _ = network.resolve(chosen, found)
    layers = values.option("eagle", "layers")
    if layers is None:
        count = network.resolve(spec, checkpoint)[0].option("stack", "layers")
        layers = [2, count // 2, count - 3]
    offset = 1 if values.option("eagle", "leaving") else 0
    return Block(chosen, found, tuple(int(layer) + offset for layer in layers))


def build_block(block: Block, built: Network, spec: Spec, checkpoint: Checkpoint) -> tuple[Network, Checkpoint]:
    """Network of a draft block for the model `built` of a spec and checkpoint, and the checkpoint with its weights.

    Raises:
        SpecError: there is no such block, or it does not fit the model.
    """
    source = block.checkpoint if block.spec is spec else _with_embeddings_of(block, spec, checkpoint)
    source = replace(source, tensors={**source.tensors, **checkpoint.tensors}) if block.spec is spec else source
    return network.build_draft(block.spec, source, built, built.outputs["streams"].width), source


def _with_embeddings_of(block: Block, spec: Spec, checkpoint: Checkpoint) -> Checkpoint:
    """Checkpoint of the block, completed by the model's embedding table and output matrix."""
    tensors = dict(block.checkpoint.tensors)
    ours, theirs = TensorNames(spec, checkpoint), TensorNames(block.spec, block.checkpoint)
    for module in ("token_embd", "output"):
        found = ours.find(module) or (ours.find("token_embd") if module == "output" else None)
        if not theirs.has(f"{module}.weight") and found is not None:
            name = next(theirs.candidates(module, "weight", None, ""))
            tensors[name] = replace(found, name=name)
    return replace(block.checkpoint, tensors=tensors)

