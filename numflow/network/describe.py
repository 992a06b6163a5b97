"""Summaries of a network for `numflow inspect` and `numflow spec check`."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from numflow.formats.checkpoint import Checkpoint
from numflow.network.passes.grouping import Group
from numflow.network.weights.source import is_computed, stored_tensor
from numflow.network.windows import CHUNK, cache_windows, kept_tokens, token_bytes
from numflow.ops import Network, Step

_STATE_ELEMENT = 4  # bytes of an element of a state


@dataclass(frozen=True)
class StepGroup:
    """Equal steps of several layers: label "blk.*.attn_q+attn_k+attn_v", op, shapes, layers, bytes."""

    entry: str
    label: str
    op: str
    shapes: str
    layers: str
    stored_bytes: int


def group_steps(network: Network, checkpoint: Checkpoint) -> list[StepGroup]:
    """Steps in order of first appearance; equal steps of different layers are one group."""
    groups: dict[tuple[str, str, str, str], tuple[list[int], int]] = {}
    for entry, steps in network.entries.items():
        for step in steps:
            label, layer = without_layer(step.label)
            key = (entry, label, step.op, shapes(step, network))
            layers, size = groups.get(key, ([], 0))
            if layer is not None:
                layers.append(layer)
            groups[key] = (
                layers,
                size + sum(stored_bytes(network, checkpoint, name) for name in step.weights.values()),
            )
    return [
        StepGroup(entry, label, op, text, spans(layers), size)
        for (entry, label, op, text), (layers, size) in groups.items()
    ]


def shapes(step: Step, network: Network) -> str:
    """ "[T, 576] -> [T, 960]  Q4_1"; "Q4_1 as F32" where weights are converted at load."""

    def one(view):
        rows = {"tokens": "T", "logits": "R", "routes": "T*S"}[network.buffers[view.buffer].rows]
        return f"[{rows}, {view.width}]"

    text = " ".join(map(one, step.inputs)) + " -> " + " ".join(map(one, step.outputs))
    weights = [network.weights[name] for role, name in step.weights.items() if role in ("weight", "table")]
    types = sorted({kind for weight in weights for kind in weight.types})
    made = " as F32" if types != ["F32"] and any(weight.parts and is_computed(weight) for weight in weights) else ""
    return f"{text.strip()}  {'/'.join(types)}{made}".rstrip()


def stored_bytes(network: Network, checkpoint: Checkpoint, name: str) -> int:
    """Bytes of a weight as the file stores them."""
    weight = network.weights[name]
    total = 0
    for part in weight.parts:
        tensor = stored_tensor(checkpoint, part)
        begin, end = part.columns or (0, tensor.columns)
        if len(weight.shape) == 1 and part.rows is not None:
            total += len(part.rows) * tensor.type.size // tensor.type.block
        else:
            rows = tensor.rows if part.rows is None else len(part.rows)
            total += rows * tensor.type.row_bytes(end - begin)
    return total


def tensor_types(network: Network, checkpoint: Checkpoint) -> Mapping[str, tuple[int, int, int]]:
    """Tensor type -> (tensors, weights, bytes) over the tensors that the network uses."""
    used = {part.tensor: part for weight in network.weights.values() for part in weight.parts}
    table: dict[str, tuple[int, int, int]] = {}
    for part in used.values():
        tensor = stored_tensor(checkpoint, part)
        count, weights, size = table.get(tensor.type.name, (0, 0, 0))
        table[tensor.type.name] = (count + 1, weights + tensor.rows * tensor.columns, size + tensor.nbytes)
    return dict(sorted(table.items(), key=lambda item: -item[1][2]))


def unused(network: Network, checkpoint: Checkpoint) -> Mapping[str, tuple[int, int]]:
    """Tensors that the network does not use: name prefix -> (tensors, bytes), largest first.

    A prefix is the shortest that no used tensor has: "model.vision_tower".
    """
    used = {part.tensor for weight in network.weights.values() for part in weight.parts}
    taken = {".".join(words[:count]) for words in (name.split(".") for name in used) for count in range(len(words))}
    found: dict[str, tuple[int, int]] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in used:
            continue
        words = name.split(".")
        begin = next((begin for count in range(1, len(words))
                      if (begin := ".".join(words[:count])) not in taken), name)
        count, size = found.get(begin, (0, 0))
        found[begin] = count + 1, size + tensor.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def bits_per_weight(network: Network, checkpoint: Checkpoint) -> float:
    """Stored bits per weight of the network's quantised matrices, or of all matrices if none is quantised."""
    used = {part.tensor for weight in network.weights.values() if len(weight.shape) == 2 for part in weight.parts}
    matrices = [checkpoint.tensors[name] for name in used]
    chosen = [tensor for tensor in matrices if tensor.type.block > 1] or matrices
    return 8 * sum(tensor.nbytes for tensor in chosen) / max(1, sum(tensor.rows * tensor.columns for tensor in chosen))


