"""The table of binders, one for each op, and the binding of an entry's steps to kernel launches."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from numflow.cuda.adapters import adapt
from numflow.cuda.attention import attention, gated_recurrence, indexer, linear_attention, scan, wkv
from numflow.cuda.context import Context
from numflow.cuda.device.call import Call, Prepared, Sizes
from numflow.cuda.elementwise import act, norm, rope, row, select
from numflow.cuda.exchange.exchange import HostCall, bind_exchange
from numflow.cuda.linear import embed, head_linear, linear, unit
from numflow.cuda.moe import moe
from numflow.cuda.patterns import Form, Together, query_and_key
from numflow.cuda.state import cache_write, convolution, ngrams, pool
from numflow.cuda.state.cache_host import assign_buffers, with_copies
from numflow.cuda.weights.operand import bind_operand
from numflow.errors import NetworkError
from numflow.network.passes.grouping import Group, done_by
from numflow.ops import EXCHANGES, Step

Where = Callable[[Sizes], bool]
BINDERS: dict[str, Callable[[Step, Context], list[Call]]] = {
    "embed": embed.embed, "ngram_ids": ngrams.ngram_ids, "embed_ids": embed.embed_ids,
    "embed_position": embed.embed_position, "embed_type": embed.embed_type,
    "rms_norm": norm.rms_norm, "layer_norm": norm.layer_norm, "linear": linear.linear,
    "rope_angles": rope.rope_angles, "rope": rope.rope, "head_concat": select.head_concat,
    "head_linear": head_linear.head_linear,
    "cache_write": cache_write.cache_write, "pool": pool.pool, "index_select": indexer.index_select,
    "index_tokens": indexer.index_tokens, "block_select": indexer.block_select,
    "attention": attention.attention, "act": act.act, "act_mul": act.act_mul,
    "gate_rows": act.gate_rows, "permute": act.permute, "mul": act.mul, "causal_conv": convolution.causal_conv,
    "add": act.add, "scale": act.scale,
    "scale_by_position": act.scale_by_position, "sparsify": row.sparsify, "match_rms": row.match_rms,
    "mix": row.mix, "balance": row.balance, "signed_sqrt": act.signed_sqrt, "softcap": act.softcap, "clamp": act.clamp,
    "softplus": scan.softplus, "linear_attention": linear_attention.linear_attention,
    "gated_recurrence": gated_recurrence.gated_recurrence, "wkv": wkv.wkv,
    "copy": act.copy, "select_rows": select.select_rows, "moe_route": moe.moe_route,
    "expert_scale": moe.expert_scale, "expert_linear": moe.expert_linear, "expert_combine": moe.expert_combine,
}
ADAPTING: dict[str, Callable[[Step, Context], list[Call]]] = {"adapt": adapt.adapt, "adapt_rows": adapt.adapt_rows}
PRODUCERS: dict[str, Callable] = {"rms_norm": norm.into_operand, "layer_norm": norm.into_operand,
                                  "act": act.into_operand, "act_mul": act.into_operand}


def bind(steps: tuple[Step, ...], ctx: Context, together: Together) -> list[tuple[Step, list[Call | HostCall]]]:
    """All steps with their calls, in order. A call that prepares an operand that exists already is left out.

    together: the steps that are fused into one kernel (patterns.py).

    Raises:
        NetworkError: this executor has no kernel for a step.
    """
    assign_buffers(steps, ctx.caches, ctx.kv_buffers)
    bound, prepared = [], set()
    groups, elsewhere = {group.at: group for group in together.groups}, done_by(together.groups)
    for index, step in enumerate(steps):
        step_calls = _calls(steps, index, ctx, together, groups.get(index), index in elsewhere)
        calls = []
        for call in step_calls:
            if not isinstance(call, Call) or call.makes not in prepared:
                calls.append(call)
                prepared |= {call.makes} - {None} if isinstance(call, Call) else set()
        bound.append((step, calls))
        written = [view for i in (groups[index].steps if index in groups else () if index in elsewhere else (index,))
                   for view in steps[i].outputs]
        prepared = {operand for operand in prepared if not any(operand.view.overlaps(view) for view in written)}
        prepared |= {call.leaves for call in calls if isinstance(call, Call) and call.leaves}
    return with_copies(bound, ctx)


def _calls(steps: tuple[Step, ...], index: int, ctx: Context, together: Together, group: Group | None,
           elsewhere: bool) -> list[Call | HostCall]:
    """The calls of a step, or of the group of steps that is computed at this step.

    elsewhere: the step is computed by another step's kernel; only its operands (forms) remain to be made here.
    """
    step, late = steps[index], together.late.get(index)
    unscaled = linear.gates(steps[together.gates[index]], ctx) if index in together.gates else None
    gating = set(together.gates.values())
    if group is not None:
        members = [steps[i] for i in group.steps]
        fusion = Fusion(together.units.get(index), late, unscaled, index in gating)
        return GROUPS[group.pattern](members, ctx, fusion)
    binder = bind_exchange if step.op in EXCHANGES else (BINDERS | ADAPTING).get(step.op)
    if binder is None:
        raise NetworkError(f"{step}: device 'cuda' has no kernel for {step.op}")
    if index in together.forms or elsewhere:
        product = steps[index - 1] if index - 1 in gating else None
        return _produce(step, ctx, together.forms.get(index, ()), binder, product)
    if index in together.joined | together.halves:
        return _joining(step, ctx, "int8" if index in together.joined else None,
                        "f16" if index in together.halves else None)
    return linear.linear(step, ctx, late=late, unscaled=unscaled) if step.op == "linear" else binder(step, ctx)


def _produce(step: Step, ctx: Context, forms: tuple[Form, ...], plain: Callable,
             product: Step | None) -> list[Call]:
    """The calls of a norm or activation that writes the operands of the next matrix products.

    product: the `linear` of gate and up, whose kernel may compute this act_mul and write its rows and float16 operand.
    """
    (y,), calls_of_forms = step.outputs, []
    for form in forms:
        calls = PRODUCERS[step.op](step, ctx, form.kind, form.runs, form.rows) if form.kind else plain(step, ctx)
        if product and form.runs != "few":
            in_product = linear.gates(product, ctx)
            calls = [call.only(lambda sizes, in_product=in_product: not in_product(sizes)) for call in calls]
            if form.kind and form.kind != "f16":
                leaves = Prepared(y, form.kind, form.runs)
                made = replace(bind_operand(ctx, y, form.kind, *ctx.place(y, form.kind)), leaves=leaves)
                calls.append(made.only(in_product))
        calls_of_forms += linear.limited(calls, form.runs, ctx.rows(y))
    return calls_of_forms


def _joining(step: Step, ctx: Context, few: str | None, many: str | None) -> list[Call]:
    """The calls of an attention that also writes an operand: of kind `few` for few tokens, of kind `many` for many."""
    (y,), calls_of_runs = step.outputs, []
    first, *wide = linear.more_runs(ctx.activations)
    for runs, kind in (("few", few), (first, many), *((runs, None) for runs in wide)):
        calls = attention.attention(step, ctx, Prepared(y, kind, runs) if kind else None)
        calls_of_runs += linear.limited(calls, runs, ctx.rows(y))
    return calls_of_runs


class Fusion(NamedTuple):
    """Options of a group's binder.

    kind: of the operand to write for few tokens. late: eps of a norm whose scale is applied by the reader. unscaled: as
    in linear.many. gates: whether the product of gate and up for many tokens may compute the activation that follows.
    """

    kind: str | None
    late: float | None
    unscaled: Where | None
    gates: bool


def _linear_add(steps: Sequence[Step], ctx: Context, fusion: Fusion) -> list[Call]:
    return linear.linear(steps[0], ctx, steps[1], fusion.late, fusion.unscaled)


def _linear_add_norm(steps: Sequence[Step], ctx: Context, fusion: Fusion) -> list[Call]:
    product, add, norm = steps
    calls = unit.into_norm(product, ctx, add, norm, fusion.kind, fusion.late)
    calls = linear.limited(calls, "few", ctx.rows(norm.outputs[0]))
    return [*calls, *linear.many(product, ctx, add, unscaled=fusion.unscaled)]


def _linear_act(steps: Sequence[Step], ctx: Context, fusion: Fusion) -> list[Call]:
    product, act_mul = steps
    calls = unit.into_act(product, ctx, act_mul, fusion.kind, fusion.late)
    calls = linear.limited(calls, "few", ctx.rows(product.outputs[0]))
    return [*calls, *linear.many(product, ctx, act_mul=act_mul if fusion.gates else None, unscaled=fusion.unscaled)]


def _rope_write(steps: Sequence[Step], ctx: Context, fusion: Fusion) -> list[Call]:
    *ropes, write = steps
    return rope.rope_write(*query_and_key(write, ropes), write, ctx)


GROUPS: dict[str, Callable[[Sequence[Step], Context, Fusion], list[Call]]] = {
    "linear+add": _linear_add, "linear+add+rms_norm": _linear_add_norm, "linear+act_mul": _linear_act,
    "rope+rope+cache_write": _rope_write,
}
