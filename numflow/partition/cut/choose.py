"""Sharing of each step of a stage among the devices of a group, decided from the last step to the first.

What an output projection can take in pieces decides how everything before it is cut:

    attn_q, attn_k, attn_v   rows      } by heads     down to the step that reads the block's input,
    norms, rotation, cache, attention  }              which every device has whole
    attn_output              columns                  each device has a partial sum: one all_reduce
    ffn_gate, ffn_up, act    rows      } by columns of ffn_down
    ffn_down                 columns                  one all_reduce
    ssm_in, convolution      rows, channels           } by heads or channels of the state (recurrent.py), what one
    recurrent step, its gate                           } step makes of several kinds taken apart first (apart.py)
    ssm_out                  columns                  one all_reduce
    experts                  by expert                one all_reduce, together with the shared expert's
    embedding                rows                     one all_reduce, in which one device has each token's row
    head                     rows                     one all_gather

Other steps run on every device where RULES says so; an op without a rule is an error. A step whose cut does not fit (a
norm over all heads, blocks of quantised weights that are wider than a device's heads) gets its input whole by an
all_gather instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from numflow.errors import NetworkError
from numflow.ops import OPS, Cache, Network, Step, View, Weight, param
from numflow.partition.cut.recurrent import RECURRENT, StateCut, read_in_pieces
from numflow.partition.cut.slices import column_unit
from numflow.partition.cut.spans import Spans, even_spans, head_spans, holders, is_aligned, kv_spans, scaled

WHOLE, COLUMNS, SUM, EXPERTS, TOKENS, FIRST = "whole", "columns", "sum", "experts", "tokens", "first"
_ROW_UNIT = 16  # rows of a matrix that kernels take together: cuts between keep them whole


@dataclass(frozen=True)
class Sharding:
    """Sharing of one step.

    how: WHOLE    every device runs it on whole views
         COLUMNS  each device makes `spans` of the output's columns
         SUM      each device has `spans` of the input's columns and makes a partial sum of the output
         EXPERTS  each device has `spans` of the experts
         TOKENS   each device has `spans` of the rows of a table of tokens
         FIRST    only the first device runs it
    """

    how: str
    spans: Spans = ()


@dataclass(frozen=True)
class CacheCut:
    """Query heads and key/value heads of each device in one attention; fits: attn_output may be cut the same way."""

    heads: Spans
    kv_heads: Spans
    fits: bool


def cut_caches(network: Network, shares: tuple[float, ...]) -> dict[str, CacheCut]:
    """By cache, from the attentions that read it."""
    cuts: dict[str, CacheCut] = {}
    for steps in network.entries.values():
        for at, step in enumerate(steps):
            if step.op == "attention" and param(step, "cache") not in cuts:
                cache = network.caches[param(step, "cache")]
                found, reader = _output_projection(steps[at + 1:], step.outputs[0])
                weight = network.weights[reader.weights["weight"]] if reader else None
                cuts[cache.name] = _cache_cut(param(step, "heads"), cache, found.width, weight, shares)
    return cuts


def _output_projection(steps: tuple[Step, ...], found: View) -> tuple[View, Step | None]:
    """The view that the output projection reads, and the projection, of what an attention found."""
    for step in steps:
        if step.op == "head_linear" and found in step.inputs:
            found = step.outputs[0]
        elif step.op == "linear" and found in step.inputs:
            return found, step
    return found, None


def _cache_cut(heads: int, cache: Cache, width: int, output: Weight | None, shares: tuple[float, ...]) -> CacheCut:
    """Heads in proportion to the shares, on borders that the output projection's columns may be cut at, if it works.

    width: columns of the output projection, of all heads.
    """
    free, size = head_spans(heads, cache.kv_heads, shares), width // heads
    unit = column_unit(output) if output is not None else 0
    spans, fits = free, is_aligned(scaled(free, size), unit)
    if unit and not fits:
        heads_unit = next(n for n in range(1, unit + 1) if n * size % unit == 0)
        aligned = head_spans(heads, cache.kv_heads, shares, heads_unit)
        if len(holders(aligned)) == len(holders(free)) and is_aligned(scaled(aligned, size), unit):
            spans, fits = aligned, True
    return CacheCut(spans, kv_spans(spans, heads, cache.kv_heads), fits)


def choose(network: Network, entry: str, shares: tuple[float, ...], caches: Mapping[str, CacheCut],
           states: Mapping[str, StateCut], embedding: str, head: str) -> list[Sharding]:
    """A choice for every step of an entry.

    shares: of the devices of the group. caches, states: of `cut_caches` and `cut_states` on the whole model.
    embedding, head: "split" or "placed" (on the first device of the group).
    """
    steps = network.entries[entry]
    if len(shares) == 1:
        return [Sharding(WHOLE)] * len(steps)
    return _Chooser(network, steps, shares, caches, states, embedding, head).all()


class _Chooser:
    """Walks the steps from the last one; `wanted` has the cut that later steps ask of a view."""

    def __init__(self, network, steps, shares, caches, states, embedding, head):
        self.network, self.steps, self.shares, self.caches, self.states = network, steps, shares, caches, states
        self.embedding, self.head = embedding, head
        self.wanted: dict[View, Spans] = {}

    def all(self) -> list[Sharding]:
        choices = []
        for at in range(len(self.steps) - 1, -1, -1):
            step = self.steps[at]
            spans = self.wanted.get(step.outputs[0]) if step.outputs else None
            for view in step.outputs:
                self.wanted = {w: s for w, s in self.wanted.items() if not w.overlaps(view)}
            if step.op not in self.RULES:
                raise NetworkError(f"{step}: no rule says how devices of a group share {step.op}")
            choices.append(self.RULES[step.op](self, at, step, spans))
        return choices[::-1]

    def _whole(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        return Sharding(WHOLE)

    def _elementwise(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        if spans is None:
            return Sharding(WHOLE)
        self.wanted |= dict.fromkeys(step.inputs, spans)
        return Sharding(COLUMNS, spans)

    def _norm(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        if spans is None:
            return Sharding(WHOLE)
        self.wanted[step.inputs[0]] = spans  # in pieces in any case: what makes them is cut, and gathered if need be
        groups = param(step, "groups")
        fits = groups > 1 and is_aligned(spans, step.outputs[0].width // groups)
        return Sharding(COLUMNS, spans) if fits else Sharding(WHOLE)

    def _rope(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        if spans is None or not is_aligned(spans, param(step, "head_dim")):
            return Sharding(WHOLE)
        self.wanted[step.inputs[0]] = spans
        return Sharding(COLUMNS, spans)

    def _head_concat(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        heads, y = param(step, "heads"), step.outputs[0]
        if spans is None or not is_aligned(spans, y.width // heads):
            return Sharding(WHOLE)
        self.wanted |= {view: of_heads(spans, y, view) for view in own_columns(step)}
        return Sharding(COLUMNS, spans)

    def _head_linear(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        (x,), (y,) = step.inputs, step.outputs
        if spans is None or not is_aligned(spans, y.width // param(step, "heads")):
            return Sharding(WHOLE)
        self.wanted[x] = of_heads(spans, y, x)
        return Sharding(COLUMNS, spans)

    def _gate_rows(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        (x, gate), (y,) = step.inputs, step.outputs
        if spans is None or not is_aligned(spans, y.width // gate.width):
            return Sharding(WHOLE)
        self.wanted |= {x: spans, gate: of_heads(spans, y, gate)}
        return Sharding(COLUMNS, spans)

    def _attention(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        cache = self.network.caches[param(step, "cache")]
        heads = self.caches[cache.name].heads
        self.wanted |= {view: scaled(heads, view.width // param(step, "heads")) for view in step.inputs
                        if self.network.buffers[view.buffer].dtype == "f32"}
        return Sharding(COLUMNS, scaled(heads, cache.value_dim))

    def _cache_write(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        cache = self.network.caches[param(step, "cache")]
        if cache.name not in self.caches:  # of an index: no attention reads it
            return Sharding(WHOLE)
        kv_heads = self.caches[cache.name].kv_heads
        for view, size in zip(step.inputs, (cache.k_dim, cache.v_dim)):
            self.wanted[view] = scaled(kv_heads, size)
        return Sharding(COLUMNS, kv_heads)

    def _channels(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        """Columns of the input and of the state alike."""
        if spans is None:
            return Sharding(WHOLE)
        self.wanted[step.inputs[0]] = spans
        return Sharding(COLUMNS, spans)

    def _recurrent(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        cut = self.states[param(step, "state")]
        self.wanted |= read_in_pieces(step, cut)
        return Sharding(COLUMNS, cut.columns)

    def _linear(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        x, y, weight = step.inputs[0], step.outputs[0], self.network.weights[step.weights["weight"]]
        if spans is not None:
            return Sharding(COLUMNS, spans)
        rows = self._rows(y.width)
        spans, fits = self._input(at, x, weight)
        if spans is not None:
            self.wanted[x] = spans
            return Sharding(SUM, spans) if fits else Sharding(COLUMNS, rows)
        if y == self.network.outputs.get("logits"):
            return Sharding(COLUMNS, rows) if self.head == "split" else Sharding(FIRST)
        return Sharding(WHOLE)

    def _rows(self, count: int) -> Spans:
        """Rows of a matrix for each device. A table that is the output matrix too is cut here and there alike, so that
        a device's rows of it are one weight."""
        return even_spans(count, self.shares, _ROW_UNIT if count >= 4 * _ROW_UNIT * len(self.shares) else 1)

    def _input(self, at: int, x: View, weight: Weight) -> tuple[Spans | None, bool]:
        """Spans in which a linear's input is made (None: whole), and whether the weight's columns fit that cut."""
        made = self._writer(at, x)
        if made is None:
            return None, False
        source, mixer = self.steps[made], self._mixer_of(made)
        if mixer is not None and mixer.op == "attention":
            cut = self.caches[param(mixer, "cache")]
            return scaled(cut.heads, x.width // param(mixer, "heads")), cut.fits
        if mixer is not None:
            state = self.states[param(mixer, "state")]
            return state.columns, state.fits
        if source.op == "causal_conv" and x in self.wanted and is_aligned(self.wanted[x], column_unit(weight)):
            return self.wanted[x], True  # as the recurrent step behind it reads them
        if source.op in ("act", "act_mul", "mul") and all(self._by_columns(made, view) for view in source.inputs):
            unit = column_unit(weight)
            spans = even_spans(x.width, self.shares, max(unit, 1))
            if unit and len(holders(spans)) == min(len(self.shares), x.width):
                return spans, True
            return even_spans(x.width, self.shares), unit == 1
        return None, False

    def _mixer_of(self, made: int) -> Step | None:
        """The step, if it is an attention or recurrent, or the one whose output it multiplies with a gate or by heads,
        or norms."""
        source = self.steps[made]
        if source.op in ("attention", *RECURRENT):
            return source
        if source.op not in ("act_mul", "mul", "gate_rows", "head_linear", "rms_norm"):
            return None
        writers = [self._writer(made, view) for view in source.inputs]
        found = [self._mixer_of(writer) for writer in writers if writer is not None]
        return next((step for step in found if step is not None), None)

    def _by_columns(self, at: int, view: View) -> bool:
        """Whether a linear makes a view, or a convolution of products of such: each column by itself."""
        made = self._writer(at, view)
        if made is None or self.steps[made].op not in ("linear", "causal_conv", "mul"):
            return False
        return self.steps[made].op == "linear" or all(self._by_columns(made, x) for x in self.steps[made].inputs)

    def _writer(self, at: int, view: View) -> int | None:
        """The step before `at` that wrote exactly this view last; None if another step wrote some of it since."""
        for i in range(at - 1, -1, -1):
            if any(view.overlaps(y) for y in self.steps[i].outputs):
                return i if view in self.steps[i].outputs else None
        return None

    def _embed(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        rows = self._rows(self.network.weights[step.weights["table"]].shape[0])
        return Sharding(TOKENS, rows) if self.embedding == "split" else Sharding(FIRST)

    def _experts(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        experts = self.network.weights[step.weights["weight"]].groups
        return Sharding(EXPERTS, even_spans(experts, self.shares))

    RULES: ClassVar = {
        **dict.fromkeys((op.name for op in OPS.values() if op.local == "elements"), _elementwise),
        "scale_by_position": _elementwise,  # of the row's position beside the element
        **dict.fromkeys(("embed_position", "embed_type", "rope_angles", "permute", "select_rows",
                         "moe_route", "index_select", "sparsify", "match_rms", "mix", "balance", "pool",
                         "expert_scale",
                         "expert_combine"), _whole),
        **dict.fromkeys(("send", "receive"), _whole),  # exchanges between groups
        "rms_norm": _norm, "layer_norm": _norm, "rope": _rope,
        "head_concat": _head_concat, "head_linear": _head_linear, "gate_rows": _gate_rows, "attention": _attention,
        "cache_write": _cache_write, "causal_conv": _channels, "softplus": _channels,
        **dict.fromkeys(RECURRENT, _recurrent), "linear": _linear, "embed": _embed,
        "expert_linear": _experts,
    }


def of_heads(spans: Spans, y: View, x: View) -> Spans:
    """Spans of y as spans of x, where both are as many heads side by side."""
    return tuple((begin * x.width // y.width, end * x.width // y.width) for begin, end in spans)


def own_columns(concat: Step) -> list[View]:
    """The inputs of a `head_concat` that have columns for each head: both, or the first."""
    (a, b), y = concat.inputs, concat.outputs[0]
    return [a, b] if a.width + b.width == y.width else [a]
