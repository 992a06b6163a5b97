"""How each step of a stage is shared by the devices of a group: decided from the last step to the first.

What an output projection can take in pieces decides how everything before it is cut:

    attn_q, attn_k, attn_v   rows      } by heads     down to the step that reads the block's input,
    norms, rotation, cache, attention  }              which every device has whole
    attn_output              columns                  each device has a partial sum: one all_reduce
    ffn_gate, ffn_up, act    rows      } by columns of ffn_down
    ffn_down                 columns                  one all_reduce
    experts                  by expert                one all_reduce, together with the shared expert's
    embedding                rows                     one all_reduce, in which one device has each token's row
    head                     rows                     one all_gather

All other steps run on every device. A step whose cut does not fit (a norm over all heads, blocks of quantised weights
that are wider than a device's heads) gets its input whole by an all_gather instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from numflow.ops import Cache, Network, Step, View, Weight, param
from numflow.partition.slices import column_unit
from numflow.partition.spans import Spans, even_spans, head_spans, holders, is_aligned, kv_spans, scaled

WHOLE, COLUMNS, SUM, EXPERTS, TOKENS, FIRST = "whole", "columns", "sum", "experts", "tokens", "first"
ELEMENTWISE = ("act", "act_mul", "add", "scale", "softcap", "clamp", "copy")
_ROW_UNIT = 16  # rows of a matrix that kernels take together: cuts between keep them whole


@dataclass(frozen=True)
class Choice:
    """How a step is shared.

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
                reader = next((s for s in steps[at:] if s.op == "linear" and step.outputs[0] in s.inputs), None)
                weight = network.weights[reader.weights["weight"]] if reader else None
                cuts[cache.name] = _cache_cut(param(step, "heads"), cache, weight, shares)
    return cuts


def _cache_cut(heads: int, cache: Cache, output: Weight | None, shares: tuple[float, ...]) -> CacheCut:
    """Heads in proportion to the shares, on borders that the output projection's columns may be cut at, if it works."""
    free = head_spans(heads, cache.kv_heads, shares)
    unit = column_unit(output) if output is not None else 0
    spans, fits = free, is_aligned(scaled(free, cache.v_dim), unit)
    if unit and not fits:
        heads_unit = next(n for n in range(1, unit + 1) if n * cache.v_dim % unit == 0)
        aligned = head_spans(heads, cache.kv_heads, shares, heads_unit)
        if len(holders(aligned)) == len(holders(free)) and is_aligned(scaled(aligned, cache.v_dim), unit):
            spans, fits = aligned, True
    return CacheCut(spans, kv_spans(spans, heads, cache.kv_heads), fits)


def choose(network: Network, entry: str, shares: tuple[float, ...], caches: Mapping[str, CacheCut], embedding: str,
           head: str) -> list[Choice]:
    """A choice for every step of an entry.

    shares: of the devices of the group. caches: of `cut_caches` on the whole model.
    embedding, head: "split" or "placed" (on the first device of the group).
    """
    steps = network.entries[entry]
    if len(shares) == 1:
        return [Choice(WHOLE)] * len(steps)
    return _Chooser(network, steps, shares, caches, embedding, head).all()


