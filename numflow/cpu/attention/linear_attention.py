"""Linear attention: a state [dk, dv] of each head that every token fades and adds to (op `linear_attention`).

Tokens go in blocks of 16 that begin at fixed positions (cpu/state/matrix_state.py). With S the state at a block's
border, D what is left of it at a token, and L, A the products of keys with keys and of queries with keys, each times
what is left of the older token at the younger one, all rows of a block that are there run as matrices:

    U = beta (V - D K S - L U)        Y = D Q S + A U        S = D S + (left K)^T U     at the block's end

Every number is one sum in one order: over the columns of keys, over the tokens of a block. How many rows stand in a
tile does not change it, so one token at a time, a prompt in pieces and a prompt as a whole give the same bits. A token
that comes alone reads S once and writes no state but its own row.

Heads of one column have no matrices (`scan`): lanes are 16 heads, and tokens come one after the other.

The plain twin is `numflow/learn/twins/chunked.py`.
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
# column_rates, column_steps: whether there is one for each key column. skip: f32 [H]. The rest of a matrix state's
# slots: fields of its layout, then where parts of a thread's scratch memory begin.
SLOTS = slots("header q q_stride k k_stride v v_stride steps steps_stride beta beta_stride y y_stride state "
              "state_stride heads key_heads tiled k_dim v_dim rates column_rates column_steps skip scaled scratch "
              "scratch_bytes kind row rows left fade turn head keys tail shared slot scores faded leaving decay whole "
              "raw plain")
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
    where = _scratch(layout.kind, k_dim, padded(v_dim))
    scratch = ctx.scratch("linear attention", ctx.n_threads * where["scratch_bytes"])
    return [Call.named(step, _CODE.kernel("linear_attention"), SLOTS, rates=rates, scratch=scratch, **call,
                       **vars(layout), **where)]


_NO_MATRIX: dict[str, Any] = dict.fromkeys(SLOTS._fields[SLOTS.scratch:], 0)


def _scratch(kind: int, k_dim: int, columns: int) -> dict[str, Any]:
    """Offsets of the parts of a thread's scratch memory; products with S, f32 [2][16][dv padded], are the first.

    scores f32 [2][16][16]; faded: rows of keys and queries with decays for each column, f32 [2][16][dk padded];
    leaving: keys as they are at the block's end, f32 [dk][16]; decay f32 [dk padded]; whole: keys of a whole block,
    f32 [dk][16]; raw: products without decays, as scores; plain: S in float32, if it is stored otherwise.
    """
    sizes = {"scores": 2 * STATE_BLOCK * columns, "faded": 2 * STATE_BLOCK * STATE_BLOCK,
             "leaving": 2 * STATE_BLOCK * padded(k_dim), "decay": STATE_BLOCK * k_dim, "whole": padded(k_dim),
             "raw": STATE_BLOCK * k_dim, "plain": 2 * STATE_BLOCK * STATE_BLOCK,
             "scratch_bytes": k_dim * columns if kind != F32 else 0}
    ends = np.cumsum([4 * size for size in sizes.values()]).tolist()
    return dict(zip(sizes, ends, strict=True))


def by_lanes(rates: np.ndarray, heads: int) -> np.ndarray:
    """Rates of heads of one column, f32 [H * dk] or [H], as [groups of 16 heads][dk or 1][16 heads]."""
    groups, size = -(-heads // LANES), rates.size // heads
    own = aligned((groups, size, LANES), np.float32)
    lanes = np.zeros((groups * LANES, size), np.float32)
    lanes[:heads] = rates.reshape(heads, size)
    own[...] = lanes.reshape(groups, LANES, size).swapaxes(1, 2)
    return own


def _optional(ctx, name, view):
    """Slots of a view that may be missing: address 0."""
    return {name: 0, f"{name}_stride": 0} if view is None else ctx.strided(name, view)
