"""Steps that the kernels of their neighbours do: a launch of a decode graph costs more than the work of a small step.

linear, add              the residual is added where the product is stored (few tokens)
norm, then linears       the norm stores what those matrices read: int8, or 16-bit numbers for tensor cores
act or act_mul, linears  the same
rope, rope, cache_write  one kernel turns queries and keys, and stores keys and values
linear, add, rms_norm    blocks that own 32 results make the norm's operand and leave its scale to its readers; few
                         tokens (linear/unit.py)
linear, act_mul          the same for gate and up

What a step would have written is left out where nobody else reads it. Numbers may differ from the steps on their own
by the order of a norm's sum.
"""

from collections.abc import Callable, Mapping, Sequence

from numflow.cuda.device.call import Call
from numflow.cuda.elementwise import act, norm, rope
from numflow.cuda.linear import linear
from numflow.cuda.linear import unit as linear_unit
from numflow.cuda.state.cache_code import PIECE
from numflow.cuda.weights.operand import UNIT
from numflow.network.passes.dataflow import adds_taken_over, dead_after, readers
from numflow.ops import Step, View, param

Bound = Callable[[], list[Call]]
PRODUCERS = {"rms_norm": norm.into_operand, "layer_norm": norm.into_operand, "act": act.into_operand,
             "act_mul": act.into_operand}
KINDS = {"int8", "f16", "bf16"}  # of operands that a producer can make


def fused(steps: Sequence[Step], ctx, binders: Mapping[str, Callable], units: bool = True) -> dict[int, Bound]:
    """By index of a step, what binds it in place of its own binder; a step that another one does has no calls.

    binders: of the ops on their own. units: whether blocks may own 32 results.
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
        if not steps[add].outputs[0].overlaps(steps[index].inputs[0]):
            found |= {index: lambda step=steps[index], add=steps[add]: linear.linear(step, ctx, add), add: list}
            if units:
                found |= _norm_of_units(steps, index, ctx, outputs)
    for index in range(len(steps) - 1) if units else ():
        if steps[index].op == "linear" and steps[index + 1].op == "act_mul":
            found |= _act_of_units(steps, index, ctx, outputs)
    return found


def _norm_of_units(steps: Sequence[Step], index: int, ctx, outputs: tuple[View, ...]) -> dict[int, Bound]:
    """Binders of linear, add and rms_norm from `index` on, if blocks that own 32 results can do them."""
    if index + 2 >= len(steps) or steps[index + 2].op != "rms_norm":
        return {}
    product, add, norm = steps[index:index + 3]
    kind = _kind_of_unit(steps, index + 2, ctx, outputs)
    if (kind is None or norm.inputs != add.outputs or not _fits(norm, ctx) or not _fits(add, ctx)
            or norm.outputs[0].overlaps(product.inputs[0]) or len(linear.demands(product, ctx)) == 1):
        return {}
    plan = _plan(steps, index + 2, ctx, outputs)

    def make() -> list[Call]:
        calls = linear_unit.into_norm(product, ctx, add, norm, kind)
        return [*linear.limited(calls, "few", ctx.rows(norm.outputs[0])), *linear.many(product, ctx, add)]

    def leave() -> list[Call]:
        ctx.delay(norm.outputs[0], param(norm, "eps"))
        return _left(norm, ctx, plan, kind)

    return {index: make, index + 2: leave}


def _act_of_units(steps: Sequence[Step], index: int, ctx, outputs: tuple[View, ...]) -> dict[int, Bound]:
    """Binders of linear and act_mul from `index` on, likewise."""
    product, act_mul = steps[index:index + 2]
    (gate, up), (y,), kind = act_mul.inputs, product.outputs, _kind_of_unit(steps, index + 1, ctx, outputs)
    side_by_side = (gate, up) == (View(y.buffer, y.start, y.width // 2), View(y.buffer, y.start + y.width // 2,
                                                                              y.width // 2))
    if (kind is None or not side_by_side or not _fits(act_mul, ctx) or not dead_after(steps, index + 1, y)
            or any(view.overlaps(y) for view in (*outputs, act_mul.outputs[0]))
            or act_mul.outputs[0].overlaps(product.inputs[0]) or len(linear.demands(product, ctx)) == 1):
        return {}
    plan = _plan(steps, index + 1, ctx, outputs)

    def make() -> list[Call]:
        calls = linear_unit.into_act(product, ctx, act_mul, kind)
        return [*linear.limited(calls, "few", ctx.rows(y)), *linear.many(product, ctx)]

    return {index: make, index + 1: lambda: _left(act_mul, ctx, plan, kind)}


def _kind_of_unit(steps: Sequence[Step], index: int, ctx, outputs: tuple[View, ...]) -> str | None:
    """Kind of operand that few tokens want of a step: "int8", "rows" or "both"; None: another kind."""
    wanted = {demand for reader in readers(steps, index) for demand in linear.demands(steps[reader], ctx)}
    kinds = {kind for kind, runs in wanted if runs != "many"}
    kept = any(steps[index].outputs[0].overlaps(view) for view in outputs)
    if kept or "all" in {runs for _, runs in wanted} or not kinds <= {"int8", "rows"}:
        return None
    return "both" if len(kinds) == 2 else min(kinds, default=None)


def _left(step: Step, ctx, plan: dict[str, tuple[str | None, bool]], kind: str) -> list[Call]:
    """Remaining calls of a step whose operand for few tokens comes from the product before it."""
    if kind != "rows":
        ctx.produce(step.outputs[0], "int8", "few")
    return _produce(step, ctx, {"many": plan["many"]}, None)


def _fits(step: Step, ctx) -> bool:
    """Whether columns fill units and begin where 16 bytes do, and an activation has no numbers of its own."""
    views = (*step.inputs, *step.outputs)
    if step.op == "act" and param(step, "kind") not in act.ACT:
        return False
    return (param(step, "groups") == 1 if "norm" in step.op else True) and all(
        view.width % UNIT == 0 and view.start % 4 == 0 and ctx.rows(view) == ctx.rows(views[0]) for view in views)


def _plan(steps: Sequence[Step], index: int, ctx, outputs: tuple[View, ...]) -> dict[str, tuple[str | None, bool]]:
    """Products of a step whose readers are linears, by name of runs.

    Each is the kind of operand (None: rows alone), and whether rows are made as well.
    """
    found = readers(steps, index)
    wanted = {demand for reader in found for demand in linear.demands(steps[reader], ctx)}
    kept = any(steps[index].outputs[0].overlaps(view) for view in outputs)
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
    if [step.op for step in before] != ["rope", "rope"] or cache.host or cache.shape.prefix:
        return None
    (k, v), shape = write.inputs, cache.shape
    query, key = before if before[1].outputs[0] == k else before[::-1]
    alike = all(param(query, name) == param(key, name) for name in ("pairing", "head_dim", "start"))
    apart = not any(query.outputs[0].overlaps(view) for view in (k, v, key.inputs[0]))
    whole = not any(size % PIECE for size in (shape.k_dim, shape.v_dim))  # rows are not padded
    fits = whole and shape.k_dim == param(key, "head_dim") and {*cache.types} <= {"f32", "f16"}
    if (key.outputs[0] == k and query.inputs[1] == key.inputs[1] and alike and apart and fits
            and dead_after(steps, index, k)):
        return query, key
    return None
