"""The binder of every op, and the steps of an entry bound: which launches each of them is."""

from collections.abc import Callable

from numflow.cuda.attention import attention, gated_recurrence, indexer, linear_attention
from numflow.cuda.context import Context
from numflow.cuda.device.call import Call
from numflow.cuda.elementwise import act, norm, rope, row, select
from numflow.cuda.exchange.exchange import HostCall, bind_exchange
from numflow.cuda.fuse import fused
from numflow.cuda.linear import embed, head_linear, linear
from numflow.cuda.moe import moe
from numflow.cuda.state import cache_write, convolution
from numflow.cuda.state.cache_host import take_rooms, with_copies
from numflow.errors import NetworkError
from numflow.ops import EXCHANGES, Step

BINDERS: dict[str, Callable[[Step, Context], list[Call]]] = {
    "embed": embed.embed, "embed_position": embed.embed_position, "embed_type": embed.embed_type,
    "rms_norm": norm.rms_norm, "layer_norm": norm.layer_norm, "linear": linear.linear,
    "rope_angles": rope.rope_angles, "rope": rope.rope, "head_concat": select.head_concat,
    "head_linear": head_linear.head_linear,
    "cache_write": cache_write.cache_write, "index_select": indexer.index_select, "attention": attention.attention,
    "act": act.act, "act_mul": act.act_mul,
    "gate_rows": act.gate_rows, "permute": act.permute, "mul": act.mul, "causal_conv": convolution.causal_conv,
    "add": act.add, "scale": act.scale,
    "scale_by_position": act.scale_by_position, "sparsify": row.sparsify, "match_rms": row.match_rms,
    "mix": row.mix, "softcap": act.softcap, "clamp": act.clamp,
    "softplus": linear_attention.softplus, "linear_attention": linear_attention.linear_attention,
    "gated_recurrence": gated_recurrence.gated_recurrence,
    "copy": act.copy, "select_rows": select.select_rows, "moe_route": moe.moe_route,
    "expert_scale": moe.expert_scale, "expert_linear": moe.expert_linear, "expert_combine": moe.expert_combine,
}


def bind(steps: tuple[Step, ...], ctx: Context, together: bool = True,
         units: bool = True) -> list[tuple[Step, list[Call | HostCall]]]:
    """Every step with its calls, in order.

    together: let kernels do neighbouring steps; units: also where blocks must own 32 results for that (fuse.py).

    Raises:
        NetworkError: a step that this executor has no kernel for.
    """
    bound = []
    ctx.begin()
    take_rooms(steps, ctx)
    taken = fused(steps, ctx, BINDERS, units) if together else {}
    for index, step in enumerate(steps):
        binder = bind_exchange if step.op in EXCHANGES else BINDERS.get(step.op)
        if binder is None:
            raise NetworkError(f"{step}: device 'cuda' has no kernel for {step.op}")
        bound.append((step, taken[index]() if index in taken else binder(step, ctx)))
        for view in step.outputs:
            ctx.written(view)
    return with_copies(bound, ctx)
