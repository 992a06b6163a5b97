"""Blocks that several layers share (Network.facts["in_turns"]): an adapter has a module for each of these layers.

Only the first layer of a block has tensors in the checkpoint. The same tensor has another name in each layer.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from numflow.formats.adapter import Adapter
from numflow.formats.checkpoint import Checkpoint
from numflow.ops import Network, Step, Weight

_BLOCK = re.compile(r"\bblk\.(\d+)\.")  # in labels and in names of weights
_LAYER = re.compile(r"\.(\d+)\.")  # in names of tensors


def _layer_of(name: str) -> str | None:
    """The layer in a label or in a weight's name."""
    found = _BLOCK.search(name)
    return found[1] if found else None


def name_in_layer(tensor: str, step: Step, network: Network) -> str:
    """An adapter's name for a tensor in the layer of a step: another one if several layers share the tensor."""
    layer = _layer_of(step.label)
    if layer is None or tensor not in network.facts.get("in_turns", ()):
        return tensor
    return _LAYER.sub(f".{layer}.", tensor, count=1)


def name_of_use(weight: Weight, step: Step, network: Network) -> str:
    """A weight's name, with the step's label if several layers share the weight."""
    shared = any(part.tensor in network.facts.get("in_turns", ()) for part in weight.parts)
    return f"{step.label} {weight.name}" if shared and _layer_of(weight.name) != _layer_of(step.label) else weight.name


def with_copies(adapter: Adapter, checkpoint: Checkpoint, built: Network,
                shortened: Callable[[str], str]) -> Checkpoint:
    """The checkpoint with the tensors of shared modules that the adapter changes under their names in every layer; the
    same object if there are none."""
    given = (*adapter.added, *adapter.offsets, *adapter.replaced, *adapter.multiplied, *adapter.repeated)
    changed = {_module(shortened(name)) for name in given}
    found = dict(checkpoint.tensors)
    for tensor, name in _names(built):
        if {_module(shortened(tensor)), _module(shortened(name))} & changed:
            found.setdefault(name, replace(checkpoint.tensors[tensor], name=name))
    return replace(checkpoint, tensors=found) if len(found) > len(checkpoint.tensors) else checkpoint


def _names(built: Network) -> Iterator[tuple[str, str]]:
    """Tensor, and its name in each layer that uses it."""
    for step in (step for steps in built.entries.values() for step in steps):
        for weight in step.weights.values():
            for part in built.weights[weight].parts:
                yield part.tensor, name_in_layer(part.tensor, step, built)


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]
