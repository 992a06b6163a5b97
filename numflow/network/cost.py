"""Cost model of a step: bytes moved and operations, from shapes and tensor types alone."""

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
    """The shape of a batch: `sequences` equal sequences, each with `new` tokens after `cached` ones.

    wanted: rows per sequence whose logits are computed. encoded: encoder tokens per sequence.
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
        """Cached keys that are read, once per sequence."""
        whole = self.cached + self.new
        return self.sequences * (min(whole, window + self.new - 1) if window else whole)

    def pairs(self, causal: bool = True, window: int = 0) -> int:
        """Pairs of a query and a visible key."""
        if not causal:
            whole = self.cached + self.new
            return self.tokens * (min(whole, 2 * window - 1) if window else whole)
        first, last = self.cached + 1, self.cached + self.new
        if not window or last <= window:
            return self.sequences * (first + last) * self.new // 2
        below = max(0, window - first)  # queries that see less than a whole window
        return self.sequences * ((first + first + below - 1) * below // 2 + (self.new - below) * window)

    def entries(self, every: int, most: int = 0) -> int:
        """Entries (one per `every` tokens) that are read, once per sequence. most: limit per query, 0 for none."""
        whole = (self.cached + self.new) // every
        return self.sequences * (min(whole, most * self.new) if most else whole)

    def entry_pairs(self, every: int, most: int = 0) -> int:
        """Pairs of a query and a visible entry."""
        return self.sequences * (_ended(self.cached + self.new, every, most) - _ended(self.cached, every, most))


def _ended(tokens: int, every: int, most: int) -> int:
    """Sum over tokens of min(complete windows at the token, most); most 0: no limit."""
    below = min(tokens, most * every - 1) if most else tokens
    whole = below // every
    return every * whole * (whole - 1) // 2 + whole * (below - whole * every + 1) + most * (tokens - below)


@dataclass(frozen=True)
class StepCost:
    """Bytes moved of weights, of KV caches and states, and of activations; operations, 2 per multiply-add.

    matrix: the operations in matrix products, which run at another rate.
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
    """Whether all stored weights of the model are of float types."""
    if "all_floats" in network.facts:  # recorded for parts of a model, which may lack some types
        return network.facts["all_floats"]
    return all(name in _FLOATS for weight in network.weights.values() for name in weight.types)


def tables(network: Network) -> set[str]:
    """Tables of positions and token types, which the CPU keeps as float32."""
    return {step.weights["table"] for steps in network.entries.values() for step in steps if step.op in _TABLES}


