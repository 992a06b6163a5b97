"""Patterns of neighbouring steps whose work one kernel does, found by stored types and options alone.

A launch of a decode graph costs more than the work of a small step.

    linear + add              the residual is added where the product is stored, for few tokens
    rope + rope + cache_write one kernel turns queries and keys, and stores keys and values
    linear + add + rms_norm   blocks that own 32 results make the operand behind the norm and leave the norm's scale to
                              its readers, for few tokens (linear/unit.py)
    linear + act_mul          the same for gate and up

Beside these groups, a norm or an activation stores the operand that the matrices behind it read (a form): int8, or
16-bit numbers for tensor cores; where the parts of an attention are joined, that does so too. What a step would have
written is left out where nobody else reads it. Numbers may differ from the steps on their own by the order of a norm's
sum.
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
    """Product of a step for its readers in runs of a name: an operand of a kind (None: none), and whether its rows."""

    runs: str
    kind: str | None
    rows: bool


@dataclass(frozen=True)
class Together:
    """Work of an entry's kernels beside the steps that they are for.

    groups: steps that one of them does.
    units:  by place of a group whose blocks own 32 results, the operand that few tokens want: "int8", "rows", "both".
    forms:  by step, what it makes for the linears behind it.
    late:   by linear, eps of the norm that it takes late for few tokens.
    gates:  by linear, the product in front of it that may do the act_mul between them for more tokens (few_gemm.py).
    joined: attentions that store the int8 operand of the linear behind them where they join parts, for few tokens.
    halves: attentions that store its float16 operand, for many (with activations "fp8" for some).
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
    """Find the work that kernels of an entry do together.

    plain_caches: names of the caches in device memory whose keys and values are float32 or float16.
    units:        whether blocks may own 32 results.
    """
    return _Finder(network, entry, activations, units).found(plain_caches)


def described(network: Network, activations: str) -> list[GroupFacts]:
    """The groups of all entries with keys and values in float16, in order of first appearance.

    A norm or an activation that stores the operand of its readers is a group of its own here.
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
    """The steps of an entry, and questions about them."""

    def __init__(self, network: Network, entry: str, activations: str, units: bool):
        self.network, self.steps, self.activations, self.units = network, network.entries[entry], activations, units
        self.outputs = tuple(network.outputs.values())

    def found(self, plain_caches: Collection[str]) -> Together:
        steps, done, units, late, gates = self.steps, {}, {}, {}, {}
        forms = {index: self.forms(index) for index, step in enumerate(steps)
                 if step.op in PRODUCERS and self.fits(step)}
        for index, step in enumerate(steps):
            if step.op == "cache_write" and param(step, "cache") in plain_caches and self.turns(index):
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
        """See linear.demands; of the linear at an index."""
        return demands(self.weight(index), self.activations)

    def weight(self, index: int) -> Kept:
        """The form in which the matrix of the linear at an index is kept."""
        return planned(self.network.weights[self.steps[index].weights["weight"]])

    def wanted(self, index: int) -> set[tuple[str, str]]:
        """Demands of the linears that read what a step writes; none if something else reads it too."""
        return {demand for reader in readers(self.steps, index) for demand in self.demands(reader)}

    def kept(self, index: int) -> bool:
        """Whether a caller may ask for what a step writes."""
        return any(self.steps[index].outputs[0].overlaps(view) for view in self.outputs)

    def fits(self, step: Step) -> bool:
        """Whether columns fill units and begin where 16 bytes do, and an activation has no numbers of its own."""
        views, rows = (*step.inputs, *step.outputs), partial(rows_of, self.network)
        if step.op == "act" and param(step, "kind") not in ACT:
            return False
        return (param(step, "groups") == 1 if "norm" in step.op else True) and all(
            view.width % UNIT == 0 and view.start % 4 == 0 and rows(view) == rows(views[0]) for view in views)

    def forms(self, index: int) -> tuple[Form, ...]:
        """Products of a step for the linears behind it, by name of runs."""
        wanted, kept, found = self.wanted(index), self.kept(index), []
        for runs in sorted({runs for _, runs in wanted} - {"all"}):
            kinds = {kind for kind, when in wanted if when in (runs, "all")}
            made = min(kinds & KINDS, default=None)
            found.append(Form(runs, made, kept or len(kinds) > 1 or made is None))
        return tuple(found)

    def joins(self, index: int, demand: tuple[str, str]) -> bool:
        """Whether an attention, or what joins its parts, can store an operand that is wanted: heads fill units."""
        (y,), cache = self.steps[index].outputs, self.network.caches[param(self.steps[index], "cache")]
        return demand in self.wanted(index) and y.start % 4 == 0 and cache.value_dim % UNIT == 0

    def kind_of_unit(self, index: int) -> str | None:
        """Kind of operand that few tokens want of a step: "int8", "rows" or "both"; None: another kind."""
        wanted = self.wanted(index)
        kinds = {kind for kind, runs in wanted if runs == "few"}
        if self.kept(index) or "all" in {runs for _, runs in wanted} or not kinds <= {"int8", "rows"}:
            return None
        return "both" if len(kinds) == 2 else min(kinds, default=None)

    def norm_of_units(self, index: int) -> str | None:
        """Kind of operand of linear, add and rms_norm from `index` on, if blocks that own 32 results can do them."""
        if index + 2 >= len(self.steps) or self.steps[index + 2].op != "rms_norm":
            return None
        product, add, norm = self.steps[index:index + 3]
        if (norm.inputs != add.outputs or not self.fits(norm) or not self.fits(add)
                or norm.outputs[0].overlaps(product.inputs[0]) or len(self.demands(index)) == 1):
            return None
        return self.kind_of_unit(index + 2)

    def act_of_units(self, index: int) -> str | None:
        """Kind of operand of linear and act_mul from `index` on, likewise."""
        product, act_mul = self.steps[index:index + 2]
        (gate, up), (y,), half = act_mul.inputs, product.outputs, product.outputs[0].width // 2
        side_by_side = (gate, up) == (View(y.buffer, y.start, half), View(y.buffer, y.start + half, half))
        if (not side_by_side or not self.fits(act_mul) or not dead_after(self.steps, index + 1, y)
                or any(view.overlaps(y) for view in (*self.outputs, act_mul.outputs[0]))
                or act_mul.outputs[0].overlaps(product.inputs[0]) or len(self.demands(index)) == 1):
            return None
        return self.kind_of_unit(index + 1)

    def turns(self, index: int) -> bool:
        """Whether the steps right before a cache_write are the ropes of queries and of keys, and it can do both."""
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
    """The two ropes before a cache_write: the one of queries, and the one of the keys that it stores."""
    first, second = ropes
    return (first, second) if second.outputs[0] == write.inputs[0] else (second, first)


def rows_of(network: Network, view: View) -> int:
    """The field of the counts that counts the rows of a view."""
    return ROW_FIELD[network.buffers[view.buffer].rows]
