"""The op set, and the data classes that a network is made of.

Executors (`reference`, `cpu`, `cuda`) implement exactly the rows of `OPS`. `network` and `partition`, which build and
cut models, emit exactly these rows, and `partition` also the rows of `EXCHANGES`, between devices. Letters for shapes
are defined in CONTRIBUTING.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from numflow.op_rows import ADAPTING, EXCHANGES, REQUIRED, Op

# Number of rows of a buffer in a run of a program.
ROWS = {
    "tokens": "T, one per token of the batch",
    "logits": "R, one per row of Batch.logit_rows",
    "routes": "T * S, one per (token, chosen expert), token-major",
}

CACHES = ("cache", "entries", "cross")  # parameters of steps that name a cache
CONV_KINDS = ("none", "silu")  # activation functions fused into causal_conv
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
    """Columns [start, start + width) of a buffer: an input or output of steps."""

    buffer: str
    start: int
    width: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.start + self.width}]"

    def overlaps(self, other: "View") -> bool:
        """Whether both views have a column in common."""
        return (self.buffer == other.buffer and self.start < other.start + other.width
                and other.start < self.start + self.width)

    def covers(self, other: "View") -> bool:
        """Whether every column of the other view is a column of this view."""
        return (self.buffer == other.buffer and self.start <= other.start
                and other.start + other.width <= self.start + self.width)


@dataclass(frozen=True)
class Part:
    """Rows of one checkpoint tensor, in order.

    tensor:    name in the checkpoint.
    rows:      row indices (int64 array or range) after leading dimensions are flattened, None for all.
    transpose: the file stores [K, N]; float tensors only.
    turned:    transpose the selected `rows` [n, K] to [K, n]. Types with blocks become float32, other types stay.
    ordered:   take the columns of `Tensor.ordered`.
    columns:   (begin, end) of the K columns, None for all; whole blocks of a quantised tensor, which stay as stored.
    """

    tensor: str
    rows: Any = None
    transpose: bool = False
    columns: tuple[int, int] | None = None
    turned: bool = False
    ordered: bool = False


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] or vector [N] that steps read: concatenated rows of checkpoint tensors, or a constant.

    groups:         number of equal matrices in the stack, one per expert or head (N = groups * rows of one), else 1.
    add:            constant to add to every element at load (norm weights stored as w - 1); float tensors only.
    normalize_rows: divide each row by its L2 norm at load; float tensors only.
    negative_exp:   replace each element w by -exp(w) at load (decay rates stored as logarithms).
    project:        roles of the parts of a computed weight: a "table" of vectors and the "matrix" [H * K, D] that
                    projects them, optionally its "bias", and a layer norm before it: "norm", "norm_bias", eps. Matrix h
                    of the weight has the vectors as projected for head h.
    types:          tensor types of the parts in the file ("F32", "Q4_K", ...), for display and for fusion.
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
    """Key/value cache of one attention: K [G, E] and V [G, E_v] are stored per token.

    kind:   "self" grows with the sequence; "cross" is written once from the encoder's output.
    prefix: if not 0, the first `prefix` columns of a key are its value too: E_v is 0, and nothing is stored twice.
    every:  if not 0, a cache of entries, one per window of `every` tokens: a float32 row of one head, whatever type
            keys have, written by the token p with (p + 1) % every = 0 and stored in its KV block. The key of an entry
            is its value too.
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
        """Columns of a value, stored in V or as prefix of K."""
        return self.prefix or self.v_dim