def f32_bytes(weight: Weight) -> float:
    """Bytes of a weight in float32."""
    return 4.0 * math.prod(weight.shape)


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight in executors: matrices in the stored type, others in float32."""
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
    basic = StepCost(sum(map(weigh, weights.values())), 2 * states * load.sequences * _ELEMENT, moved * _ELEMENT,
                   4 * moved)
    if step.op in _SPECIAL:
        return _SPECIAL[step.op](network, step, load, rows, weights, basic, kv_bytes)
    return basic


def _rows(network: Network, step: Step, load: Workload) -> Mapping[str, int]:
    """Rows of the buffers that the step reads and writes."""
    rows = {"tokens": load.tokens, "logits": load.sequences * load.wanted}
    views = (*step.inputs, *step.outputs)
    if step.op == "expert_linear" or any(network.buffers[view.buffer].rows == "routes" for view in views):
        rows["routes"] = load.tokens * max((other.outputs[0].width for steps in network.entries.values()
                                            for other in steps if other.op == "moe_route"), default=1)
    return rows


def _lookup(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    """One table row per token, or several; with a part of the table, the expected fraction of the rows."""
    whole = step.params.get("vocabulary") or weights["table"].shape[0]
    count = step.inputs[0].width if step.op == "embed_ids" else 1
    return StepCost(basic.weights / whole * load.tokens * count, 0, basic.activations, basic.operations)


def _linear(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    count = rows[network.buffers[step.outputs[0].buffer].rows]
    operations = 2 * count * weights["weight"].shape[0] * weights["weight"].shape[1]
    return StepCost(basic.weights, 0, basic.activations, operations, operations)


def _expert_linear(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    """Expected bytes if every token chooses its experts at random."""
    matrix, routes = weights["weight"], rows["routes"]
    touched = 1 - (1 - 1 / matrix.groups) ** routes
    operations = 2 * routes * matrix.shape[0] // matrix.groups * matrix.shape[-1]
    return StepCost(basic.weights * touched, 0, basic.activations, operations, operations)


def _attention(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    cache = network.caches[param(step, "cache")]
    if cache.kind == "cross":
        keys, pairs = load.sequences * load.encoded, load.tokens * load.encoded
    else:
        window = reach(step)
        if block := param(step, "block"):
            window = min(window or block * _top_k(network, step), block * _top_k(network, step))
        keys, pairs = load.keys(window), load.pairs(param(step, "causal"), window)
    if param(step, "cross"):
        keys, pairs = keys + load.sequences * load.encoded, pairs + load.tokens * load.encoded
    read = keys * cache.kv_heads * (cache.k_dim + cache.v_dim) * kv_bytes
    if name := param(step, "entries"):
        entries, most = network.caches[name], _top_k(network, step)
        pairs += load.entry_pairs(entries.every, most)
        read += load.entries(entries.every, most) * entries.k_dim * _ELEMENT
    operations = 2 * pairs * param(step, "heads") * (cache.k_dim + cache.value_dim)
    return StepCost(basic.weights, read, basic.activations, operations, operations)


def _top_k(network: Network, step: Step) -> int:
    """Number of entries or blocks that an index selects for an attention, 0 for all."""
    return next((param(other, "top_k") for steps in network.entries.values() for other in steps
                 if other.op in ("index_select", "block_select") and set(other.outputs) & set(step.inputs)), 0)


def _index_select(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    """All keys (or float32 entries) are read and multiplied with the queries of all heads."""
    cache = network.caches[param(step, "cache")]
    keys, pairs, size = (load.entries(cache.every), load.entry_pairs(cache.every), _ELEMENT) if cache.every else (
        load.keys(), load.pairs(), kv_bytes)
    return StepCost(0, keys * cache.k_dim * size, basic.activations,
                    2 * pairs * param(step, "heads") * (cache.k_dim + 1))


def _pool(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    """One of `every` tokens ends a window; the rows of `series` windows are read then."""
    values = load.tokens * param(step, "series") * network.caches[param(step, "cache")].k_dim
    return StepCost(basic.weights, values * _ELEMENT, basic.activations, 4 * values)


def _causal_conv(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    operations = 2 * load.tokens * math.prod(weights["weight"].shape)
    return StepCost(basic.weights, basic.cache, basic.activations, operations)


def _cache_write(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    written, every = sum(view.width for view in step.inputs) * load.tokens, network.caches[param(step, "cache")].every
    stored = written / every * _ELEMENT if every else written * kv_bytes
    return StepCost(0, stored, written * _ELEMENT, basic.operations)


def _linear_attention(network, step, load, rows, weights, basic, kv_bytes) -> StepCost:
    """Per token, every element of the state decays, is updated and is multiplied with the query."""
    size, products = network.states[param(step, "state")].size, 3 if len(step.inputs) == 5 else 2
    return StepCost(basic.weights, basic.cache, basic.activations,
                    (2 * products + 1) * size * load.tokens)


_SPECIAL = {"embed": _lookup, "embed_ids": _lookup, "embed_position": _lookup, "embed_type": _lookup, "linear": _linear,
            "head_linear": _linear, "expert_linear": _expert_linear, "attention": _attention,
            "index_select": _index_select, "block_select": _index_select, "pool": _pool, "cache_write": _cache_write,
            "causal_conv": _causal_conv,
            "linear_attention": _linear_attention}