def cache_bytes_per_token(network: Network, element_bytes: int = 2) -> int:
    """KV cache bytes per further token of context, in layers without a window."""
    return math.ceil(sum(token_bytes(network.caches[name], element_bytes)
                         for name, window in cache_windows(network).items() if not window))


def cache_bytes(network: Network, tokens: int, element_bytes: int = 2, chunk: int = CHUNK) -> int:
    """Maximal KV cache bytes of a text of so many tokens. Layers with a window keep the window and the tokens that
    run at
    once: `chunk` of a prompt, 1 of an answer."""
    return math.ceil(sum(token_bytes(network.caches[name], element_bytes) * kept_tokens(window, tokens, chunk=chunk)
                         for name, window in cache_windows(network).items()))


def window_bytes(network: Network, element_bytes: int = 2, chunk: int = CHUNK) -> int:
    """KV cache bytes of layers with a window, for a text longer than the window."""
    return math.ceil(sum(token_bytes(network.caches[name], element_bytes) * kept_tokens(window, 1 << 40, chunk=chunk)
                         for name, window in cache_windows(network).items() if window))


def state_bytes(network: Network) -> int:
    """Bytes of the recurrent states of a sequence."""
    return sum(_STATE_ELEMENT * state.size for state in network.states.values())


def op_counts(network: Network) -> Mapping[str, int]:
    return Counter(step.op for steps in network.entries.values() for step in steps)


def without_layer(label: str) -> tuple[str, int | None]:
    """A step's label with * for its layer index, and the index; None if the step is in no layer."""
    words = label.split(".")
    if "blk" in words:
        index = words.index("blk") + 1
        layer = int(words[index])
        return ".".join([*words[:index], "*", *words[index + 1 :]]), layer
    return label, None


def spans(layers: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


@dataclass(frozen=True)
class GroupFacts:
    """Equal groups of several layers.

    device:  "cpu" or "cuda".
    steps:   their labels.
    operand: kind of the product's operand, or of the one it leaves behind ("int8", "f32", ...); "-" without any.
    """

    device: str
    entry: str
    layers: str
    pattern: str
    steps: tuple[str, ...]
    operand: str


def facts_of(device: str, network: Network, groups: Mapping[str, Sequence[Group]],
             operand: Callable[[str, Group], str]) -> list[GroupFacts]:
    """Groups by entry as rows, in order of first appearance. operand: of an entry and a group."""
    found: dict[tuple[str, str, tuple[str, ...], str], list[int]] = {}
    for entry, several in groups.items():
        for group in several:
            labels = [without_layer(network.entries[entry][i].label) for i in group.steps]
            key = entry, group.pattern, tuple(label for label, _ in labels), operand(entry, group)
            layers = found.setdefault(key, [])
            layers += [layer for _, layer in labels[:1] if layer is not None]
    return [GroupFacts(device, entry, spans(layers), pattern, labels, kind)
            for (entry, pattern, labels, kind), layers in found.items()]
