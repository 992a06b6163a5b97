"""Linear attention: a state [dk, dv] per head that every token decays and adds to (op `linear_attention`).

Tokens are processed in blocks of 16 that begin at fixed positions (cpu/state/matrix_state.py), the chunked form. S is
the state at a block's start and D its cumulative decay up to a token. L and A are the products of keys with keys and of
queries with keys, each times the decay from the older token to the younger one. All rows of a block that are in the
batch run as matrices:

    U = beta (V - D K S - L U)        Y = D Q S + A U        S = D S + (decayed K)^T U     at the block's end

Every value is a sum in one fixed order: over the columns of keys, then over the tokens of a block. The number of rows
in a tile does not change the order, so one token at a time, a prompt in pieces and a whole prompt give the same bits.
Decoding one token reads S once and writes only the token's own row.

Heads with one value column have no matrices (`scan`): lanes are 16 heads, and tokens are processed in order.

The twin in plain Python is `numflow/learn/twins/chunked.py`.
"""

from typing import Any

import numpy as np

from numflow.cpu.memory.buffers import aligned, padded
from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.cpu.state.matrix_state import F32, MatrixLayout
from numflow.network.states import is_scan
from numflow.ops import Step, param
from numflow.quant.state import STATE_BLOCK

_CODE = Code("numflow.cpu.attention.linear_attention_kernels")
# column_rates, column_steps: whether each key column has a rate or a step of its own. skip: f32 [H]. From `kind` on:
# fields of MatrixLayout, then offsets in a thread's scratch memory (`_scratch`).
SLOTS = slots("header q q_stride k k_stride v v_stride steps steps_stride beta beta_stride y y_stride state "
              "state_stride heads key_heads tiled k_dim v_dim rates column_rates column_steps skip scaled scratch "
              "scratch_bytes kind row rows tail_decay state_decay active_tail head keys tail shared slot scores "
              "decayed_rows decayed_keys decay block_keys raw float_state")
LANES = 16


def linear_attention(step: Step, ctx) -> list[Call]:
    """q, k f32 [T, G*dk], v, y f32 [T, H*dv], steps f32 [T, H] or [T, H*dk], beta f32 [T, H]."""
    q, k, v, *others = step.inputs
    steps, beta = [*others, None, None][:2]
    heads, key_heads = param(step, "heads"), param(step, "key_heads")
    k_dim, v_dim = q.width // key_heads, v.width // heads
    rates = ctx.vector(step.weights["rate"])
    skip = ctx.vector(step.weights["skip"]) if "skip" in step.weights else np.zeros(heads, np.float32)
    call: dict[str, Any] = dict(
        header=ctx.header, **ctx.strided("q", q), **ctx.strided("k", k), **ctx.strided("v", v),
        **_optional(ctx, "steps", steps), **_optional(ctx, "beta", beta), **ctx.strided("y", step.outputs[0]),
        **ctx.state_slots("state", param(step, "state")), heads=heads, key_heads=key_heads,
        tiled=param(step, "tiled"), k_dim=k_dim, v_dim=v_dim, column_rates=rates.size > heads,
        column_steps=steps is not None and steps.width > heads, skip=skip, scaled=param(step, "scaled"))
    if is_scan(step):
        return [Call.named(step, _CODE.kernel("scan"), SLOTS, rates=by_lanes(rates, heads), **call, **_NO_MATRIX)]
    layout = MatrixLayout.of(ctx.states[param(step, "state")].shape, step, ctx.network)
    offsets = _scratch(layout.kind, k_dim, padded(v_dim))
    scratch = ctx.scratch("linear attention", ctx.n_threads * offsets["scratch_bytes"])
    return [Call.named(step, _CODE.kernel("linear_attention"), SLOTS, rates=rates, scratch=scratch, **call,
                       **vars(layout), **offsets)]


_NO_MATRIX: dict[str, Any] = dict.fromkeys(SLOTS._fields[SLOTS.scratch:], 0)


def _scratch(kind: int, k_dim: int, columns: int) -> dict[str, Any]:
    """Offsets in a thread's scratch memory, which begins with the products with S, f32 [2][16][dv padded].

    scores        f32 [2][16][16]         L and A of the block's rows
    decayed_rows  f32 [2][16][dk padded]  keys and queries times the decay of S, with decays by column
    decayed_keys  f32 [dk][16]            keys times their decay at the block's end
    decay         f32 [dk padded]         decay of the current token
    block_keys    f32 [dk][16]            keys of a block that is whole in the batch
    raw           as scores               products without decays
    float_state   f32 [dk][dv padded]     S as float32, if stored in another type
    """
    # Size of the part before each offset.
    sizes = {"scores": 2 * STATE_BLOCK * columns, "decayed_rows": 2 * STATE_BLOCK * STATE_BLOCK,
             "decayed_keys": 2 * STATE_BLOCK * padded(k_dim), "decay": STATE_BLOCK * k_dim,
             "block_keys": padded(k_dim), "raw": STATE_BLOCK * k_dim, "float_state": 2 * STATE_BLOCK * STATE_BLOCK,
             "scratch_bytes": k_dim * columns if kind != F32 else 0}
    ends = np.cumsum([4 * size for size in sizes.values()]).tolist()
    return dict(zip(sizes, ends, strict=True))


def by_lanes(rates: np.ndarray, heads: int) -> np.ndarray:
    """Rates of heads with one value column, f32 [H * dk] or [H], as [groups of 16 heads][dk or 1][16 heads]."""
    groups, size = -(-heads // LANES), rates.size // heads
    result = aligned((groups, size, LANES), np.float32)
    lanes = np.zeros((groups * LANES, size), np.float32)
    lanes[:heads] = rates.reshape(heads, size)
    result[...] = lanes.reshape(groups, LANES, size).swapaxes(1, 2)
    return result


def _optional(ctx, name, view):
    """Slots of an optional view; address 0 if it is None."""
    return {name: 0, f"{name}_stride": 0} if view is None else ctx.strided(name, view)
