"""Linear attention: a state [dk, dv] of each head that every token fades and adds to (op `linear_attention`).

Columns of a state do not meet: a thread takes 32 of them, [dk, 32] in its first cache, through all tokens of a
sequence. A token is one pass over these rows, in which each is loaded once for all that is done with it:

    s = decay * s + k u        y += q s        said += (decay k)' s       ' of the next token

`said` is what the delta rule asks of the state before it writes. So a row costs 3 multiply-adds and a multiplication
for each load and store: with 32 columns the arithmetic is the limit, and the matrix form of a chunk of tokens, which
needs as many multiply-adds or more, could gain nothing (docs/state.md). As tokens come one after the other, bits do
not depend on where a text was cut.
"""

import numpy as np

from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.attention.linear_attention_kernels")
# column_rates, column_steps: whether there is one for each key column. skip: f32 [H].
SLOTS = slots("header q q_stride k k_stride v v_stride steps steps_stride beta beta_stride y y_stride state "
              "state_stride heads key_heads tiled k_dim v_dim rates column_rates column_steps skip scaled scratch "
              "scratch_bytes")
COLUMNS = 32


def linear_attention(step: Step, ctx) -> list[Call]:
    """q, k f32 [T, G*dk], v, y f32 [T, H*dv], steps f32 [T, H] or [T, H*dk], beta f32 [T, H]."""
    q, k, v, *others = step.inputs
    steps, beta = [*others, None, None][:2]
    heads, key_heads = param(step, "heads"), param(step, "key_heads")
    k_dim, v_dim = q.width // key_heads, v.width // heads
    rates = ctx.vector(step.weights["rate"])
    skip = ctx.vector(step.weights["skip"]) if "skip" in step.weights else np.zeros(heads, np.float32)
    kind = "delta_rule" if beta is not None else "scan" if v_dim == 1 else "linear_attention"
    row = -(-k_dim // 16) * 16
    nbytes = 4 * row if kind == "scan" else 4 * COLUMNS * k_dim + 2 * 4 * 4 * row
    nbytes = -(-nbytes // 64) * 64
    return [Call.named(
        step, _CODE.kernel(kind), SLOTS, header=ctx.header, **ctx.strided("q", q), **ctx.strided("k", k),
        **ctx.strided("v", v), **_optional(ctx, "steps", steps), **_optional(ctx, "beta", beta),
        **ctx.strided("y", step.outputs[0]), **ctx.state_slots("state", param(step, "state")), heads=heads,
        key_heads=key_heads, tiled=param(step, "tiled"), k_dim=k_dim, v_dim=v_dim, rates=rates,
        column_rates=rates.size > heads, column_steps=steps is not None and steps.width > heads, skip=skip,
        scaled=param(step, "scaled"), scratch=ctx.scratch("linear attention", ctx.n_threads * nbytes),
        scratch_bytes=nbytes)]


def _optional(ctx, name, view):
    """Slots of a view that may be missing: address 0."""
    return {name: 0, f"{name}_stride": 0} if view is None else ctx.strided(name, view)
