"""The op set: what a step of a network may be, and the plain data a network is made of.

Everything that runs a model (`reference`, `cpu`, `cuda`) implements exactly the rows of `OPS`; everything that
builds or cuts a model (`network`, `partition`) emits exactly these rows. Letters for shapes: T rows of the batch
(one per token), R rows whose logits are wanted, D width, H query heads, G key/value heads, E head size,
V vocabulary, X experts, S routed experts per token, N output rows and K input columns of a matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numflow.errors import NetworkError, did_you_mean

# How many rows a buffer has in one run of a program.
ROWS = {
    "tokens": "T, one per token of the batch",
    "logits": "R, one per row of Batch.logit_rows",
    "routes": "T * S, one per (token, chosen expert), token-major",
}

ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh", "swiglu_clamp")


@dataclass(frozen=True)
class Buffer:
    """Scratch memory of a network: `rows` is a key of ROWS, `width` columns of `dtype` ("f32" or "i32")."""

    name: str
    rows: str
    width: int
    dtype: str = "f32"


@dataclass(frozen=True)
class View:
    """Columns [start, start + width) of a buffer; the unit that steps read and write."""

    buffer: str
    start: int
    width: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.start + self.width}]"


@dataclass(frozen=True)
class Part:
    """Rows of one checkpoint tensor, in order.

    tensor:    name in the checkpoint.
    rows:      row indices (int64 array or range) after leading dimensions are flattened, None for all.
    transpose: the file stores [K, N]; float tensors only.
    """

    tensor: str
    rows: Any = None
    transpose: bool = False


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] or vector [N] that steps read: rows of checkpoint tensors one after the other, or a constant.

    groups:         a stack of `groups` equal matrices, one per expert (N = groups * rows of one), else 1.
    add:            added to every element at load (norm weights stored as w - 1); float tensors only.
    normalize_rows: divide each row by its L2 norm at load; float tensors only.
    types:          the tensor types of its parts as the file has them ("F32", "Q4_K", ...), for display and fusing.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    constant: np.ndarray | None = field(default=None, compare=False)
    groups: int = 1
    add: float = 0.0
    normalize_rows: bool = False
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cache:
    """Key/value memory of one attention: K [G, E] and V [G, E_v] per token.

    kind: "self" grows with the sequence; "cross" is written once from the encoder's output.
    """

    name: str
    kv_heads: int
    k_dim: int
    v_dim: int
    kind: str = "self"


@dataclass(frozen=True)
class Step:
    """One op on named views and weights. `label` says where in the model it stands ("blk.3.attention")."""

    op: str
    inputs: tuple[View, ...]
    outputs: tuple[View, ...]
    weights: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        ins = ", ".join([str(v) for v in self.inputs] + [f"{k}={v}" for k, v in self.weights.items()])
        return f"{self.label}: {', '.join(map(str, self.outputs)) or '-'} = {self.op}({ins})"


@dataclass(frozen=True)
class Network:
    """A model as data: steps over buffers, weights and caches. Print it, verify it, cut it, run it.

    entries: step lists by name: "main" (decoder, or the only stack) and, for encoder-decoders, "encode".
    outputs: view by name, all on R rows: "hidden" [R, D] and, where there is a head, "logits" [R, V] of "main";
             "encoder_hidden" [R, D] of "encode".
    facts:   vocabulary, width, layers, context, ... as resolved from spec and checkpoint.
    """

    name: str
    entries: Mapping[str, tuple[Step, ...]]
    buffers: Mapping[str, Buffer]
    weights: Mapping[str, Weight]
    caches: Mapping[str, Cache]
    outputs: Mapping[str, View]
    facts: Mapping[str, Any]


@dataclass
class Batch:
    """What one run of a program works on; plain integer arrays, made by the engine.

    tokens      i32 [T]     token ids, the sequences one after the other, no padding
    positions   i32 [T]     position of each token in its sequence, from 0
    starts      i32 [B + 1] rows starts[b] .. starts[b + 1] belong to sequence b
    blocks      i32 [B, M]  KV block ids of each sequence; token p of a sequence lies in block p // block_size
    logit_rows  i32 [R]     rows whose hidden state and logits are wanted
    types       i32 [T]     token types (segment ids), zeros unless the model has them
    cross_blocks i32 [B, M], cross_lengths i32 [B]: encoder memory of each sequence (encoder-decoders)

    Self-attention of sequence b sees its cached tokens 0 .. positions[row] (causal), or all of 0 .. last position
    (bidirectional, where the whole sequence is in the batch). In the "encode" entry `cross_blocks` is written.
    """

    tokens: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray
    logit_rows: np.ndarray
    types: np.ndarray | None = None
    cross_blocks: np.ndarray | None = None
    cross_lengths: np.ndarray | None = None


@dataclass(frozen=True)
class TraceRow:
    """One step of a traced run: its place, what ran on which shapes, the kernel's file:line, microseconds."""

    index: int
    label: str
    op: str
    shapes: str
    kernel: str
    microseconds: float


