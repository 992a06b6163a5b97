"""Blocks that draft by a model's streams, found: the model's own (MTP), or of another checkpoint (EAGLE-3)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from numflow import formats, network, registry
from numflow.formats.checkpoint import Checkpoint
from numflow.network.build.names import TensorNames
from numflow.ops import Network
from numflow.spec.reader import Spec

OWN = "mtp"  # the name by which a model's own block is asked for


@dataclass(frozen=True)
class Block:
    """Spec and checkpoint of a block. taps: streams of the model that it reads (network/build/residuals.py)."""

    spec: Spec
    checkpoint: Checkpoint
    taps: Sequence[int]


def find_block(draft: str | Path | None, spec: Spec, checkpoint: Checkpoint, offline: bool,
               progress: bool) -> Block | None:
    """The block that `draft` names, for the model of a spec and checkpoint; None: a draft model of its own, or none.

    Raises:
        as of numflow.load: it cannot be had or read.
    """
    if draft is None or not isinstance(draft, str | Path):
        return None
    if str(draft) == OWN:
        return Block(spec, checkpoint, ())
    known = registry.token_ids(draft, offline)
    if known is not None and known != network.build(spec, checkpoint).facts["vocabulary"]:
        return None  # a model with other words is refused before it is fetched
    found = formats.open_checkpoint(registry.resolve(draft, offline=offline, progress=progress))
    chosen = network.choose_spec(found)
    if chosen.type != "draft":
        return None
    values, _ = network.resolve(chosen, found)
    layers = values.option("eagle", "layers")
    if layers is None:
        count = network.resolve(spec, checkpoint)[0].option("stack", "layers")
        layers = [2, count // 2, count - 3]
    behind = 1 if values.option("eagle", "leaving") else 0
    return Block(chosen, found, tuple(int(layer) + behind for layer in layers))


def build_block(block: Block, built: Network, spec: Spec, checkpoint: Checkpoint) -> tuple[Network, Checkpoint]:
    """Network of a block that drafts for `built`, of a spec and checkpoint, and where its weights are read.

    Raises:
        SpecError: there is no such block, or it does not fit the model.
    """
    own = block.checkpoint if block.spec is spec else _with_words_of(block, spec, checkpoint)
    own = replace(own, tensors={**own.tensors, **checkpoint.tensors}) if block.spec is spec else own
    return network.build_draft(block.spec, own, built, built.outputs["streams"].width), own


def _with_words_of(block: Block, spec: Spec, checkpoint: Checkpoint) -> Checkpoint:
    """The block's checkpoint, with the model's table of words and output matrix where it has none."""
    tensors = dict(block.checkpoint.tensors)
    ours, theirs = TensorNames(spec, checkpoint), TensorNames(block.spec, block.checkpoint)
    for module in ("token_embd", "output"):
        found = ours.find(module) or (ours.find("token_embd") if module == "output" else None)
        if not theirs.has(f"{module}.weight") and found is not None:
            name = next(theirs.candidates(module, "weight", None, ""))
            tensors[name] = replace(found, name=name)
    return replace(block.checkpoint, tensors=tensors)

