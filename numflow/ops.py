"""The op set: what a step of a network may be, and the plain data a network is made of.

Everything that runs a model (`reference`, `cpu`, `cuda`) implements exactly the rows of `OPS`; everything that
builds or cuts a model (`network`, `partition`) emits exactly these rows, and those of `EXCHANGES` where devices meet.
Letters for shapes: those of CONTRIBUTING.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from numflow.op_rows import ADAPTING, EXCHANGES, REQUIRED, Op

# How many rows a buffer has in one run of a program.
ROWS = {
    "tokens": "T, one per token of the batch",
    "logits": "R, one per row of Batch.logit_rows",
    "routes": "T * S, one per (token, chosen expert), token-major",
}

# What a row of an op's output depends on.
LOCAL = {
    "elements": "the same element of each input",
    "heads": "the same row of each input, each head of it on the same head",
    "rows": "the same row of each input",
    "batch": "other rows, or arrays of the batch",
    "devices": "what other devices have",
}

CONV_KINDS = ("none", "silu")  # what may follow a causal_conv within it
ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh", "exp",
               "swiglu_clamp", "silu_clamp", "xielu")


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

    def overlaps(self, other: "View") -> bool:
        """Whether the two share columns."""
        return (self.buffer == other.buffer and self.start < other.start + other.width
                and other.start < self.start + self.width)

    def covers(self, other: "View") -> bool:
        """Whether every column of the other is a column of this one."""
        return (self.buffer == other.buffer and self.start <= other.start
                and other.start + other.width <= self.start + self.width)


@dataclass(frozen=True)
class Part:
    """Rows of one checkpoint tensor, in order.

    tensor:    name in the checkpoint.
    rows:      row indices (int64 array or range) after leading dimensions are flattened, None for all.
    transpose: the file stores [K, N]; float tensors only.
    turned:    the rows are the columns of a matrix: `rows` [n, K] become [K, n]. Numbers of a type with blocks become
               float32 by that, others keep their type.
    ordered:   the columns are those of `Tensor.ordered`.
    columns:   (begin, end) of the K columns, None for all. Of a quantised tensor whole blocks, so that they stay as
               they are stored.
    """

    tensor: str
    rows: Any = None
    transpose: bool = False
    columns: tuple[int, int] | None = None
    turned: bool = False
    ordered: bool = False


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] or vector [N] that steps read: rows of checkpoint tensors one after the other, or a constant.

    groups:         a stack of `groups` equal matrices, one per expert or head (N = groups * rows of one), else 1.
    add:            added to every element at load (norm weights stored as w - 1); float tensors only.
    normalize_rows: divide each row by its L2 norm at load; float tensors only.
    negative_exp:   each element w becomes -exp(w) at load (decay rates that are stored as logarithms).
    project:        roles of the parts: a "table" of vectors and the "matrix" [H * K, D] that they pass, perhaps its
                    "bias", and before it a layer norm: "norm", "norm_bias", eps. Matrix h is what head h makes of each.
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
    negative_exp: bool = False
    project: tuple[str, ...] = ()
    eps: float = 0.0


@dataclass(frozen=True)
class Cache:
    """Key/value memory of one attention: what is stored of a token is K [G, E] and V [G, E_v].

    kind:   "self" grows with the sequence; "cross" is written once from the encoder's output.
    prefix: where it is not 0, the first `prefix` columns of a key are its value too: E_v is 0, nothing is stored twice.
    every:  where it is not 0, entries, one for so many tokens: float32 rows of one head, whatever type keys have, of
            tokens p with (p + 1) % every = 0 alone, in the KV block of that token. Keys are their values.
    """

    name: str
    kv_heads: int
    k_dim: int
    v_dim: int
    kind: str = "self"
    prefix: int = 0
    every: int = 0

    @property
    def value_dim(self) -> int:
        """Columns of a value, wherever they are stored."""
        return self.prefix or self.v_dim


@dataclass(frozen=True)
class State:
    """Memory of a recurrent step: an array of `shape` for each sequence, zeros before its first token.

    axis: of `shape`, whose heads or channels devices may share out. dtype: that it is stored in.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    dtype: str = "f32"
    kind: ClassVar[str] = "state"

    @property
    def size(self) -> int:
        """Numbers of a sequence."""
        return math.prod(self.shape)


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
    outputs: view by name: "hidden" [R, D] and, where there is a head, "logits" [R, V] of "main"; "encoder_hidden"
             [R, D] of "encode"; "streams" [T, W] where something drafts by them.
    facts:   vocabulary, width, layers, context, ... as resolved from spec and checkpoint.
    states:  memory of recurrent steps, by name.
    inputs:  views that a batch brings the rows of (Batch.given), by name.
    """

    name: str
    entries: Mapping[str, tuple[Step, ...]]
    buffers: Mapping[str, Buffer]
    weights: Mapping[str, Weight]
    caches: Mapping[str, Cache]
    outputs: Mapping[str, View]
    facts: Mapping[str, Any]
    states: Mapping[str, State] = field(default_factory=dict)
    inputs: Mapping[str, View] = field(default_factory=dict)


@dataclass
class Batch:
    """Input of one run of a program: plain integer arrays, made by the engine.

    tokens      i32 [T]     token ids, the sequences one after the other, no padding
    positions   i32 [T]     position of each token in its sequence, from 0
    starts      i32 [B + 1] rows starts[b] .. starts[b + 1] belong to sequence b
    blocks      i32 [B, M]  KV block ids of each sequence; token p of a sequence lies in block p // block_size
    logit_rows  i32 [R]     rows whose hidden state and logits are wanted
    types       i32 [T]     token types (segment ids), zeros unless the model has them
    cross_blocks i32 [B, M], cross_lengths i32 [B]: encoder memory of each sequence (encoder-decoders)
    adapters    i32 [B]     number of the adapter that the rows of each sequence have, -1 for none; None: none has one
    windows     by window: i32 [B, M], the `blocks` of layers whose attention sees only so many tokens back; entries
                            before the first position that is seen are never read. None: `blocks` serves all layers
    slots       i32 [B]     place of each sequence in the memory of recurrent steps, the same in all layers; at
                            position 0 it holds zeros. None: 0, 1, ... B - 1
    limits      i32 [B]     tokens that each sequence may come to hold, which choose its rotary frequencies where they
                            depend on the length; None: what it holds after this run

    given       by name: f32 [T, W], the rows of Network.inputs; None: there are none

    gone_on                 how many times it has become the next step of its sequences (`go_on`)

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
    limits: np.ndarray | None = None
    windows: Mapping[int, np.ndarray] | None = None
    slots: np.ndarray | None = None
    adapters: np.ndarray | None = None
    given: Mapping[str, np.ndarray] | None = None
    gone_on: int = 0

    def go_on(self, tokens: Sequence[int]) -> None:
        """Become the next step of the same sequences, in the same blocks: a token of each, one position later.

        A program that has run the step before, and nothing since, looks at tokens and positions alone.
        """
        self.tokens[:] = tokens
        self.positions += 1
        self.gone_on += 1