@dataclass(frozen=True)
class Op:
    """A row of the op table. Optional inputs and weights end in '?'. params: name -> default (REQUIRED if none)."""

    name: str
    what: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


REQUIRED = object()

_HEADS = {"heads": REQUIRED, "head_dim": REQUIRED}

OPS = {op.name: op for op in (
    Op("embed", "y[t] = table[tokens[t]] * scale", (), ("y",), ("table",), {"scale": 1.0}),
    Op("embed_position", "y[t] = x[t] + table[positions[t] + offset]", ("x",), ("y",), ("table",), {"offset": 0}),
    Op("embed_type", "y[t] = x[t] + table[types[t]]", ("x",), ("y",), ("table",)),
    Op("rms_norm", "y = x / sqrt(mean(x^2) + eps) * weight, over each of `groups` equal column groups "
       "(weight [D] or [D / groups])", ("x",), ("y",), ("weight?",), {"eps": REQUIRED, "groups": 1}),
    Op("layer_norm", "y = (x - mean) / sqrt(var + eps) * weight + bias, groups as in rms_norm",
       ("x",), ("y",), ("weight?", "bias?"), {"eps": REQUIRED, "groups": 1}),
    Op("linear", "y [rows, N] = x [rows, K] @ weight[N, K].T + bias[N]", ("x",), ("y",), ("weight", "bias?")),
    Op("rope_angles", "y [T, 2F] = (cos, sin)(positions * inv_freq[F]) * scale; cosines first",
       (), ("y",), ("inv_freq",), {"scale": 1.0}),
    Op("rope", "rotate columns [start, start + 2F) of each head by `angles` [T, 2F]; pairing 'half' rotates "
       "(i, i + F), 'adjacent' (2i, 2i + 1); other columns are copied",
       ("x", "angles"), ("y",), (), {**_HEADS, "pairing": "half", "start": 0}),
    Op("head_concat", "y [T, H * (A + B)]: head h is (a head h, b head h); b [T, B] is shared by all heads",
       ("a", "b"), ("y",), (), {"heads": REQUIRED}),
    Op("cache_write", "store k [T, G*E], v [T, G*E_v] of each token at its position in `cache`",
       ("k", "v"), (), (), {"cache": REQUIRED}),
    Op("attention", "y [T, H*E_v] = softmax(softcap(scale * q k^T) + bias, over visible cached keys) v; query head h "
       "uses key head h // (H / G). window w > 0: query i sees keys i-w+1 .. i (.. i+w-1 if not causal). slopes [H]: "
       "bias slope * (key - query position). sinks [H]: one extra logit per head that takes probability and has no "
       "value. buckets [n, H]: T5 relative position bias",
       ("q",), ("y",), ("slopes?", "sinks?", "buckets?"),
       {"cache": REQUIRED, "heads": REQUIRED, "scale": REQUIRED, "causal": True, "window": 0, "softcap": 0.0,
        "bucket_distance": 0}),
    Op("act", "y = act(x)", ("x",), ("y",), (), {"kind": REQUIRED}),
    Op("act_mul", "y = act(gate) * up", ("gate", "up"), ("y",), (), {"kind": REQUIRED, "limit": 0.0, "alpha": 0.0}),
    Op("gate_rows", "y = x * sigmoid(gate), gate [T, 1]", ("x", "gate"), ("y",)),
    Op("add", "y = a + scale * b", ("a", "b"), ("y",), (), {"scale": 1.0}),
    Op("scale", "y = x * scale", ("x",), ("y",), (), {"scale": REQUIRED}),
    Op("softcap", "y = cap * tanh(x / cap)", ("x",), ("y",), (), {"cap": REQUIRED}),
    Op("clamp", "y = min(max(x, -limit), limit)", ("x",), ("y",), (), {"limit": REQUIRED}),
    Op("select_rows", "y [R, D] = x[logit_rows]", ("x",), ("y",)),
    Op("copy", "y = x", ("x",), ("y",)),
    Op("moe_route", "ids i32 [T, S], gates f32 [T, S]: score = softmax or sigmoid(logits) (+ bias for choosing); keep "
       "the best `top_groups` of `groups` (by the sum of their `group_best` best), then the best S; 'softmax_topk' "
       "applies softmax to the S chosen logits; normalize makes gates sum to 1; times scale",
       ("logits",), ("ids", "gates"), ("bias?",),
       {"score": "softmax", "normalize": False, "scale": 1.0, "groups": 1, "top_groups": 1,
        "group_best": 2}),
    Op("expert_linear", "y [T*S, N] row (t, s) = weight[ids[t, s]] [N, K] @ x row; x has T rows (shared by the S "
       "routes) or T*S rows; bias [X * N]", ("x", "ids"), ("y",), ("weight", "bias?")),
    Op("expert_combine", "y [T, D] = sum over s of gates[t, s] * x[(t, s)]", ("x", "gates"), ("y",)),
)}


