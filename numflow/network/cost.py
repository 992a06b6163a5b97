"""Cost model of a step: bytes moved and operations done, from shapes and tensor types alone."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from numflow.formats.types import tensor_type
from numflow.network.weights.source import is_computed
from numflow.network.windows import reach
from numflow.ops import Network, Step, Weight, param, states_of

PRODUCTS = ("linear", "expert_linear", "head_linear")  # ops that multiply rows of activations with a matrix
_ELEMENT = 4  # bytes of an activation
_FLOATS = ("F64", "F32", "F16", "BF16")
_TABLES = ("embed_position", "embed_type")


@dataclass(frozen=True)
class Workload:
    """A batch as integers: `sequences` equal ones, each with `new` tokens after `cached` ones.

    wanted: rows of each sequence whose logits are computed. encoded: tokens that an encoder has read for each.
    """

    sequences: int = 1
    new: int = 1
    cached: int = 0
    wanted: int = 1
    encoded: int = 0

    @property
    def tokens(self) -> int:
        """Rows of the batch."""
        return self.sequences * self.new

    def keys(self, window: int = 0) -> int:
        """Cached keys that are read, each sequence's once."""
        whole = self.cached + self.new
        return self.sequences * (min(whole, window + self.new - 1) if window else whole)

    def pairs(self, causal: bool = True, window: int = 0) -> int:
        """Pairs of a query and a key it sees."""
        if not causal:
            whole = self.cached + self.new
            return self.tokens * (min(whole, 2 * window - 1) if window else whole)
        first, last = self.cached + 1, self.cached + self.new
        if not window or last <= window:
            return self.sequences * (first + last) * self.new // 2
        below = max(0, window - first)  # queries that do not see a whole window
        return self.sequences * ((first + first + below - 1) * below // 2 + (self.new - below) * window)

    def entries(self, every: int, most: int = 0) -> int:
        """Entries of windows of so many tokens that are read, each sequence's once; most: of a query, 0 for all."""
        whole = (self.cached + self.new) // every
        return self.sequences * (min(whole, most * self.new) if most else whole)

    def entry_pairs(self, every: int, most: int = 0) -> int:
        """Pairs of a query and an entry that it sees."""
        return self.sequences * (_ended(self.cached + self.new, every, most) - _ended(self.cached, every, most))


def _ended(tokens: int, every: int, most: int) -> int:
    """Sum over tokens of the windows that have ended with each, or of `most` where there are more."""
    below = min(tokens, most * every - 1) if most else tokens
    whole = below // every
    return every * whole * (whole - 1) // 2 + whole * (below - whole * every + 1) + most * (tokens - below)


@dataclass(frozen=True)
class StepCost:
    """Bytes of weights, of cached keys and values and of states, and of activations that are moved; operations, 2 per
    multiply-add.

    matrix: operations of matrix products, which run at another speed than the rest.
    """

    weights: float = 0.0
    cache: float = 0.0
    activations: float = 0.0
    operations: float = 0.0
    matrix: float = 0.0

    @property
    def bytes(self) -> float:
        """All bytes moved."""
        return self.weights + self.cache + self.activations

    def __add__(self, other: "StepCost") -> "StepCost":
        return StepCost(self.weights + other.weights, self.cache + other.cache, self.activations + other.activations,
                        self.operations + other.operations, self.matrix + other.matrix)


def all_floats(network: Network) -> bool:
    """Whether the file has every weight of the model as plain numbers."""
    if "all_floats" in network.facts:  # of a part, which need not have weights of all types
        return network.facts["all_floats"]
    return all(name in _FLOATS for weight in network.weights.values() for name in weight.types)


def tables(network: Network) -> set[str]:
    """Weights that are looked up by position or by token type, which the CPU keeps as float32."""
    return {step.weights["table"] for steps in network.entries.values() for step in steps if step.op in _TABLES}


def f32_bytes(weight: Weight) -> float:
    """Bytes of a weight as float32 numbers."""
    return 4.0 * math.prod(weight.shape)


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight as executors hold it: matrices in the file's type, all else in float32."""
    rows = 1
    for size in weight.shape[:-1]:
        rows *= size
    columns = weight.shape[-1]
    if len(weight.shape) == 1 or is_computed(weight):
        return rows * columns * _ELEMENT
    return rows * tensor_type(weight.types[0]).row_bytes(columns)


def step_cost(network: Network, step: Step, load: Workload, kv_bytes: float = 2.0,
              weigh: Callable[[Weight], float] = weight_bytes) -> StepCost:
    """Cost of one step under a load.

    kv_bytes: bytes of a cached value. weigh: bytes of a weight.
    """
    rows = _rows(network, step, load)
    moved = sum(view.width * rows[network.buffers[view.buffer].rows] for view in (*step.inputs, *step.outputs))
    weights = {role: network.weights[name] for role, name in step.weights.items()}
    states = sum(network.states[name].size for name in states_of(step).values())  # read and written
    own = StepCost(sum(map(weigh, weights.values())), 2 * states * load.sequences * _ELEMENT, moved * _ELEMENT,
                   4 * moved)
    if step.op in _SPECIAL:
        return _SPECIAL[step.op](network, step, load, rows, weights, own, kv_bytes)
    return own


def _rows(network: Network, step: Step, load: Workload) -> Mapping[str, int]:
    """Rows of the buffers that the step reads and writes."""
    rows = {"tokens": load.tokens, "logits": load.sequences * load.wanted}
    views = (*step.inputs, *step.outputs)
    if step.op == "expert_linear" or any(network.buffers[view.buffer].rows == "routes" for view in views):
        rows["routes"] = load.tokens * max((other.outputs[0].width for steps in network.entries.values()
                                            for other in steps if other.op == "moe_route"), default=1)
    return rows


def _lookup(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    """A row of the table per token; of a part of one, the part of the tokens that is likely to be there."""
    whole = step.params.get("vocabulary") or weights["table"].shape[0]
    return StepCost(own.weights / whole * load.tokens, 0, own.activations, own.operations)


def _linear(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    count = rows[network.buffers[step.outputs[0].buffer].rows]
    operations = 2 * count * weights["weight"].shape[0] * weights["weight"].shape[1]
    return StepCost(own.weights, 0, own.activations, operations, operations)


def _expert_linear(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    """Experts are read that some token chose, here as if it chose at random."""
    matrix, routes = weights["weight"], rows["routes"]
    touched = 1 - (1 - 1 / matrix.groups) ** routes
    operations = 2 * routes * matrix.shape[0] // matrix.groups * matrix.shape[-1]
    return StepCost(own.weights * touched, 0, own.activations, operations, operations)


def _attention(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    cache = network.caches[param(step, "cache")]
    if cache.kind == "cross":
        keys, pairs = load.sequences * load.encoded, load.tokens * load.encoded
    else:
        window = reach(step)
        keys, pairs = load.keys(window), load.pairs(param(step, "causal"), window)
    read = keys * cache.kv_heads * (cache.k_dim + cache.v_dim) * kv_bytes
    if name := param(step, "entries"):
        entries, most = network.caches[name], _top_k(network, step)
        pairs += load.entry_pairs(entries.every, most)
        read += load.entries(entries.every, most) * entries.k_dim * _ELEMENT
    operations = 2 * pairs * param(step, "heads") * (cache.k_dim + cache.value_dim)
    return StepCost(own.weights, read, own.activations, operations, operations)


def _top_k(network: Network, step: Step) -> int:
    """Entries that an index chooses for an attention, 0 for all."""
    return next((param(other, "top_k") for steps in network.entries.values() for other in steps
                 if other.op == "index_select" and set(other.outputs) & set(step.inputs)), 0)


def _index_select(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    """All keys, or entries in float32, are read and multiplied with the queries of all heads."""
    cache = network.caches[param(step, "cache")]
    keys, pairs, size = (load.entries(cache.every), load.entry_pairs(cache.every), _ELEMENT) if cache.every else (
        load.keys(), load.pairs(), kv_bytes)
    return StepCost(0, keys * cache.k_dim * size, own.activations, 2 * pairs * param(step, "heads") * (cache.k_dim + 1))


def _pool(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    """One of so many tokens ends a window, whose rows and those of the windows before are read."""
    numbers = load.tokens * param(step, "series") * network.caches[param(step, "cache")].k_dim
    return StepCost(own.weights, numbers * _ELEMENT, own.activations, 4 * numbers)


def _causal_conv(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    operations = 2 * load.tokens * math.prod(weights["weight"].shape)
    return StepCost(own.weights, own.cache, own.activations, operations)


def _cache_write(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    written, every = sum(view.width for view in step.inputs) * load.tokens, network.caches[param(step, "cache")].every
    stored = written / every * _ELEMENT if every else written * kv_bytes
    return StepCost(0, stored, written * _ELEMENT, own.operations)


def _linear_attention(network, step, load, rows, weights, own, kv_bytes) -> StepCost:
    """With each token every number of a state fades, is added to and asked."""
    size, products = network.states[param(step, "state")].size, 3 if len(step.inputs) == 5 else 2
    return StepCost(own.weights, own.cache, own.activations,
                    (2 * products + 1) * size * load.tokens)


_SPECIAL = {"embed": _lookup, "embed_position": _lookup, "embed_type": _lookup, "linear": _linear,
            "head_linear": _linear, "expert_linear": _expert_linear, "attention": _attention,
            "index_select": _index_select, "pool": _pool, "cache_write": _cache_write, "causal_conv": _causal_conv,
            "linear_attention": _linear_attention}
