"""A pass over a finished network that merges linears."""

from dataclasses import replace

from numflow.ops import Network, Step, View, Weight


def fuse_linears(network: Network) -> Network:
    """Merge neighbouring linears that read the same view and write neighbouring columns.

    Query, key and value, or gate and up, become one matrix. Rows are only concatenated, so results do not change. Parts
    must have the same stored type, so that nothing is re-quantised.
    """
    weights = dict(network.weights)
    entries = {}
    for name, steps in network.entries.items():
        fused: list[Step] = []
        for step in steps:
            if fused and _fusible(fused[-1], step, weights):
                fused[-1] = _fused(fused[-1], step, weights)
            else:
                fused.append(step)
        entries[name] = tuple(fused)
    used = {w for steps in entries.values() for step in steps for w in step.weights.values()}
    return replace(network, entries=entries, weights={k: w for k, w in weights.items() if k in used})


def _fusible(a: Step, b: Step, weights: dict[str, Weight]) -> bool:
    if (
        a.op != b.op
        or a.op not in ("linear", "expert_linear")
        or a.inputs != b.inputs
        or a.weights.keys() != b.weights.keys()
    ):
        return False
    if any(view.buffer == a.outputs[0].buffer for view in a.inputs):
        return False
    y, z = a.outputs[0], b.outputs[0]
    if z.buffer != y.buffer or z.start != y.start + y.width:
        return False
    first, second = weights[a.weights["weight"]], weights[b.weights["weight"]]
    same_kind = first.groups == second.groups == 1 and not first.normalize_rows and not second.normalize_rows
    return same_kind and len({*first.types, *second.types}) == 1


def _fused(a: Step, b: Step, weights: dict[str, Weight]) -> Step:
    names = {}
    for role in a.weights:
        first, second = weights[a.weights[role]], weights[b.weights[role]]
        name = f"{first.name} + {second.name}"
        shape = (first.shape[0] + second.shape[0], *first.shape[1:])
        weights[name] = Weight(name, shape, first.parts + second.parts, types=first.types + second.types)
        names[role] = name
    y, z = a.outputs[0], b.outputs[0]
    label = f"{a.label}+{b.label.rsplit('.', 1)[-1] if '.blk.' in '.' + b.label else b.label}"
    return replace(a, outputs=(View(y.buffer, y.start, y.width + z.width),), weights=names, label=label)