OPS = {op.name: op for op in (
    Op("embed", "batch", "y[t] = table[tokens[t]] * scale. Where `vocabulary` is given, the table has rows first .. "
       "first + V - 1 of one of so many rows, and rows of other tokens become -0.0, which changes no number that it is "
       "added to", (), ("y",), ("table",), {"scale": 1.0, "first": 0, "vocabulary": 0}),
    Op("embed_position", "batch", "y[t] = x[t] + table[positions[t] + offset]", ("x",), ("y",), ("table",),
       {"offset": 0}),
    Op("embed_type", "batch", "y[t] = x[t] + table[types[t]]", ("x",), ("y",), ("table",)),
    Op("rms_norm", "rows", "y = x / sqrt(mean(x^2) + eps) * weight, over each of `groups` equal column groups "
       "(weight [D] or [D / groups])", ("x",), ("y",), ("weight?",), {"eps": REQUIRED, "groups": 1}),
    Op("layer_norm", "rows", "y = (x - mean) / sqrt(var + eps) * weight + bias, groups as in rms_norm",
       ("x",), ("y",), ("weight?", "bias?"), {"eps": REQUIRED, "groups": 1}),
    Op("linear", "rows", "y [rows, N] = x [rows, K] @ weight[N, K].T + bias[N]", ("x",), ("y",), ("weight", "bias?")),
    Op("rope_angles", "batch", "y [T, 2F] = (cos, sin)((positions + offset) * inv_freq[F]) * scale; cosines first. "
       "border > 0: rows of a sequence with a limit (Batch.limits) above it take `long` and long_scale for inv_freq "
       "and scale; without `long`, inv_freq[i] * s^(-i / (span or F - 1)), s = stretch * (limit / border - 1) + 1, and "
       "long_scale", (), ("y",), ("inv_freq", "long?"),
       {"scale": 1.0, "border": 0, "long_scale": 1.0, "stretch": 1.0, "span": 0.0, "offset": 0}),
    Op("rope", "heads", "rotate columns [start, start + 2F) of each head by `angles` [T, 2F]; pairing 'half' rotates "
       "(i, i + F), 'adjacent' (2i, 2i + 1); other columns are copied",
       ("x", "angles"), ("y",), (), {"heads": REQUIRED, "head_dim": REQUIRED, "pairing": "half", "start": 0}),
    Op("head_concat", "heads", "y [T, H * (A + B)]: head h is (a head h, b head h); b [T, B] is shared by all heads",
       ("a", "b"), ("y",), (), {"heads": REQUIRED}),
    Op("head_linear", "heads", "y [T, H * N]: head h = weight[h] [N, K] @ head h of x [T, H * K]",
       ("x",), ("y",), ("weight",), {"heads": REQUIRED}),
    Op("cache_write", "batch", "store k [T, G*E], v [T, G*E_v] of each token at its position in `cache`; no v where "
       "values are a prefix of keys; of entries those of tokens that end a window", ("k", "v?"), (), (),
       {"cache": REQUIRED}),
    Op("pool", "batch", "y [T, E]: of a token that ends a window of `every`, by column the sum of values of the last "
       "`series` windows, weighed by the softmax of their gates + bias[position % every]; the `cache` has [gates S * E,"
       " values S * E] of each token, of which window s, the oldest first, has columns s * E on. Rows of others are 0",
       (), ("y",), ("bias",), {"cache": REQUIRED, "every": REQUIRED, "series": 1}),
    Op("index_select", "batch", "y i32 [T, W]: bit p % 32 of word p // 32 is set where key p of `cache` is among the "
       "top_k best that a row sees, by the sum over heads h of weights[t, h] * max(q head h . key, 0); earliest first; "
       "of a cache of entries p is the number of one, and a row sees those of windows that have ended",
       ("q", "weights"), ("y",), (), {"cache": REQUIRED, "heads": REQUIRED, "top_k": REQUIRED}),
    Op("attention", "batch", "y [T, H*E_v] = softmax(softcap(scale * q k^T) + bias, over visible cached keys) v; query "
       "head h uses key head h // (H / G). window w > 0: query i sees keys i-w+1 .. i (.. i+w-1 if not causal). chunk "
       "c > 0: only keys from c * (i // c) on. slopes [H]: bias -slope * |key - query position|. sinks [H]: one extra "
       "logit per head that takes probability and has no value. buckets [n, H]: T5 relative position bias. chosen i32 "
       "[T, W]: only keys whose bits are set. places [2R + 1]: the number n of the vector for each distance (key - "
       "query) -R .. R, of farther ones at the ends; of query i and key j, q k^T gets of_queries[i, h, n] + of_keys[j, "
       "h, n] more, [T, H*N] each, two inputs in place of chosen, all of a sequence in the batch; or the first alone. "
       "entries: a cache of such beside the keys, of windows that have ended, of which `chosen` has numbers then; one "
       "softmax over both",
       ("q", "chosen or of_queries?", "of_keys?"), ("y",), ("slopes?", "sinks?", "buckets?", "places?"),
       {"cache": REQUIRED, "heads": REQUIRED, "scale": REQUIRED, "causal": True, "window": 0, "softcap": 0.0,
        "bucket_distance": 0, "chunk": 0, "entries": ""}),
    Op("causal_conv", "batch", "y[t, c] = act(bias[c] + sum over j < K of weight[c, j] * x[t - K + 1 + j, c]); earlier "
       "x are in `state` [K - 1, C], which then keeps the last ones. kind: silu or none",
       ("x",), ("y",), ("weight", "bias?"), {"state": REQUIRED, "kind": "none"}),
    Op("linear_attention", "batch",
       "y [T, H*dv] = S^T q + skip * v, S = exp(steps * rate) S + k u^T [H, dk, dv] of a text; u: v, steps * v if "
       "scaled, or beta * (v - (exp(steps * rate) S)^T k); steps [T, H] or [T, H*dk], rate [H] or [H*dk]; tiled: h % G",
       ("q", "k", "v", "steps?", "beta?"), ("y",), ("rate", "skip?"),
       {"state": REQUIRED, "heads": REQUIRED, "key_heads": REQUIRED, "tiled": False, "scaled": False}),
    Op("gated_recurrence", "batch", "y = h = a h + sqrt(1 - a^2) sigmoid(entry + entry_bias) x, h [W] of a sequence; "
       "log a = -8 softplus(rate) sigmoid(fade + fade_bias), at position 0 a = 0",
       ("x", "entry", "fade"), ("y",), ("rate", "entry_bias", "fade_bias"), {"state": REQUIRED}),
    Op("wkv", "batch", "y = (a + w v) / (b + w), w = e^(first + k); then a = e^decay a + e^k v, b = e^decay b + e^k; "
       "state [3, W]: a and b of each channel, divided by e^m, and m, their largest exponent so far",
       ("k", "v"), ("y",), ("decay", "first"), {"state": REQUIRED}),
    Op("act", "elements", "y = act(x). xielu: y = positive * x^2 + beta * x for x > 0, else "
       "negative * (exp(min(x, eps)) - 1 - x) + beta * x", ("x",), ("y",), (),
       {"kind": REQUIRED, "positive": 0.0, "negative": 0.0, "beta": 0.0, "eps": 0.0}),
    Op("act_mul", "elements", "y = act(gate) * up", ("gate", "up"), ("y",), (),
       {"kind": REQUIRED, "limit": 0.0, "alpha": 0.0}),
    Op("gate_rows", "rows", "y = x * sigmoid(gate), or x * gate if plain; gate [T, H] has a column for each of H equal "
       "column groups of x", ("x", "gate"), ("y",), (), {"plain": False}),
    Op("mul", "elements", "y = a * b", ("a", "b"), ("y",)),
    Op("permute", "rows", "y[t, j] = x[t, order[j]], the order of a matrix's columns", ("x",), ("y",), ("order",)),
    Op("add", "elements", "y = a + scale * b", ("a", "b"), ("y",), (), {"scale": 1.0}),
    Op("scale", "elements", "y = x * scale * weight + shift", ("x",), ("y",), ("weight?", "shift?"),
       {"scale": REQUIRED}),
    Op("scale_by_position", "batch", "y = x * (1 + scale * ln(1 + floor(q))), q = (position + offset) / length; smooth "
       "1: ln(max(1, q)), 2: y = x * (1 + q)^scale", ("x",), ("y",), (),
       {"scale": REQUIRED, "length": REQUIRED, "offset": 0, "smooth": 0}),
    Op("sparsify", "rows", "y = max(x - mean - deviations * std, 0)", ("x",), ("y",), (), {"deviations": REQUIRED}),
    Op("match_rms", "rows", "each [D] of x [T, G * D] times sqrt(mean(like^2) / max(mean(x^2), least)), like [T, D]",
       ("x", "like"), ("y",), (), {"least": REQUIRED}),
    Op("mix", "rows", "y [T, I * D], apart from x: part i = part i of base + sum of (gates[t, i * J + j] + plus) "
       "* part j of x [T, J * D]", ("base", "x", "gates"), ("y",), (), {"parts": REQUIRED, "plus": 0.0}),
    Op("balance", "rows", "y [T, S * S], apart from x: of each row a matrix [S, S], the softmax of its rows plus eps; "
       "then its columns and its rows are divided by their sums plus eps in turn, columns first and last, `times` "
       "times; turned around", ("x",), ("y",), (), {"times": REQUIRED, "eps": 0.0}),
    Op("softcap", "elements", "y = cap * tanh(x / cap)", ("x",), ("y",), (), {"cap": REQUIRED}),
    Op("clamp", "elements", "y = min(max(x, -limit), limit)", ("x",), ("y",), (), {"limit": REQUIRED}),
    Op("softplus", "rows", "y = log(1 + exp(x + bias)), cut", ("x",), ("y",), ("bias?",), {"least": 0.0, "most": 1e30}),
    Op("select_rows", "batch", "y [R, D] = x[logit_rows]", ("x",), ("y",)),
    Op("copy", "elements", "y = x", ("x",), ("y",)),
    Op("moe_route", "rows", "ids i32 [T, S], gates f32 [T, S]: score = softmax, sigmoid or sqrt(softplus) of logits (+ "
       "bias for choosing); keep the best `top_groups` of `groups` (by the sum of their `group_best` best), then the "
       "best S; "
       "'softmax_topk' applies softmax to the S chosen logits, 'sigmoid_topk' sigmoid; 'sparsemixer' takes S times the "
       "largest logit l that is left, its gate the softmax over those left with (l - logit) / max(|logit|, l) <= 2 * "
       "jitter; normalize divides gates by their sum, at least by `least_sum`; times scale and the expert's own. "
       "With experts [T, S], numbers of experts, these are the chosen",
       ("logits", "experts?"), ("ids", "gates"), ("bias?", "scales?"),
       {"score": "softmax", "normalize": False, "least_sum": 0.0, "scale": 1.0, "groups": 1, "top_groups": 1,
        "group_best": 2, "jitter": 0.0}),
    Op("expert_scale", "rows", "y [T*S, D] row (t, s) = gates[t, s] * x[t]", ("x", "gates"), ("y",)),
    Op("expert_linear", "rows", "y [T*S, N] row (t, s) = weight[ids[t, s]] [N, K] @ x row; x has T rows (of all S "
       "routes) or T*S; bias [X * N]. Where `first` is given, the weight has experts first .. first + X - 1 of a "
       "larger stack, and rows of routes to others become 0", ("x", "ids"), ("y",), ("weight", "bias?"), {"first": 0}),
    Op("expert_combine", "rows", "y [T, D] = sum over s of gates[t, s] * x[(t, s)]; without the gates if not weighted",
       ("x", "gates"), ("y",), (), {"weighted": True}),
)}

_ALL = OPS | EXCHANGES | ADAPTING


def op_of(step: Step) -> Op | None:
    """The row of OPS, EXCHANGES or ADAPTING, None if there is none of that name."""
    return _ALL.get(step.op)


def param(step: Step, name: str) -> Any:
    """The step's parameter, or the op's default."""
    return step.params.get(name, _ALL[step.op].params[name])


def states_of(step: Step) -> dict[str, str]:
    """States that a step reads and writes, by parameter: "state", and those whose names end in "_state"."""
    return {key: name for key, name in step.params.items() if key == "state" or key.endswith("_state")}


def caches_of(step: Step) -> dict[str, str]:
    """Caches that a step reads and writes, by parameter: "cache" and "entries"."""
    return {key: step.params[key] for key in ("cache", "entries") if step.params.get(key)}


def local(step: Step) -> str:
    """The inputs that a row of the step's output depends on, as a key of LOCAL."""
    return _ALL[step.op].local

