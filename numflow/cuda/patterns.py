"""Kernel fusion: patterns of consecutive steps that one kernel computes, found from stored types and options alone.

In a decode graph, a kernel launch costs more time than the work of a small step.

    linear + add              the product's epilogue adds the residual, for few tokens
    rope + rope + cache_write one kernel rotates queries and keys, and writes keys and values to the cache
    linear + add + rms_norm   blocks that compute 32 adjacent results write the operand of the matrices that follow the
                              norm, and leave the norm's scale to the readers, for few tokens (linear/unit.py)
    linear + act_mul          the same for gate and up

In addition, a norm or an activation may write the operand of the next matrix products (a Form): int8, or 16-bit floats
for tensor cores. attention_join and attention_few may do so too. A float32 result that nothing else reads is not
written. Fused and separate steps may differ by the order of the sum in a norm.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from numflow.cuda.device.call import ROW_FIELD
from numflow.cuda.elementwise.act import ACT
from numflow.cuda.estimate import planned
from numflow.cuda.linear.linear import demands, more_runs, takes_unscaled
from numflow.cuda.state.cache_code import PIECE
from numflow.cuda.weights.layout import Kept
from numflow.cuda.weights.operand import UNIT
from numflow.network.describe import GroupFacts, facts_of
from numflow.network.passes.dataflow import dead_after, fusible_adds, readers
from numflow.network.passes.grouping import Group, grouped
from numflow.ops import Network, Step, View, param

PRODUCERS = {"rms_norm", "layer_norm", "act", "act_mul"}
KINDS = {"int8", "f16", "bf16"}  # of operands that a producer can make


@dataclass(frozen=True)
class Form:
    """The form in which a step writes its result for its readers, in runs of the name `runs`.

    kind: of the matrix operand, None for no operand. rows: whether float32 rows are written.
    """

    runs: str
    kind: str | None
    rows: bool


@dataclass(frozen=True)
class Together:
    """The fusions of an entry. Steps are given by their index.

    groups: steps that one kernel computes.
    units:  for each group whose blocks compute 32 adjacent results, the operand that few tokens need: "int8", "rows" or
            "both".
    forms:  for each step, the forms in which it writes its result for the linears that read it.
    late:   for each linear that applies a norm's scale itself for few tokens, the eps of the norm.
    gates:  for each linear, the product before it that may compute the act_mul between them for more tokens
            (few_gemm.py).
    joined: attention steps whose join of parts writes the int8 operand of the next linear, for few tokens.
    halves: attention steps that write the float16 operand of the next linear, for many tokens (with activations "fp8"
            for some).
    """

    groups: tuple[Group, ...] = ()
    units: Mapping[int, str] = field(default_factory=dict)
    forms: Mapping[int, tuple[Form, ...]] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    gates: Mapping[int, int] = field(default_factory=dict)
    joined: frozenset[int] = frozenset()
    halves: frozenset[int] = frozenset()


def together(network: Network, entry: str, activations: str, plain_caches: Collection[str],
             units: bool = True) -> Together:
    """Find the fusions of an entry.

    plain_caches: names of the caches in device memory whose keys and values are float32 or float16.
    units:        whether to use kernels whose blocks compute 32 adjacent results (linear/unit.py).
    """
    return _Finder(network, entry, activations, units).found(plain_caches)


def described(network: Network, activations: str) -> list[GroupFacts]:
    """The fused groups of all entries, for keys and values in float16, in order of first appearance.

    A norm or activation that writes the operand of its readers counts as a separate group here.
    """
    found = {entry: together(network, entry, activations, network.caches) for entry in network.entries}

    def operand(entry: str, group: Group) -> str:
        plan = found[entry]
        return plan.units.get(group.at) or ", ".join(
            sorted({form.kind for form in plan.forms.get(group.at, ()) if form.kind})) or "-"

    def rows(entry: str, plan: Together) -> list[Group]:
        inside = {index for group in plan.groups for index in group.steps}
        alone = [Group((index,), index, f"{network.entries[entry][index].op} (operand)")
                 for index in plan.forms if index not in inside]
        return sorted([*plan.groups, *alone], key=lambda group: group.steps)
    return facts_of("cuda", network, {entry: rows(entry, plan) for entry, plan in found.items()}, operand)


class _Finder:
    """The search for fusions in the steps of an entry."""

    def __init__(self, network: Network, entry: str, activations: str, units: bool):
        self.network, self.steps, self.activations, self.units = network, network.entries[entry], activations, units
        self.outputs = tuple(network.outputs.values())

    def found(self, plain_caches: Collection[str]) -> Together:
        steps, done, units, late, gates = self.steps, {}, {}, {}, {}
        forms = {index: self.forms(index) for index, step in enumerate(steps)
                 if step.op in PRODUCERS and self.fits(step)}
        for index, step in enumerate(steps):
            if step.op == "cache_write" and param(step, "cache") in plain_caches and self.fuses_ropes(index):
                done |= {index - 2: index, index - 1: index}
        for index, add in fusible_adds(steps, self.outputs).items():
            if not steps[add].outputs[0].overlaps(steps[index].inputs[0]):
                done[add] = index
                if self.units and (kind := self.norm_of_units(index)):
                    units[index], done[index + 2] = kind, index
                    late |= dict.fromkeys(readers(steps, index + 2), param(steps[index + 2], "eps"))
        for index in range(len(steps) - 1) if self.units else ():
            if steps[index].op == "linear" and steps[index + 1].op == "act_mul" and (kind := self.act_of_units(index)):
                units[index], done[index + 1] = kind, index
                reading = readers(steps, index + 1)
                if all(takes_unscaled(self.weight(reader)) for reader in reading):
                    gates |= dict.fromkeys(reading, index)
        made = {index: tuple(form for form in found if index not in done or form.runs != "few")
                for index, found in forms.items() if index in done or any(form.kind for form in found)}
        joined, halves = (frozenset(index for index, step in enumerate(steps)
                                    if step.op == "attention" and self.joins(index, demand))
                          for demand in (("int8", "few"), ("f16", more_runs(self.activations)[0])))
        return Together(grouped(steps, done), units, made, late, gates, joined, halves)

    def demands(self, index: int) -> tuple[tuple[str, str], ...]:
        """linear.demands for the linear at an index: kinds of operands that it reads, and in which runs."""
        return demands(self.weight(index), self.activations)

    def weight(self, index: int) -> Kept:
        """The stored kind of the matrix of the linear at an index."""
        return planned(self.network.weights[self.steps[index].weights["weight"]])

    def wanted(self, index: int) -> set[tuple[str, str]]:
        """Demands of the linears that read a step's result; empty if any other step reads the result."""
        return {demand for reader in readers(self.steps, index) for demand in self.demands(reader)}

    def is_output(self, index: int) -> bool:
        """Whether a step's result is an output of the network, which a caller may read."""
        return any(self.steps[index].outputs[0].overlaps(view) for view in self.outputs)

    def fits(self, step: Step) -> bool:
        """Whether a step can write operands: columns fill whole units and are aligned to 16 bytes, and an activation
        has no parameters."""
        views, rows = (*step.inputs, *step.outputs), partial(rows_of, self.network)
        if step.op == "act" and param(step, "kind") not in ACT:
            return False
        return (param(step, "groups") == 1 if "norm" in step.op else True) and all(
            view.width % UNIT == 0 and view.start % 4 == 0 and rows(view) == rows(views[0]) for view in views)

    def forms(self, index: int) -> tuple[Form, ...]:
        """The forms in which a step writes its result, one for each name of runs."""
        wanted, is_output, found = self.wanted(index), self.is_output(index), []
        for runs in sorted({runs for _, runs in wanted} - {"all"}):
            kinds = {kind for kind, when in wanted if when in (runs, "all")}
            kind = min(kinds & KINDS, default=None)
            found.append(Form(runs, kind, is_output or len(kinds) > 1 or kind is None))
        return tuple(found)

    def joins(self, index: int, demand: tuple[str, str]) -> bool:
        """Whether an attention, or the join of its parts, can write this operand: a linear reads it, heads fill whole
        units, and there is no cross cache beside the attention's own."""
        step = self.steps[index]
        (y,), cache = step.outputs, self.network.caches[param(step, "cache")]
        return demand in self.wanted(index) and y.start % 4 == 0 and cache.value_dim % UNIT == 0 \
            and not param(step, "cross")

    def kind_of_unit(self, index: int) -> str | None:
        """Kind of operand that readers of a step need for few tokens: "int8", "rows" or "both"; None: another kind."""
        wanted = self.wanted(index)
        kinds = {kind for kind, runs in wanted if runs == "few"}
        if self.is_output(index) or "all" in {runs for _, runs in wanted} or not kinds <= {"int8", "rows"}:
            return None
        return "both" if len(kinds) == 2 else min(kinds, default=None)

    def norm_of_units(self, index: int) -> str | None:
        """Kind of operand for the fusion of linear, add and rms_norm from `index` on; None if they cannot be fused."""
        if index + 2 >= len(self.steps) or self.steps[index + 2].op != "rms_norm":
            return None
        product, add, norm = self.steps[index:index + 3]
        if (norm.inputs != add.outputs or not self.fits(norm) or not self.fits(add)
                or norm.outputs[0].overlaps(product.inputs[0]) or len(self.demands(index)) == 1):
            return None
        return self.kind_of_unit(index + 2)

    def act_of_units(self, index: int) -> str | None:
        """Kind of operand for the fusion of linear and act_mul from `index` on; None if they cannot be fused."""
        product, act_mul = self.steps[index:index + 2]
        (gate, up), (y,), half = act_mul.inputs, product.outputs, product.outputs[0].width // 2
        side_by_side = (gate, up) == (View(y.buffer, y.start, half), View(y.buffer, y.start + half, half))
        if (not side_by_side or not self.fits(act_mul) or not dead_after(self.steps, index + 1, y)
                or any(view.overlaps(y) for view in (*self.outputs, act_mul.outputs[0]))
                or act_mul.outputs[0].overlaps(product.inputs[0]) or len(self.demands(index)) == 1):
            return None
        return self.kind_of_unit(index + 1)

    def fuses_ropes(self, index: int) -> bool:
        """Whether the two steps before a cache_write are the ropes of queries and keys, and can be fused with it."""
        write, before = self.steps[index], self.steps[max(index - 2, 0):index]
        shape = self.network.caches[param(write, "cache")]
        if [step.op for step in before] != ["rope", "rope"] or shape.prefix:
            return False
        (k, v), (query, key) = write.inputs, query_and_key(write, before)
        alike = all(param(query, name) == param(key, name) for name in ("pairing", "head_dim", "start"))
        apart = not any(query.outputs[0].overlaps(view) for view in (k, v, key.inputs[0]))
        whole = not any(size % PIECE for size in (shape.k_dim, shape.v_dim))  # rows are not padded
        return (key.outputs[0] == k and query.inputs[1] == key.inputs[1] and alike and apart and whole
                and shape.k_dim == param(key, "head_dim") and dead_after(self.steps, index, k))


def query_and_key(write: Step, ropes: Sequence[Step]) -> tuple[Step, Step]:
    """The two ropes before a cache_write, in this order: of the queries, of the keys that are stored."""
    first, second = ropes
    return (first, second) if second.outputs[0] == write.inputs[0] else (second, first)


def rows_of(network: Network, view: View) -> int:
    """Index into `counts` of the number of rows of a view."""
    return ROW_FIELD[network.buffers[view.buffer].rows]