def check_step(step: Step, network: Network) -> None:
    """Arity, names, rows, widths and dtypes of one step.

    Raises:
        NetworkError: naming the step, what was expected and what was found.
    """
    op = OPS.get(step.op)
    if op is None:
        raise NetworkError(f"{step}: no op named {step.op!r}{did_you_mean(step.op, OPS)}")
    _check_names(step, op)
    for view in (*step.inputs, *step.outputs):
        buffer = network.buffers.get(view.buffer)
        if buffer is None:
            raise NetworkError(f"{step}: no buffer named {view.buffer!r}{did_you_mean(view.buffer, network.buffers)}")
        if view.start < 0 or view.width <= 0 or view.start + view.width > buffer.width:
            raise NetworkError(f"{step}: {view} is outside buffer {buffer.name!r} of width {buffer.width}")
    for role, name in step.weights.items():
        if name not in network.weights:
            raise NetworkError(f"{step}: {role} {name!r} is no weight of this network")
    _SHAPES[step.op](step, network)


def _check_names(step: Step, op: Op) -> None:
    required = [name for name in op.inputs if not name.endswith("?")]
    if not len(required) <= len(step.inputs) <= len(op.inputs):
        raise NetworkError(f"{step}: {op.name} takes inputs {op.inputs}, got {len(step.inputs)}")
    if len(step.outputs) != len(op.outputs):
        raise NetworkError(f"{step}: {op.name} has outputs {op.outputs}, got {len(step.outputs)}")
    roles = {name.rstrip("?") for name in op.weights}
    for role in step.weights:
        if role not in roles:
            raise NetworkError(f"{step}: {op.name} has no weight {role!r}{did_you_mean(role, roles)}")
    for role in op.weights:
        if not role.endswith("?") and role not in step.weights:
            raise NetworkError(f"{step}: {op.name} needs weight {role!r}")
    for key in step.params:
        if key not in op.params:
            raise NetworkError(f"{step}: {op.name} has no parameter {key!r}{did_you_mean(key, op.params)}")
    for key, default in op.params.items():
        if default is REQUIRED and key not in step.params:
            raise NetworkError(f"{step}: {op.name} needs parameter {key!r}")


def param(step: Step, name: str) -> Any:
    """The step's parameter, or the op's default."""
    return step.params.get(name, OPS[step.op].params[name])


# Shape rules: one short function per op. They know arity only through OPS.

def _expect(step: Step, what: str, expected, found) -> None:
    if expected != found:
        raise NetworkError(f"{step}: {what} should be {expected}, is {found}")


def _rows(step: Step, network: Network, view: View) -> str:
    return network.buffers[view.buffer].rows


def _same(step: Step, network: Network) -> None:
    """Every view has the shape of the first output, in f32."""
    y = step.outputs[0]
    for x in (*step.inputs, *step.outputs):
        _expect(step, f"width of {x}", y.width, x.width)
        _expect(step, f"rows of {x}", _rows(step, network, y), _rows(step, network, x))
        _expect(step, f"dtype of {x}", "f32", network.buffers[x.buffer].dtype)


def _table(step: Step, network: Network) -> None:
    _same(step, network)
    _expect(step, "rows", "tokens", _rows(step, network, step.outputs[0]))
    _expect(step, "columns of table", step.outputs[0].width, network.weights[step.weights["table"]].shape[-1])


