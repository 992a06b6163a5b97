"""Binding of a network's steps to kernel calls: the table that threads walk, with barriers where steps depend."""

from collections.abc import Callable
from dataclasses import replace
from operator import gt, lt

import numpy as np

from numflow.cpu.adapters import adapt
from numflow.cpu.attention import attention, linear_attention, recurrence
from numflow.cpu.context import Context
from numflow.cpu.elementwise import act, norm, rope, select
from numflow.cpu.exchange import exchange
from numflow.cpu.linear import embed, linear
from numflow.cpu.moe import moe
from numflow.cpu.runtime.kernel import Call, Kernel
from numflow.cpu.state import cache, convolution, ngrams
from numflow.network.passes.grouping import Group, done_by
from numflow.ops import Step, View, caches_of, states_of

BINDERS: dict[str, Callable[[Step, Context], list[Call]]] = {
    "embed": embed.embed, "ngram_ids": ngrams.ngram_ids, "embed_ids": embed.embed_ids,
    "embed_position": select.embed_position, "embed_type": select.embed_type,
    "rms_norm": norm.rms_norm, "layer_norm": norm.layer_norm, "linear": linear.linear,
    "rope_angles": rope.rope_angles, "rope": rope.rope, "head_concat": select.head_concat,
    "head_linear": linear.head_linear,
    "cache_write": cache.cache_write, "index_select": attention.index_select, "index_tokens": attention.index_tokens,
    "block_select": attention.block_select,
    "attention": attention.attention, "pool": cache.pool, "act": act.act, "act_mul": act.act_mul,
    "gate_rows": act.gate_rows, "permute": act.permute, "mul": act.mul, "causal_conv": convolution.causal_conv,
    "add": act.add, "scale": act.scale,
    "scale_by_position": act.scale_by_position, "sparsify": act.sparsify, "match_rms": act.match_rms,
    "mix": act.mix, "balance": act.balance, "signed_sqrt": act.signed_sqrt, "softcap": act.softcap, "clamp": act.clamp,
    "softplus": act.softplus, "linear_attention": linear_attention.linear_attention,
    "gated_recurrence": recurrence.gated_recurrence, "wkv": recurrence.wkv,
    "copy": act.copy, "select_rows": select.select_rows, "moe_route": moe.moe_route,
    "expert_scale": moe.expert_scale, "expert_linear": linear.expert_linear, "expert_combine": moe.expert_combine,
}
ADAPTING = {"adapt": adapt.adapt, "adapt_rows": adapt.adapt_rows}


class Bound:
    """The bound steps of one entry.

    steps:   (step, its calls) in order; a step that is fused into another step has no calls.
    groups:  the groups of fused steps. done_by: index of a fused step -> index of the step that does it.
    kernels: the kernel of each step, or its last kernel.
    table:   int64 [calls, 3]: kernel address, args address, 1 if a barrier follows (threads.py).
    ends:    for each step, the number of table rows up to its last call.
    by_host: (row, step) of the exchanges that Python does before the walk continues at that row.
    """

    def __init__(self, steps: tuple[Step, ...], ctx: Context, groups: tuple[Group, ...] = ()):
        self.groups, self.done_by, unordered = groups, done_by(groups), _Unordered()
        members = {group.at: group.steps for group in groups}
        barriers: list[int] = []
        self.steps: list[tuple[Step, list[Call]]] = []
        operands: set[tuple[View, int]] = set()  # operands that are made and still valid
        for index, step in enumerate(steps):
            if index in self.done_by:
                self.steps.append((step, []))
                continue
            before, after = ([steps[i] for i in members.get(index, ()) if lies(i, index)] for lies in (lt, gt))
            calls, effects = _bind(step, before, after, _adapting(steps, index), operands, ctx)
            if unordered.conflicts(*effects):
                barriers[-1], unordered = 1, _Unordered()
            unordered.add(*effects)
            barriers += [0 if call.joined else 1 for call in calls[1:]] + [0]
            self.steps.append((step, calls))
        self.kernels = [_main(calls or self.steps[self.done_by[i]][1])[0 if i < self.done_by.get(i, i) else -1].kernel
                        for i, (_, calls) in enumerate(self.steps)]
        self.calls = [call for _, calls in self.steps for call in calls]
        self.ends = np.cumsum([len(calls) for _, calls in self.steps]).tolist()
        self.by_host = [(end - 1, step) for (step, _), end in zip(self.steps, self.ends, strict=True)
                        if exchange.is_remote(step, ctx)]
        self._barriers, self.table = barriers, np.zeros((0, 3), np.int64)

    def compile(self, done: Callable[[Kernel], None]) -> None:
        """Compile or load every kernel (`done` is called with each) and fill the table."""
        for kernel in dict.fromkeys(call.kernel for call in self.calls):
            kernel.prepare()
            done(kernel)
        self.table = np.array([(call.kernel.address, call.args.ctypes.data, barrier)
                               for call, barrier in zip(self.calls, self._barriers, strict=True)], np.int64)