class _Chooser:
    """Walks the steps from the last one; `wanted` has the cut that later steps ask of a view."""

    def __init__(self, network, steps, shares, caches, embedding, head):
        self.network, self.steps, self.shares, self.caches = network, steps, shares, caches
        self.embedding, self.head = embedding, head
        self.wanted: dict[View, Spans] = {}

    def all(self) -> list[Choice]:
        choices = []
        for at in range(len(self.steps) - 1, -1, -1):
            step = self.steps[at]
            spans = self.wanted.get(step.outputs[0]) if step.outputs else None
            for view in step.outputs:
                self.wanted = {w: s for w, s in self.wanted.items() if not overlap(w, view)}
            rule = self.RULES.get(step.op, _Chooser._whole)
            choices.append(rule(self, at, step, spans))
        return choices[::-1]

    def _whole(self, at: int, step: Step, spans: Spans | None) -> Choice:
        return Choice(WHOLE)

    def _elementwise(self, at: int, step: Step, spans: Spans | None) -> Choice:
        if spans is None:
            return Choice(WHOLE)
        self.wanted |= dict.fromkeys(step.inputs, spans)
        return Choice(COLUMNS, spans)

    def _norm(self, at: int, step: Step, spans: Spans | None) -> Choice:
        if spans is None:
            return Choice(WHOLE)
        self.wanted[step.inputs[0]] = spans  # in pieces in any case: what makes them is cut, and gathered if need be
        groups = param(step, "groups")
        fits = groups > 1 and is_aligned(spans, step.outputs[0].width // groups)
        return Choice(COLUMNS, spans) if fits else Choice(WHOLE)

    def _rope(self, at: int, step: Step, spans: Spans | None) -> Choice:
        if spans is None or not is_aligned(spans, param(step, "head_dim")):
            return Choice(WHOLE)
        self.wanted[step.inputs[0]] = spans
        return Choice(COLUMNS, spans)

    def _head_concat(self, at: int, step: Step, spans: Spans | None) -> Choice:
        heads, (a, _), y = param(step, "heads"), step.inputs, step.outputs[0]
        if spans is None or not is_aligned(spans, y.width // heads):
            return Choice(WHOLE)
        self.wanted[a] = tuple((begin * a.width // y.width, end * a.width // y.width) for begin, end in spans)
        return Choice(COLUMNS, spans)

    def _attention(self, at: int, step: Step, spans: Spans | None) -> Choice:
        cache = self.network.caches[param(step, "cache")]
        heads = self.caches[cache.name].heads
        self.wanted[step.inputs[0]] = scaled(heads, cache.k_dim)
        return Choice(COLUMNS, scaled(heads, cache.v_dim))

    def _cache_write(self, at: int, step: Step, spans: Spans | None) -> Choice:
        cache = self.network.caches[param(step, "cache")]
        kv_heads = self.caches[cache.name].kv_heads
        for view, size in zip(step.inputs, (cache.k_dim, cache.v_dim), strict=True):
            self.wanted[view] = scaled(kv_heads, size)
        return Choice(COLUMNS, kv_heads)

    def _linear(self, at: int, step: Step, spans: Spans | None) -> Choice:
        x, y, weight = step.inputs[0], step.outputs[0], self.network.weights[step.weights["weight"]]
        if spans is not None:
            return Choice(COLUMNS, spans)
        rows = self._rows(y.width)
        spans, fits = self._input(at, x, weight)
        if spans is not None:
            self.wanted[x] = spans
            return Choice(SUM, spans) if fits else Choice(COLUMNS, rows)
        if y == self.network.outputs.get("logits"):
            return Choice(COLUMNS, rows) if self.head == "split" else Choice(FIRST)
        return Choice(WHOLE)

    def _rows(self, count: int) -> Spans:
        """Rows of a matrix for each device. A table that is the output matrix too is cut here and there alike, so that
        a device's rows of it are one weight."""
        return even_spans(count, self.shares, _ROW_UNIT if count >= 4 * _ROW_UNIT * len(self.shares) else 1)

    def _input(self, at: int, x: View, weight: Weight) -> tuple[Spans | None, bool]:
        """How a linear's input is made in pieces, None if it is not; whether the weight's columns fit that cut."""
        made = self._writer(at, x)
        if made is None:
            return None, False
        source = self.steps[made]
        attention = source if source.op == "attention" else self._gated_attention(made, source)
        if attention is not None:
            cache = self.network.caches[param(attention, "cache")]
            cut = self.caches[cache.name]
            return scaled(cut.heads, cache.v_dim), cut.fits
        if source.op in ("act", "act_mul") and all(self._made_by_linear(made, view) for view in source.inputs):
            unit = column_unit(weight)
            spans = even_spans(x.width, self.shares, max(unit, 1))
            if unit and len(holders(spans)) == min(len(self.shares), x.width):
                return spans, True
            return even_spans(x.width, self.shares), unit == 1
        return None, False

    def _gated_attention(self, made: int, source: Step) -> Step | None:
        """The attention whose output a step only multiplies with a gate."""
        if source.op != "act_mul":
            return None
        writers = [self._writer(made, view) for view in source.inputs]
        steps = [self.steps[w] for w in writers if w is not None]
        return next((step for step in steps if step.op == "attention"), None)

    def _made_by_linear(self, at: int, view: View) -> bool:
        made = self._writer(at, view)
        return made is not None and self.steps[made].op == "linear"

    def _writer(self, at: int, view: View) -> int | None:
        """The step before `at` that wrote exactly this view last; None if another step wrote some of it since."""
        for i in range(at - 1, -1, -1):
            if any(overlap(view, y) for y in self.steps[i].outputs):
                return i if view in self.steps[i].outputs else None
        return None

    def _embed(self, at: int, step: Step, spans: Spans | None) -> Choice:
        rows = self._rows(self.network.weights[step.weights["table"]].shape[0])
        return Choice(TOKENS, rows) if self.embedding == "split" else Choice(FIRST)

    def _experts(self, at: int, step: Step, spans: Spans | None) -> Choice:
        experts = self.network.weights[step.weights["weight"]].groups
        return Choice(EXPERTS, even_spans(experts, self.shares))

    RULES: ClassVar = {
        **dict.fromkeys(ELEMENTWISE, _elementwise), "rms_norm": _norm, "layer_norm": _norm, "rope": _rope,
        "head_concat": _head_concat, "attention": _attention, "cache_write": _cache_write, "linear": _linear,
        "embed": _embed, "expert_linear": _experts,
    }


def overlap(a: View, b: View) -> bool:
    """Whether two views share columns."""
    return a.buffer == b.buffer and a.start < b.start + b.width and b.start < a.start + a.width