@dataclass(frozen=True)
class State:
    """Memory of a recurrent step: an array of `shape` for each sequence, zeros before its first token.

    axis: of `shape`, heads or channels that can be divided among devices. dtype: stored type.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    dtype: str = "f32"
    kind: ClassVar[str] = "state"

    @property
    def size(self) -> int:
        """Number of elements per sequence."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Step:
    """One op on views and named weights. `label` is its place in the model ("blk.3.attention")."""

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
    outputs: view by name: "hidden" [R, D] and, if there is a head, "logits" [R, V] of "main"; "encoder_hidden" [R, D]
             of "encode"; "streams" [T, W], if a draft model reads them.
    facts:   vocabulary, width, layers, context, ... as resolved from spec and checkpoint.
    states:  states of recurrent steps, by name.
    inputs:  views whose rows are part of a batch (Batch.given), by name.
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
    """Input of one run of a program: integer arrays, made by the engine.

    tokens      i32 [T]     token ids, sequence after sequence, no padding
    positions   i32 [T]     position of each token in its sequence, from 0
    starts      i32 [B + 1] rows starts[b] .. starts[b + 1] belong to sequence b
    blocks      i32 [B, M]  KV block ids of each sequence; token p of a sequence is in block p // block_size
    logit_rows  i32 [R]     rows whose hidden state and logits are wanted
    types       i32 [T]     token types (segment ids), zeros unless the model has them
    cross_blocks i32 [B, M], cross_lengths i32 [B]: encoder memory of each sequence (encoder-decoders)
    adapters    i32 [B]     adapter index of each sequence, -1 for none; None: no sequence has an adapter
    adapter_starts i32 [B]  first position of each sequence at which its adapter has an effect; None: 0
    windows     by window: i32 [B, M], the `blocks` of layers whose attention sees `window` tokens back; blocks before
                            the first visible position are never read. None: `blocks` is used for all layers
    slots       i32 [B]     slot of each sequence in the memory of recurrent steps, the same in all layers; its state
                            is zeros at position 0. None: 0, 1, ... B - 1
    limits      i32 [B]     most tokens that each sequence may have, which selects its rotary frequencies if they depend
                            on the length; None: its tokens after this run

    given       by name: f32 [T, W], the rows of Network.inputs; None: there are none

    gone_on                 number of `go_on` calls so far

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
    adapter_starts: np.ndarray | None = None
    given: Mapping[str, np.ndarray] | None = None
    gone_on: int = 0

    def go_on(self, tokens: Sequence[int]) -> None:
        """Become the next step of the same sequences, in the same blocks: one token each, one position later.

        A program whose last run was the step before reads only tokens and positions again.
        """
        self.tokens[:] = tokens
        self.positions += 1
        self.gone_on += 1


OPS = {op.name: op for op in (
    Op("embed", "batch", "y[t] = table[tokens[t]] * scale. With `vocabulary`, the table has rows first .. first + V - "
       "1 of a table of `vocabulary` rows, and y[t] is -0.0 for other tokens, so that sums over devices are exact", (),
       ("y",), ("table",), {"scale": 1.0, "first": 0, "vocabulary": 0}),
    Op("ngram_ids", "batch", "y i32 [T, H]: rows, in one table, of the n-grams that end at each token: for n = 2 .. N, "
       "H / (N - 1) parts of the table, `sizes` rows each. Row of part j: h % sizes[j], after the rows of earlier "
       "parts; h = the exclusive or, over i < n, of multipliers[i] * token[t - i]. From the last `separator` before t "
       "backwards, and before the text, every token is `separator`. `state` [N - 1]: the last tokens + 1, or 0", (),
       ("y",), (), {"state": REQUIRED, "multipliers": REQUIRED, "sizes": REQUIRED, "separator": REQUIRED}),
    Op("embed_ids", "rows", "y [T, N * E] = the rows ids[t, n] of the table, side by side; first, vocabulary: as in "
       "`embed`", ("ids",), ("y",), ("table",), {"first": 0, "vocabulary": 0}),
    Op("embed_position", "batch", "y[t] = x[t] + table[positions[t] + offset]", ("x",), ("y",), ("table",),
       {"offset": 0}),
    Op("embed_type", "batch", "y[t] = x[t] + table[types[t]]", ("x",), ("y",), ("table",)),
    Op("rms_norm", "rows", "y = x / sqrt(mean(x^2) + eps) * weight, over each of `groups` equal column groups "
       "(weight [D] or [D / groups])", ("x",), ("y",), ("weight?",), {"eps": REQUIRED, "groups": 1}),
    Op("layer_norm", "rows", "y = (x - mean) / sqrt(var + eps) * weight + bias, groups as in rms_norm",
       ("x",), ("y",), ("weight?", "bias?"), {"eps": REQUIRED, "groups": 1}),
    Op("linear", "rows", "y [rows, N] = x [rows, K] @ weight[N, K].T + bias[N]", ("x",), ("y",), ("weight", "bias?")),
    Op("rope_angles", "batch", "y [T, 2F] = (cos, sin)((positions + offset) * inv_freq[F]) * scale; cosines first. "
       "border > 0: sequences whose limit (Batch.limits) is above it use `long` and long_scale instead of inv_freq and "
       "scale; without `long`, inv_freq[i] * s^(-i / (span or F - 1)), s = stretch * (limit / border - 1) + 1, and "
       "long_scale", (), ("y",), ("inv_freq", "long?"),
       {"scale": 1.0, "border": 0, "long_scale": 1.0, "stretch": 1.0, "span": 0.0, "offset": 0}),
    Op("rope", "heads", "rotate columns [start, start + 2F) of each head by `angles` [T, 2F]; pairing 'half' rotates "
       "(i, i + F), 'adjacent' (2i, 2i + 1); other columns are copied",
       ("x", "angles"), ("y",), (), {"heads": REQUIRED, "head_dim": REQUIRED, "pairing": "half", "start": 0}),
    Op("head_concat", "heads", "y [T, H * (A + B)]: head h is (a head h, b head h); b [T, B] is shared by all heads",
       ("a", "b"), ("y",), (), {"heads": REQUIRED}),
    Op("head_linear", "heads", "y [T, H * N]: head h = weight[h] [N, K] @ head h of x [T, H * K]",
       ("x",), ("y",), ("weight",), {"heads": REQUIRED}),
    Op("cache_write", "batch", "store k [T, G*E], v [T, G*E_v] of each token at its position in `cache`; no v if "
       "values are a prefix of keys; a cache of entries stores only rows of tokens that end a window", ("k", "v?"), (),
       (), {"cache": REQUIRED}),
    Op("pool", "batch", "y [T, E]: the entry of a token that ends a window of `every` tokens: by column the sum of the "
       "values of the last S = `series` windows, weighted by the softmax of their gates + bias[position % every]; rows "
       "of other tokens are 0. `cache` has [gates S * E, values S * E] of each token; window s, the oldest first, uses "
       "the columns from s * E on", (), ("y",), ("bias",), {"cache": REQUIRED, "every": REQUIRED, "series": 1}),
    Op("index_select", "batch", "y i32 [T, W]: bit p % 32 of word p // 32 is set if key p of `cache` is among the "
       "top_k best visible keys of the row, by the score sum over heads h of weights[t, h] * max(q head h . key, 0); "
       "of equal scores the earlier key. In a cache of entries p is the index of an entry; entries of complete windows "
       "are visible", ("q", "weights"), ("y",), (), {"cache": REQUIRED, "heads": REQUIRED, "top_k": REQUIRED}),
    Op("index_tokens", "batch", "y i32 [T, W]: the bits of tokens for bits of entries: bit p is set if bit p // "
       "`every` of x i32 [T, V] is, or if token p is in the row's incomplete window: p // every = (position + 1) // "
       "every and p <= position", ("x",), ("y",), (), {"every": REQUIRED}),
    Op("block_select", "batch", "y i32 [T, H * W]: each head of q selects for itself: bit p of its W words is set if "
       "block p, keys block * p .. block * p + block - 1 of `cache`, is among the top_k best blocks that the row sees, "
       "by the largest product of the query and a visible key; the last `local` blocks up to the row's own come first; "
       "of equal blocks the earlier", ("q",), ("y",), (),
       {"cache": REQUIRED, "heads": REQUIRED, "block": REQUIRED, "top_k": REQUIRED, "local": 0}),
    Op("attention", "batch", "y [T, H*E_v] = softmax(softcap(scale * q k^T) + bias, over visible cached keys) v; query "
       "head h uses key head h // (H / G). window w > 0: query i sees keys i-w+1 .. i (.. i+w-1 if not causal). chunk "
       "c > 0: only keys from c * (i // c) on. slopes [H]: ALiBi bias -slope * |key - query position|. sinks [H]: one "
       "more score per head that takes probability and has no value. buckets [n, H]: T5's relative position bias. "
       "selected i32 [T, W]: only keys whose bits are set; block b > 0: [T, G * W], W words per key head, whose bit p "
       "is that of keys b * p .. b * p + b - 1. position_buckets [2R + 1]: disentangled attention: n = "
       "position_buckets[d + R] is the embedding of relative position d = key - query, clipped to -R .. R; q k^T of "
       "query i and key j gets + c2p[i, h, n] + p2c[j, h, n]; c2p, p2c [T, H*N] are inputs in place of `selected`, "
       "with the whole sequence in the batch; or c2p alone. entries: a cache of entries; one softmax over keys and "
       "entries of complete windows, with `selected` bits of the entries. cross: a cross cache; one softmax over keys "
       "and all keys of that cache, whose scores have no bias", ("q", "selected or c2p?", "p2c?"), ("y",),
       ("slopes?", "sinks?", "buckets?", "position_buckets?"),
       {"cache": REQUIRED, "heads": REQUIRED, "scale": REQUIRED, "causal": True, "window": 0, "softcap": 0.0,
        "bucket_distance": 0, "chunk": 0, "block": 0, "entries": "", "cross": ""}),
    Op("causal_conv", "batch", "y[t, c] = act(bias[c] + sum over j < K of weight[c, j] * x[t - K + 1 + j, c]); `state` "
       "[K - 1, C] has the rows of x before the batch, and then the last rows. kind: silu or none",
       ("x",), ("y",), ("weight", "bias?"), {"state": REQUIRED, "kind": "none"}),
    Op("linear_attention", "batch", "y [T, H*dv] = S^T q + skip * v, S = exp(steps * rate) S + k u^T [H, dk, dv] of a "
       "sequence; u = v, or steps * v if scaled, or beta * (v - (exp(steps * rate) S)^T k); steps [T, H] or [T, H*dk], "
       "rate [H] or [H*dk]; head h uses key head h // (H / G), or h % G if tiled", ("q", "k", "v", "steps?", "beta?"),
       ("y",), ("rate", "skip?"),
       {"state": REQUIRED, "heads": REQUIRED, "key_heads": REQUIRED, "tiled": False, "scaled": False}),
    Op("gated_recurrence", "batch", "y = h = a h + sqrt(1 - a^2) sigmoid(entry + entry_bias) x, h [W] of a sequence; "
       "log a = -8 softplus(rate) sigmoid(fade + fade_bias), a = 0 at position 0; entry: input gate, fade: recurrence "
       "gate",
       ("x", "entry", "fade"), ("y",), ("rate", "entry_bias", "fade_bias"), {"state": REQUIRED}),
    Op("wkv", "batch", "y = (a + w v) / (b + w), w = e^(first + k); then a = e^decay a + e^k v, b = e^decay b + e^k; "
       "state [3, W]: a and b of each channel, divided by e^m, and m, the largest exponent so far",
       ("k", "v"), ("y",), ("decay", "first"), {"state": REQUIRED}),
    Op("act", "elements", "y = act(x). xielu: y = positive * x^2 + beta * x for x > 0, else "
       "negative * (exp(min(x, eps)) - 1 - x) + beta * x", ("x",), ("y",), (),
       {"kind": REQUIRED, "positive": 0.0, "negative": 0.0, "beta": 0.0, "eps": 0.0}),
    Op("act_mul", "elements", "y = act(gate) * up", ("gate", "up"), ("y",), (),
       {"kind": REQUIRED, "limit": 0.0, "alpha": 0.0}),
    Op("gate_rows", "rows", "y = x * sigmoid(gate), or x * gate if plain; gate [T, H] has one column per column group "
       "of x, of H equal groups", ("x", "gate"), ("y",), (), {"plain": False}),
    Op("mul", "elements", "y = a * b", ("a", "b"), ("y",)),
    Op("permute", "rows", "y[t, j] = x[t, order[j]], for a matrix with permuted columns", ("x",), ("y",), ("order",)),
    Op("add", "elements", "y = a + scale * b", ("a", "b"), ("y",), (), {"scale": 1.0}),
    Op("scale", "elements", "y = x * scale * weight + shift", ("x",), ("y",), ("weight?", "shift?"),
       {"scale": REQUIRED}),
    Op("scale_by_position", "batch", "y = x * (1 + scale * ln(1 + floor(q))), q = (position + offset) / length; smooth "
       "1: ln(max(1, q)), 2: y = x * (1 + q)^scale", ("x",), ("y",), (),
       {"scale": REQUIRED, "length": REQUIRED, "offset": 0, "smooth": 0}),
    Op("sparsify", "rows", "y = max(x - mean - deviations * std, 0)", ("x",), ("y",), (), {"deviations": REQUIRED}),
    Op("match_rms", "rows", "each part [D] of x [T, G * D] times sqrt(mean(like^2) / max(mean(x^2), least)), like [T, "
       "D]", ("x", "like"), ("y",), (), {"least": REQUIRED}),
    Op("mix", "rows", "y [T, I * D], which must not overlap x: part i = part i of base + sum over j of (gates[t, i * J "
       "+ j] + plus) * part j of x [T, J * D]", ("base", "x", "gates"), ("y",), (), {"parts": REQUIRED, "plus": 0.0}),
    Op("balance", "rows", "Sinkhorn normalisation: y [T, S * S], which must not overlap x, from a matrix [S, S] per "
       "row: softmax of its rows plus eps; then columns and rows in turn are divided by their sums plus eps, columns "
       "first and last, `times` times; then transposed", ("x",), ("y",), (), {"times": REQUIRED, "eps": 0.0}),
    Op("softcap", "elements", "y = cap * tanh(x / cap)", ("x",), ("y",), (), {"cap": REQUIRED}),
    Op("clamp", "elements", "y = min(max(x, -limit), limit)", ("x",), ("y",), (), {"limit": REQUIRED}),
    Op("signed_sqrt", "elements", "y = x / |x| * sqrt(max(|x|, least)), 0 for 0", ("x",), ("y",), (),
       {"least": REQUIRED}),
    Op("softplus", "rows", "y = log(1 + exp(x + bias)), clamped to least .. most", ("x",), ("y",), ("bias?",),
       {"least": 0.0, "most": 1e30}),
    Op("select_rows", "batch", "y [R, D] = x[logit_rows]", ("x",), ("y",)),
    Op("copy", "elements", "y = x", ("x",), ("y",)),
    Op("moe_route", "rows", "ids i32 [T, S], gates f32 [T, S]: score = softmax, sigmoid or sqrt(softplus) of logits (+ "
       "bias for choosing); keep the best `top_groups` of `groups` (by the sum of their `group_best` best scores), "
       "then choose the best S; gates are the scores. 'softmax_topk': gates are the softmax of the S chosen logits, "
       "'sigmoid_topk': their sigmoid. 'sparsemixer': S times choose the largest remaining logit l, its gate is the "
       "softmax over the remaining logits with (l - logit) / max(|logit|, l) <= 2 * jitter. normalize: divide gates by "
       "their sum, at least `least_sum`; then multiply by scale and by the expert's scale. With experts [T, S], these "
       "expert ids are chosen", ("logits", "experts?"), ("ids", "gates"), ("bias?", "scales?"),
       {"score": "softmax", "normalize": False, "least_sum": 0.0, "scale": 1.0, "groups": 1, "top_groups": 1,
        "group_best": 2, "jitter": 0.0}),
    Op("expert_scale", "rows", "y [T*S, D] row (t, s) = gates[t, s] * x[t]", ("x", "gates"), ("y",)),
    Op("expert_linear", "rows", "y [T*S, N] row (t, s) = weight[ids[t, s]] [N, K] @ x row; x has T rows (each for all "
       "S routes) or T*S; bias [X * N]. With `first`, the weight has experts first .. first + X - 1 of a larger stack, "
       "and rows of routes to other experts are 0", ("x", "ids"), ("y",), ("weight", "bias?"), {"first": 0}),
    Op("expert_combine", "rows", "y [T, D] = sum over s of gates[t, s] * x[(t, s)]; without gates if not weighted",
       ("x", "gates"), ("y",), (), {"weighted": True}),
)}

_ALL = OPS | EXCHANGES | ADAPTING


def op_of(step: Step) -> Op | None:
    """The row of OPS, EXCHANGES or ADAPTING for a step's op; None if there is none."""
    return _ALL.get(step.op)


def param(step: Step, name: str) -> Any:
    """The step's parameter, or the op's default."""
    return step.params.get(name, _ALL[step.op].params[name])


def states_of(step: Step) -> dict[str, str]:
    """States that a step reads and writes, by parameter: "state", and parameters whose names end in "_state"."""
    return {key: name for key, name in step.params.items() if key == "state" or key.endswith("_state")}


def caches_of(step: Step) -> dict[str, str]:
    """Caches that a step reads and writes, by parameter: "cache", "entries" and "cross"."""
    return {key: step.params[key] for key in CACHES if step.params.get(key)}


def local(step: Step) -> str:
    """The inputs that a row of the step's output depends on, as a key of op_rows.LOCAL."""
    return _ALL[step.op].local

