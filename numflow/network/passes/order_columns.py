"""A pass over a finished network: matrices whose columns are stored permuted.

Such a tensor (`Tensor.ordered`) takes fewer bits with permuted columns. A step `permute` before its linear permutes the
inputs alike. Linears with the same input and order share the step.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from numflow.formats.checkpoint import Checkpoint
from numflow.ops import Buffer, Network, Step, View, Weight


def order_columns(network: Network, checkpoint: Checkpoint) -> Network:
    """The network with `permute` before linears of tensors with permuted columns."""
    if not any(tensor.ordered for tensor in checkpoint.tensors.values()):
        return network
    weights, buffers, entries = dict(network.weights), dict(network.buffers), {}
    uses = Counter(name for steps in network.entries.values() for step in steps for name in step.weights.values())
    for name, steps in network.entries.items():
        made: dict[tuple[View, bytes], View] = {}
        changed: list[Step] = []
        for step in steps:
            alone = step.op == "linear" and uses[step.weights["weight"]] == 1
            changed += _ordered(step, checkpoint, weights, buffers, made) if alone else [step]
            made = {key: view for key, view in made.items() if not any(key[0].overlaps(y) for y in step.outputs)}
        entries[name] = tuple(changed)
    return replace(network, entries=entries, weights=weights, buffers=buffers)


def _ordered(step: Step, checkpoint: Checkpoint, weights: dict[str, Weight], buffers: dict[str, Buffer],
             made: dict[tuple[View, bytes], View]) -> list[Step]:
    """The step, after a `permute` if needed. made: permuted views by (view, order)."""
    weight = weights[step.weights["weight"]]
    if not _is_plain(weight):
        return [step]
    (part,), x = weight.parts, step.inputs[0]
    ordered = checkpoint.tensors[part.tensor].ordered
    if ordered is None or len(ordered.order) != x.width:
        return [step]
    key, before = (x, ordered.order.tobytes()), []
    if key not in made:
        count = sum(view.buffer == x.buffer for view, _ in made)
        old = buffers[x.buffer]
        buffer = f"{x.buffer}.ordered{count or ''}"
        width = max(x.width, buffers[buffer].width if buffer in buffers else 0)
        buffers[buffer] = replace(old, name=buffer, width=width)
        made[key] = View(buffer, 0, x.width)
        name = f"{weight.name}.order"
        weights[name] = Weight(name, (x.width,), constant=ordered.order.astype(np.float32), types=("F32",))
        before = [Step("permute", (x,), (made[key],), {"order": name}, {}, f"{step.label}.order")]
    weights[weight.name] = replace(weight, parts=(replace(part, ordered=True),), types=(ordered.tensor.type.name,))
    return [*before, replace(step, inputs=(made[key],))]


def _is_plain(weight: Weight) -> bool:
    """Whether the weight is plain rows of one tensor."""
    return (len(weight.parts) == 1 and weight.groups == 1 and not weight.add and not weight.normalize_rows
            and weight.parts[0].columns is None
            and not (weight.parts[0].transpose or weight.parts[0].turned))