def _norm(step: Step, network: Network) -> None:
    _same(step, network)
    width, groups = step.outputs[0].width, param(step, "groups")
    if width % groups:
        raise NetworkError(f"{step}: {groups} groups do not divide width {width}")
    for role, name in step.weights.items():
        shape = network.weights[name].shape
        if shape not in ((width,), (width // groups,)):
            raise NetworkError(f"{step}: {role} {name!r} should be [{width}] or [{width // groups}], is {list(shape)}")


def _linear(step: Step, network: Network) -> None:
    x, y = step.inputs[0], step.outputs[0]
    weight = network.weights[step.weights["weight"]]
    _expect(step, f"shape of {weight.name!r}", (y.width, x.width), weight.shape)
    _expect(step, "rows of the output", _rows(step, network, x), _rows(step, network, y))
    if "bias" in step.weights:
        _expect(step, "shape of bias", (y.width,), network.weights[step.weights["bias"]].shape)


def _rope_angles(step: Step, network: Network) -> None:
    shape = network.weights[step.weights["inv_freq"]].shape
    _expect(step, "shape of inv_freq", (step.outputs[0].width // 2,), shape)


def _rope(step: Step, network: Network) -> None:
    x, angles = step.inputs
    _expect(step, "width of the output", x.width, step.outputs[0].width)
    _expect(step, "width", param(step, "heads") * param(step, "head_dim"), x.width)
    if param(step, "start") + angles.width > param(step, "head_dim"):
        raise NetworkError(f"{step}: {angles.width} rotated columns do not fit heads of {param(step, 'head_dim')}")
    if param(step, "pairing") not in ("half", "adjacent"):
        raise NetworkError(f"{step}: pairing should be 'half' or 'adjacent', is {param(step, 'pairing')!r}")


def _head_concat(step: Step, network: Network) -> None:
    a, b = step.inputs
    heads, width = param(step, "heads"), step.outputs[0].width
    if width not in (a.width + b.width, a.width + heads * b.width):
        raise NetworkError(f"{step}: {heads} heads of a [{a.width}] and b [{b.width}] do not make {width} columns")


def _cache(step: Step, network: Network) -> Cache:
    name = param(step, "cache")
    if name not in network.caches:
        raise NetworkError(f"{step}: no cache named {name!r}{did_you_mean(name, network.caches)}")
    return network.caches[name]


def _cache_write(step: Step, network: Network) -> None:
    cache = _cache(step, network)
    _expect(step, "width of k", cache.kv_heads * cache.k_dim, step.inputs[0].width)
    _expect(step, "width of v", cache.kv_heads * cache.v_dim, step.inputs[1].width)


def _attention(step: Step, network: Network) -> None:
    cache, heads = _cache(step, network), param(step, "heads")
    if heads % cache.kv_heads:
        raise NetworkError(f"{step}: {cache.kv_heads} key/value heads do not divide {heads} query heads")
    _expect(step, "width of q", heads * cache.k_dim, step.inputs[0].width)
    _expect(step, "width of the output", heads * cache.v_dim, step.outputs[0].width)
    for role in ("slopes", "sinks"):
        if role in step.weights:
            _expect(step, f"shape of {role}", (heads,), network.weights[step.weights[role]].shape)


def _act(step: Step, network: Network) -> None:
    _same(step, network)
    # The clamped form needs gate and up together.
    kinds = [kind for kind in ACTIVATIONS if step.op == "act_mul" or kind != "swiglu_clamp"]
    if param(step, "kind") not in kinds:
        raise NetworkError(f"{step}: no activation {param(step, 'kind')!r}{did_you_mean(param(step, 'kind'), kinds)}")


def _gate_rows(step: Step, network: Network) -> None:
    _expect(step, "width of the gate", 1, step.inputs[1].width)
    _expect(step, "width of the output", step.inputs[0].width, step.outputs[0].width)


def _select(step: Step, network: Network) -> None:
    _expect(step, "rows of the output", "logits", _rows(step, network, step.outputs[0]))
    _expect(step, "width of the output", step.inputs[0].width, step.outputs[0].width)


def _route(step: Step, network: Network) -> None:
    ids, gates = step.outputs
    _expect(step, "width of gates", ids.width, gates.width)
    _expect(step, "dtype of ids", "i32", network.buffers[ids.buffer].dtype)
    if ids.width > step.inputs[0].width:
        raise NetworkError(f"{step}: {ids.width} experts per token, but only {step.inputs[0].width} experts")


def _expert_linear(step: Step, network: Network) -> None:
    x, y = step.inputs[0], step.outputs[0]
    weight = network.weights[step.weights["weight"]]
    _expect(step, f"shape of {weight.name!r}", (weight.groups * y.width, x.width), weight.shape)
    _expect(step, "rows of the output", "routes", _rows(step, network, y))


def _combine(step: Step, network: Network) -> None:
    _expect(step, "rows of the input", "routes", _rows(step, network, step.inputs[0]))
    _expect(step, "width of the output", step.inputs[0].width, step.outputs[0].width)


_SHAPES = {
    "embed": _table, "embed_position": _table, "embed_type": _table, "rms_norm": _norm, "layer_norm": _norm,
    "linear": _linear, "rope_angles": _rope_angles, "rope": _rope, "head_concat": _head_concat,
    "cache_write": _cache_write, "attention": _attention, "act": _act, "act_mul": _act, "gate_rows": _gate_rows,
    "add": _same, "scale": _same, "softcap": _same, "clamp": _same, "select_rows": _select, "copy": _same,
    "moe_route": _route, "expert_linear": _expert_linear, "expert_combine": _combine,
}
