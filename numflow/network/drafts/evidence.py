"""Evidence for one of several families whose networks all build of a checkpoint: smaller numbers fit better."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from numflow.errors import NumflowError, SpecError
from numflow.formats.checkpoint import Checkpoint
from numflow.ops import Network
from numflow.spec.reader import Spec, own_tables
from numflow.spec.resolve import Resolved, part_of
from numflow.spec.schema import SECTIONS

_NAMES = ("architectures", "model_type")
_LAYERS = 8  # that are looked at: families repeat their kinds of layers sooner


def computed(spec: Spec, checkpoint: Checkpoint) -> tuple:
    """All that the network of a spec computes, to be compared; arrays as bytes."""
    from numflow.network import build

    def data(rows: Any) -> Any:
        return rows.tobytes() if isinstance(rows, np.ndarray) else rows

    network = build(spec, checkpoint)
    weights = {name: (replace(weight, parts=(), constant=None), data(weight.constant),
                      [replace(part, rows=data(part.rows)) for part in weight.parts])
               for name, weight in network.weights.items()}
    return network.entries, network.buffers, weights, network.caches, network.states


def strained(network: Network, checkpoint: Checkpoint) -> int:
    """Number of norms whose tensors are not as such norms are stored.

    A norm of each head has a weight for one head or a row for each, not one row for all columns; a layer norm has a
    bias too.
    """
    count = 0
    for entry in network.entries.values():
        for step in entry:
            if step.op not in ("rms_norm", "layer_norm") or "weight" not in step.weights:
                continue
            weight = network.weights[step.weights["weight"]]
            rows = [checkpoint.tensors[part.tensor].shape for part in weight.parts]
            one = len(rows) == 1 and prod(rows[0]) == rows[0][-1]
            count += one and step.params.get("groups", 1) > 1 and weight.shape == (step.outputs[0].width,)
            count += step.op == "layer_norm" and "bias" not in step.weights
    return count


def told(spec: Spec, checkpoint: Checkpoint, read: set[str]) -> int:
    """Number of words (as that of the activation) without which the family would compute something else.

    read: keys of the configuration that its network asks for.
    """
    if checkpoint.naming != "hf":
        return 0
    whole, count = computed(spec, checkpoint), 0
    for key, value in checkpoint.config.items():
        if isinstance(value, str) and key in read and key not in _NAMES:
            less = {name: other for name, other in checkpoint.config.items() if name != key}
            try:
                count += computed(spec, replace(checkpoint, config=less)) != whole
            except NumflowError:  # it says how the model is made, as no default can
                continue
    return count


def added_keys(spec: Spec, config: Mapping[str, Any]) -> int:
    """Number of values which the configuration has, and that the family's file looks for as no file which it extends
    does."""
    within = part_of(spec.section("hf").get("within", []), config)[1]
    before = [keys for path in spec.chain[1:] for keys in _named(own_tables(path))]
    return sum(any(_has(place, key) for key in keys for place in (within, config))
               for keys in _named(own_tables(spec.path)) if keys not in before)


def departures(spec: Spec, checkpoint: Checkpoint) -> int:
    """Number of options by which a family differs from a plain network though no key of the configuration says so."""
    from numflow.network import resolve

    resolved, _ = resolve(spec, checkpoint)
    layers = range(min(resolved.option("stack", "layers"), _LAYERS))
    return sum(any(_departs(resolved, section, key, layer) for layer in layers)
               for section in SECTIONS for key in SECTIONS[section])


def _departs(resolved: Resolved, section: str, key: str, layer: int) -> bool:
    try:
        return resolved.departs(section, key, layer)
    except SpecError:  # an option that this network has no use for, with values that it lacks
        return False


def _has(table: Any, key: str) -> bool:
    for word in key.split("."):
        table = table.get(word) if isinstance(table, Mapping) else None
    return table is not None


def _named(table: Mapping[str, Any]) -> Iterable[list[str]]:
    for key, value in table.items():
        if key == "config" and isinstance(value, (str, list)):
            yield [value] if isinstance(value, str) else value
        elif isinstance(value, Mapping):
            yield from _named(value)