def _bind(step: Step, before: list[Step], after: list[Step], adapting: list[Step], operands: set[tuple[View, int]],
          ctx: Context) -> tuple[list[Call], tuple[list, list]]:
    """Calls and effects of a step together with the other steps of its group, and with the low-rank products A x of
    adapters.

    before, after: the group's other steps; a norm or an activation before a `linear`, an `add` after it.
    operands: operands that are valid before the step; updated to the valid ones after the step.
    """
    _invalidate(before, operands)
    if before or after:
        calls = linear.linear(step, ctx, *before or (None,), *after)
    else:
        calls = (BINDERS.get(step.op) or ADAPTING.get(step.op) or exchange.BINDERS[step.op])(step, ctx)
    calls = [call for call in calls if call.makes not in operands]
    calls[:1] = [replace(call, joined=False) for call in calls[:1]]
    operands |= {call.makes for call in calls if call.makes is not None}
    calls += [adapt.low_rank(other, ctx) for other in adapting]
    _invalidate([step, *after], operands)
    return calls, _effects([*before, step, *after], calls)


def _invalidate(steps: list[Step], operands: set[tuple[View, int]]) -> None:
    """Remove the operands of columns that steps write."""
    operands -= {(view, kind) for view, kind in operands
                 if any(view.overlaps(y) for step in steps for y in step.outputs)}


def _adapting(steps: tuple[Step, ...], index: int) -> list[Step]:
    """The `adapt` steps that directly follow a product."""
    adapting = []
    for step in steps[index + 1:]:
        if step.op != "adapt" or steps[index].op == "adapt":
            break
        adapting.append(step)
    return adapting


def _main(calls: list[Call]) -> list[Call]:
    """A step's calls without the joined ones."""
    return [call for call in calls if not call.joined]


def _effects(steps: list[Step], calls: list[Call]) -> tuple[list, list]:
    """Reads and writes of steps and their calls: views, and names of shared memory, states and caches."""
    scratch = [memory for call in calls for memory in call.scratch]
    reads: list = [memory.name for memory in scratch if not memory.written]
    writes: list = [memory.name for memory in scratch if memory.written]
    for step in steps:
        reads += step.inputs
        writes += [*step.outputs, *(f"state {name}" for name in states_of(step).values())]
        (writes if step.op == "cache_write" else reads).extend(f"cache {name}" for name in caches_of(step).values())
    return reads, writes


class _Unordered:
    """Consecutive steps that need no barrier between them: none writes memory that another reads or writes."""

    def __init__(self):
        self.reads, self.writes = [], []

    def conflicts(self, reads: list, writes: list) -> bool:
        """Whether a step with these effects depends on these steps and needs a barrier before it."""
        return _overlap(self.writes, [*reads, *writes]) or _overlap(self.reads, writes)

    def add(self, reads: list, writes: list) -> None:
        """Add a step's effects."""
        self.reads += reads
        self.writes += writes


def _overlap(left: list, right: list) -> bool:
    return any(a.overlaps(b) if isinstance(a, View) and isinstance(b, View) else a == b for a in left for b in right)
