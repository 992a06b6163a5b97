"""Choice of the cut of each step among the devices of a group (tensor parallel), from the last step to the first.

The cut of an output projection's input columns determines the cut of the steps before it:

    attn_q, attn_k, attn_v   rows      } by heads     down to the step that reads the block's input,
    norms, rotation, cache, attention  }              which every device has whole
    attn_output              columns                  each device has a partial sum: one all_reduce
    ffn_gate, ffn_up, act    rows      } by columns of ffn_down
    ffn_down                 columns                  one all_reduce
    ssm_in, convolution      rows, channels           } by heads or channels of the state (recurrent.py); a step
    recurrent step, its gate                           } with outputs of several kinds is split first (apart.py)
    ssm_out                  columns                  one all_reduce
    experts                  by expert                one all_reduce, together with the shared expert's
    embedding                rows                     one all_reduce, in which one device has each token's row
    head                     rows                     one all_gather

RULES has a rule for every op; an op without a rule is an error. Some steps run on every device. A step whose cut does
not fit (a norm over all heads, quantised blocks wider than a device's heads) gets its whole input by an all_gather.
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
_ROW_UNIT = 16  # rows of a matrix in a unit of the kernels: cuts are multiples of it


@dataclass(frozen=True)
class Sharding:
    """The cut of one step.

    how: WHOLE    every device runs the step on whole views
         COLUMNS  each device computes columns `spans` of the output
         SUM      each device has columns `spans` of the input and computes a partial sum of the output
         EXPERTS  each device has experts `spans`
         TOKENS   each device has rows `spans` of an embedding table
         FIRST    only the first device runs the step
    """

    how: str
    spans: Spans = ()


@dataclass(frozen=True)
class CacheCut:
    """Query heads and key/value heads of each device. fits: whether attn_output's columns can be cut alike."""

    heads: Spans
    kv_heads: Spans
    fits: bool


def cut_caches(network: Network, shares: tuple[float, ...]) -> dict[str, CacheCut]:
    """Cuts by cache, from the attention steps that read it."""
    cuts: dict[str, CacheCut] = {}
    for steps in network.entries.values():
        for at, step in enumerate(steps):
            if step.op == "attention" and param(step, "cache") not in cuts:
                cache = network.caches[param(step, "cache")]
                found, reader = _output_projection(steps[at + 1:], step.outputs[0])
                weight = network.weights[reader.weights["weight"]] if reader else None
                cut = _cache_cut(param(step, "heads"), cache, found.width, weight, shares)
                cuts |= dict.fromkeys(filter(None, (cache.name, param(step, "cross"))), cut)
    return cuts


def _output_projection(steps: tuple[Step, ...], view: View) -> tuple[View, Step | None]:
    """The input view of the output projection behind an attention's output, and the projection step."""
    for step in steps:
        if step.op == "head_linear" and view in step.inputs:
            view = step.outputs[0]
        elif step.op == "linear" and view in step.inputs:
            return view, step
    return view, None


