"""From the steps of a network to the table that threads walk: every step's calls, and where a barrier must stand."""

from collections.abc import Callable

import numpy as np

from numflow.cpu.adapters import adapt
from numflow.cpu.attention import attention, gated_recurrence, linear_attention
from numflow.cpu.context import Context
from numflow.cpu.elementwise import act, norm, rope, select
from numflow.cpu.exchange import exchange
from numflow.cpu.fuse import adds_taken_over, operands_made
from numflow.cpu.linear import embed, linear
from numflow.cpu.moe import moe
from numflow.cpu.runtime.kernel import Call
from numflow.cpu.state import cache, convolution
from numflow.ops import Step, View, param, states_of

BINDERS: dict[str, Callable[[Step, Context], list[Call]]] = {
    "embed": embed.embed, "embed_position": select.embed_position, "embed_type": select.embed_type,
    "rms_norm": norm.rms_norm, "layer_norm": norm.layer_norm, "linear": linear.linear,
    "rope_angles": rope.rope_angles, "rope": rope.rope, "head_concat": select.head_concat,
    "head_linear": linear.head_linear,
    "cache_write": cache.cache_write, "index_select": attention.index_select,
    "attention": attention.attention, "act": act.act, "act_mul": act.act_mul,
    "gate_rows": act.gate_rows, "permute": act.permute, "mul": act.mul, "causal_conv": convolution.causal_conv,
    "add": act.add, "scale": act.scale,
    "scale_by_position": act.scale_by_position, "sparsify": act.sparsify, "match_rms": act.match_rms,
    "mix": act.mix, "softcap": act.softcap, "clamp": act.clamp,
    "softplus": act.softplus, "linear_attention": linear_attention.linear_attention,
    "gated_recurrence": gated_recurrence.gated_recurrence,
    "copy": act.copy, "select_rows": select.select_rows, "moe_route": moe.moe_route,
    "expert_scale": moe.expert_scale, "expert_linear": linear.expert_linear, "expert_combine": moe.expert_combine,
}
ADAPTING = {"adapt": adapt.adapt, "adapt_rows": adapt.adapt_rows}


class Bound:
    """The steps of one entry, bound.

    steps: (step, its calls) in order; a step that another one does has none (fuse.py, where `fused`).
    done_by: index of a step that another one does -> index of that one.
    kernels: the one that does each step, or the last of them.
    table: int64 [calls, 3]: kernel address, args address, 1 where a barrier follows (threads.py).
    ends:  for each step, the number of table rows up to its last call.
    by_host: (row, step) of the exchanges that Python does before the walk goes on at that row.
    """

    def __init__(self, steps: tuple[Step, ...], ctx: Context, fused: bool = True):
        outputs, group = ctx.network.outputs.values(), _Group()
        adds = {i: add for i, add in adds_taken_over(steps, outputs).items()
                if linear.can_add(ctx.packed(steps[i].weights["weight"]))} if fused else {}
        made = operands_made(steps, outputs, lambda reader: linear.operand_kinds(
            ctx.packed(reader.weights["weight"]), linear.activations_of(reader, ctx))) if fused else {}
        barriers: list[int] = []
        self.steps: list[tuple[Step, list[Call]]] = []
        ctx.begin()
        for index, step in enumerate(steps):
            if index in made or index in adds.values():
                self.steps.append((step, []))
                continue
            makers = [steps[i] for i, reader in made.items() if reader == index]
            add = steps[adds[index]] if index in adds else None
            calls, effects = self._bind(step, makers, add, _adapting(steps, index), ctx)
            if group.meets(*effects):
                barriers[-1], group = 1, _Group()
            group.add(*effects)
            barriers += [0 if call.joined else 1 for call in calls[1:]] + [0]
            self.steps.append((step, calls))
        self.done_by = made | {i: linear_at for linear_at, i in adds.items()}
        self.kernels = [_main(calls or self.steps[self.done_by[i]][1])[0 if i in made else -1].kernel
                        for i, (_, calls) in enumerate(self.steps)]
        self.calls = [call for _, calls in self.steps for call in calls]
        self.ends = np.cumsum([len(calls) for _, calls in self.steps]).tolist()
        self.by_host = [(end - 1, step) for (step, _), end in zip(self.steps, self.ends, strict=True)
                        if exchange.is_remote(step, ctx)]
        self._barriers, self.table = barriers, np.zeros((0, 3), np.int64)

    @staticmethod
    def _bind(step: Step, makers: list[Step], add: Step | None, adapting: list[Step],
              ctx: Context) -> tuple[list[Call], tuple[list, list]]:
        """Calls and effects of a step together with those that it takes over, and with the first part of what rows add
        by adapters."""
        ctx.shared, ctx.add, ctx.makers = {}, add, {maker.outputs[0]: maker for maker in makers}
        for view in ctx.makers:
            ctx.written(view)
        calls = (BINDERS.get(step.op) or ADAPTING.get(step.op) or exchange.BINDERS[step.op])(step, ctx)
        calls[1:1] = [adapt.low_rank(other, ctx) for other in adapting]
        together = [*makers, step, *([] if add is None else [add])]
        for view in (view for each in together for view in each.outputs):
            if view not in ctx.makers:
                ctx.written(view)
        effects = [_effects(each, ctx) for each in together]
        return calls, ([r for reads, _ in effects for r in reads], [w for _, writes in effects for w in writes])

    def compile(self, done: Callable[[], None]) -> None:
        """Make every kernel ready (`done` is called after each) and fill the table."""
        for kernel in dict.fromkeys(call.kernel for call in self.calls):
            kernel.prepare()
            done()
        self.table = np.array([(call.kernel.address, call.args.ctypes.data, barrier)
                               for call, barrier in zip(self.calls, self._barriers, strict=True)], np.int64)


def _adapting(steps: tuple[Step, ...], index: int) -> list[Step]:
    """The steps behind a product in which rows add what adapters of their own have for it."""
    found = []
    for step in steps[index + 1:]:
        if step.op != "adapt" or steps[index].op == "adapt":
            break
        found.append(step)
    return found


def _main(calls: list[Call]) -> list[Call]:
    """A step's calls without those that go on with the work of the one before."""
    return [call for call in calls if not call.joined]


def _effects(step: Step, ctx: Context) -> tuple[list, list]:
    """Reads and writes of a step: views, and names of memory that steps share."""
    reads = [*step.inputs, *(name for name, written in ctx.shared.items() if not written)]
    writes = [*step.outputs, *(name for name, written in ctx.shared.items() if written)]
    if "cache" in step.params:
        (writes if step.op == "cache_write" else reads).append(f"cache {param(step, 'cache')}")
    writes += [f"state {name}" for name in states_of(step).values()]
    return reads, writes


class _Group:
    """Steps that need no barrier between them: none writes what another one reads or writes."""

    def __init__(self):
        self.reads, self.writes = [], []

    def meets(self, reads: list, writes: list) -> bool:
        """Whether a step with these effects must wait for the group."""
        return _clash(self.writes, [*reads, *writes]) or _clash(self.reads, writes)

    def add(self, reads: list, writes: list) -> None:
        """Take a step in."""
        self.reads += reads
        self.writes += writes


def _clash(some: list, others: list) -> bool:
    return any(a.overlaps(b) if isinstance(a, View) and isinstance(b, View) else a == b for a in some for b in others)
