"""Measures of how well a family fits a checkpoint, if several families' networks build; smaller is better."""

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
_LAYERS = 8  # inspected layers; kinds of layers repeat within this number


def computed(spec: Spec, checkpoint: Checkpoint) -> tuple:
    """The computation of a spec's network in a comparable form; arrays as bytes."""
    from numflow.network import build

    def data(rows: Any) -> Any:
        return rows.tobytes() if isinstance(rows, np.ndarray) else rows

    network = build(spec, checkpoint)
    weights = {name: (replace(weight, parts=(), constant=None), data(weight.constant),
                      [replace(part, rows=data(part.rows)) for part in weight.parts])
               for name, weight in network.weights.items()}
    return network.entries, network.buffers, weights, network.caches, network.states


def strained(network: Network, checkpoint: Checkpoint) -> int:
    """Number of norms whose tensors have an unusual form.

    Usually, a norm per head has weights of one head or a row per head, not one row for all columns, and a layer norm
    has a bias.
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
    """Number of text values (such as the activation) whose absence would change the family's computation.

    read: configuration keys that the network reads.
    """
    if checkpoint.naming != "hf":
        return 0
    whole, count = computed(spec, checkpoint), 0
    for key, value in checkpoint.config.items():
        if isinstance(value, str) and key in read and key not in _NAMES:
            reduced = {name: other for name, other in checkpoint.config.items() if name != key}
            try:
                count += computed(spec, replace(checkpoint, config=reduced)) != whole
            except NumflowError:  # a required key
                continue
    return count


def added_keys(spec: Spec, config: Mapping[str, Any]) -> int:
    """Number of configuration values that the family's own file reads and inherited files do not."""
    within = part_of(spec.section("hf").get("within", []), config)[1]
    before = [keys for path in spec.chain[1:] for keys in _named(own_tables(path))]
    return sum(any(_has(table, key) for key in keys for table in (within, config))
               for keys in _named(own_tables(spec.path)) if keys not in before)


def departures(spec: Spec, checkpoint: Checkpoint) -> int:
    """Number of options that differ from their default without a configuration key."""
    from numflow.network import resolve

    resolved, _ = resolve(spec, checkpoint)
    layers = range(min(resolved.option("stack", "layers"), _LAYERS))
    return sum(any(_departs(resolved, section, key, layer) for layer in layers)
               for section in SECTIONS for key in SECTIONS[section])


def _departs(resolved: Resolved, section: str, key: str, layer: int) -> bool:
    try:
        return resolved.departs(section, key, layer)
    except SpecError:  # an unused option that depends on missing values
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