def _cache_cut(heads: int, cache: Cache, width: int, output: Weight | None, shares: tuple[float, ...]) -> CacheCut:
    """Heads in proportion to the shares, at borders where the output projection can be cut, if possible.

    width: input columns of the output projection.
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
    """The cut of every step of an entry.

    shares: shares of the group's devices. caches, states: results of `cut_caches` and `cut_states` for the model.
    embedding, head: "split" or "placed" (on the first device of the group).
    """
    steps = network.entries[entry]
    if len(shares) == 1:
        return [Sharding(WHOLE)] * len(steps)
    return _Chooser(network, steps, shares, caches, states, embedding, head).all()


class _Chooser:
    """Visits steps from last to first. wanted: the cut of each view that later steps request."""

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
        self.wanted[step.inputs[0]] = spans  # request a split in any case: a norm that does not fit gathers its input
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
        if param(step, "block"):  # words of each key head
            chosen = step.inputs[1]
            self.wanted[chosen] = scaled(self.caches[cache.name].kv_heads, chosen.width // cache.kv_heads)
        return Sharding(COLUMNS, scaled(heads, cache.value_dim))

    def _cache_write(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        cache = self.network.caches[param(step, "cache")]
        if cache.name not in self.caches:  # of an indexer: no attention reads the cache
            return Sharding(WHOLE)
        kv_heads = self.caches[cache.name].kv_heads
        for view, size in zip(step.inputs, (cache.k_dim, cache.v_dim)):
            self.wanted[view] = scaled(kv_heads, size)
        return Sharding(COLUMNS, kv_heads)

    def _channels(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        """Cut columns of input, output and state alike."""
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
        """Rows of a matrix for each device. With tied embeddings, table and output matrix get the same cut, so that
        a device holds its rows once."""
        return even_spans(count, self.shares, _ROW_UNIT if count >= 4 * _ROW_UNIT * len(self.shares) else 1)

    def _input(self, at: int, x: View, weight: Weight) -> tuple[Spans | None, bool]:
        """The cut in which a linear's input is computed (None: whole), and whether the weight's columns fit this
        cut."""
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
            return self.wanted[x], True  # the cut of the recurrent step behind the convolution
        if source.op in ("act", "act_mul", "mul") and all(self._by_columns(made, view) for view in source.inputs):
            unit = column_unit(weight)
            spans = even_spans(x.width, self.shares, max(unit, 1))
            if unit and len(holders(spans)) == min(len(self.shares), x.width):
                return spans, True
            return even_spans(x.width, self.shares), unit == 1
        return None, False

    def _mixer_of(self, made: int) -> Step | None:
        """The attention or recurrent step whose output is step `made`, possibly after gates, head_linear or a norm."""
        source = self.steps[made]
        if source.op in ("attention", *RECURRENT):
            return source
        if source.op not in ("act_mul", "mul", "gate_rows", "head_linear", "rms_norm"):
            return None
        writers = [self._writer(made, view) for view in source.inputs]
        found = [self._mixer_of(writer) for writer in writers if writer is not None]
        return next((step for step in found if step is not None), None)

    def _by_columns(self, at: int, view: View) -> bool:
        """Whether a view is computed column by column: by a linear, or a convolution or product of such views."""
        made = self._writer(at, view)
        if made is None or self.steps[made].op not in ("linear", "causal_conv", "mul"):
            return False
        return self.steps[made].op == "linear" or all(self._by_columns(made, x) for x in self.steps[made].inputs)

    def _writer(self, at: int, view: View) -> int | None:
        """The last step before `at` that wrote exactly this view; None if a later step wrote a part of it."""
        for i in range(at - 1, -1, -1):
            if any(view.overlaps(y) for y in self.steps[i].outputs):
                return i if view in self.steps[i].outputs else None
        return None

    def _embed(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        rows = self._rows(self.network.weights[step.weights["table"]].shape[0])
        return Sharding(TOKENS, rows) if self.embedding == "split" else Sharding(FIRST)

    def _embed_ids(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        return Sharding(TOKENS, self._rows(self.network.weights[step.weights["table"]].shape[0]))

    def _experts(self, at: int, step: Step, spans: Spans | None) -> Sharding:
        experts = self.network.weights[step.weights["weight"]].groups
        return Sharding(EXPERTS, even_spans(experts, self.shares))

    RULES: ClassVar = {
        **dict.fromkeys((op.name for op in OPS.values() if op.local == "elements"), _elementwise),
        "scale_by_position": _elementwise,  # also depends on the row's position
        **dict.fromkeys(("ngram_ids", "embed_position", "embed_type", "rope_angles", "permute", "select_rows",
                         "moe_route", "index_select", "index_tokens", "sparsify", "match_rms", "mix", "balance", "pool",
                         "expert_scale",
                         "expert_combine"), _whole),
        **dict.fromkeys(("send", "receive"), _whole),  # exchanges between groups
        "rms_norm": _norm, "layer_norm": _norm, "rope": _rope,
        "head_concat": _head_concat, "head_linear": _head_linear, "block_select": _head_linear, "gate_rows": _gate_rows,
        "attention": _attention,
        "cache_write": _cache_write, "causal_conv": _channels, "softplus": _channels,
        **dict.fromkeys(RECURRENT, _recurrent), "linear": _linear, "embed": _embed,
        "embed_ids": _embed_ids,
        "expert_linear": _experts,
    }


def of_heads(spans: Spans, y: View, x: View) -> Spans:
    """Spans of y's columns scaled to x's columns; both have the same number of heads."""
    return tuple((begin * x.width // y.width, end * x.width // y.width) for begin, end in spans)


def own_columns(concat: Step) -> list[View]:
    """Inputs of a `head_concat` with columns per head: both, or the first."""
    (a, b), y = concat.inputs, concat.outputs[0]
    return [a, b] if a.width + b.width == y.width else [a]
