"""Steps that the kernels of their neighbours do: a launch of a decode graph costs more than the work of a small step.

linear, add              the residual is added where the product is stored (few tokens)
norm, then linears       the norm stores what those matrices read: int8, or 16-bit numbers for tensor cores
act or act_mul, linears  the same
rope, rope, cache_write  one kernel turns queries and keys, and stores keys and values

What a step would have written is left out where nobody else reads it. Numbers may differ from the steps on their own
by the order of a norm's sum.
"""

from collections.abc import Callable, Mapping, Sequence

from numflow.cuda import act, linear, norm, rope
from numflow.cuda.cache_code import PIECE
from numflow.cuda.call import Call
from numflow.cuda.operand import UNIT
from numflow.network.fusing import adds_taken_over, dead_after, overlap, readers
from numflow.ops import Step, View, param

Bound = Callable[[], list[Call]]
PRODUCERS = {"rms_norm": norm.into_operand, "layer_norm": norm.into_operand, "act": act.into_operand,
             "act_mul": act.into_operand}
KINDS = {"int8", "f16", "bf16"}  # of operands that a producer can make


def fused(steps: Sequence[Step], ctx, binders: Mapping[str, Callable]) -> dict[int, Bound]:
    """By index of a step, what binds it in place of its own binder; a step that another one does has no calls.

    binders: of the ops on their own.
    """
    outputs, found = tuple(ctx.network.outputs.values()), {}
    for index, step in enumerate(steps):
        if step.op in PRODUCERS and _fits(step, ctx):
            plan = _plan(steps, index, ctx, outputs)
            if any(kind for kind, _ in plan.values()):
                found[index] = lambda step=step, plan=plan: _produce(step, ctx, plan, binders[step.op])
        if step.op == "cache_write":
            turns = _turns(steps, index, ctx)
            if turns:
                found[index] = lambda step=step, turns=turns: rope.rope_write(*turns, step, ctx)
                found |= {index - 2: list, index - 1: list}
    for index, add in adds_taken_over(steps, outputs).items():
        if not overlap(steps[add].outputs[0], steps[index].inputs[0]):
            found |= {index: lambda step=steps[index], add=steps[add]: linear.linear(step, ctx, add), add: list}
    return found


def _fits(step: Step, ctx) -> bool:
    """Whether columns fill units and begin where 16 bytes do."""
    views = (*step.inputs, *step.outputs)
    return (param(step, "groups") == 1 if "norm" in step.op else True) and all(
        view.width % UNIT == 0 and view.start % 4 == 0 and ctx.rows(view) == ctx.rows(views[0]) for view in views)


def _plan(steps: Sequence[Step], index: int, ctx, outputs: tuple[View, ...]) -> dict[str, tuple[str | None, bool]]:
    """What a step whose readers are linears should make, by name of runs: kind of operand (None: rows alone), and
    whether rows as well."""
    found = readers(steps, index)
    wanted = {demand for reader in found for demand in linear.demands(steps[reader], ctx)}
    kept = any(overlap(steps[index].outputs[0], view) for view in outputs)
    plan = {}
    for runs in {runs for _, runs in wanted if runs != "all"}:
        kinds = {kind for kind, when in wanted if when in (runs, "all")}
        made = min(kinds & KINDS, default=None)
        plan[runs] = made, kept or len(kinds) > 1 or made is None
    return plan


def _produce(step: Step, ctx, plan: dict[str, tuple[str | None, bool]], plain: Callable) -> list[Call]:
    calls, field = [], ctx.rows(step.outputs[0])
    for runs, (kind, rows) in sorted(plan.items()):
        made = PRODUCERS[step.op](step, ctx, kind, runs, rows) if kind else plain(step, ctx)
        calls += linear.limited(made, runs, field)
    return calls


def _turns(steps: Sequence[Step], index: int, ctx) -> tuple[Step, Step] | None:
    """The ropes of queries and of keys right before a cache_write that can do both."""
    write, before = steps[index], steps[max(index - 2, 0):index]
    cache = ctx.caches[param(write, "cache")]
    if [step.op for step in before] != ["rope", "rope"] or cache.host:
        return None
    (k, v), shape = write.inputs, cache.shape
    query, key = before if before[1].outputs[0] == k else before[::-1]
    alike = all(param(query, name) == param(key, name) for name in ("pairing", "head_dim", "start"))
    apart = not any(overlap(query.outputs[0], view) for view in (k, v, key.inputs[0]))
    whole = not any(size % PIECE for size in (shape.k_dim, shape.v_dim))  # rows are not padded
    fits = whole and shape.k_dim == param(key, "head_dim") and {*cache.types} <= {"f32", "f16"}
    if (key.outputs[0] == k and query.inputs[1] == key.inputs[1] and alike and apart and fits
            and dead_after(steps, index, k)):
        return query, key
    return None
