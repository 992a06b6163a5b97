"""Linear attention: a state that every token decays and adds to, instead of cached keys and values (op
`linear_attention`)."""

import numpy as np

from numflow.quant.state import STATE_BLOCK, stored
from numflow.reference.state import sequences


def linear_attention(q, k, v, steps=None, beta=None, *, rate, skip=None, batch, state, heads, key_heads, tiled, scaled):
    """y = S^T q + skip v after S = exp(steps rate) S + k u^T, S [H, dk, dv]; u = v, or steps v if scaled, or by the
    delta rule with beta.

    q, k [T, G * dk], v [T, H * dv], steps [T, H] or [T, H * dk] or None (1), beta [T, H] or None, rate [H] or
    [H * dk], skip [H].
    """
    q, k = (x.reshape(len(x), key_heads, -1)[:, _key_heads(heads, key_heads, tiled)] for x in (q, k))
    v = v.reshape(len(v), heads, -1)
    steps = np.ones((len(v), heads), np.float32) if steps is None else steps
    decay = np.exp(steps.reshape(len(v), heads, -1) * rate.reshape(heads, -1))
    y = np.empty(v.shape, np.float32)
    written = v * steps[:, :, None] if scaled else v
    for rows, (memory,) in sequences(batch, state):
        y[rows] = recurrence(q[rows], k[rows], written[rows], memory, decay[rows], None if beta is None else beta[rows],
                             state.shape.dtype, batch.positions[rows])
    return (y if skip is None else y + skip[:, None] * v).reshape(len(v), -1)


def recurrence(q, k, v, state, decay, beta=None, dtype="f32", positions=None):
    """One sequence, token by token: q, k [n, H, dk], v [n, H, dv], decay [n, H, dk or 1] -> y [n, H, dv].

    state [H, dk, dv] is updated in place. beta [n, H]: the delta rule, which writes the difference between v and the
    state's value for k (arXiv 2412.06464; with a decay per key column 2510.26692).
    dtype: type to which the state is rounded at the end of each block of tokens, by position.
    """
    y = np.empty(v.shape, np.float32)
    for t in range(len(v)):
        state *= decay[t][:, :, None]
        u = v[t]
        if beta is not None:
            u = beta[t][:, None] * (u - np.einsum("hkv,hk->hv", state, k[t]))
        state += k[t][:, :, None] * u[:, None]
        y[t] = np.einsum("hkv,hk->hv", state, q[t])
        if dtype != "f32" and (positions[t] + 1) % STATE_BLOCK == 0:
            state[...] = stored(state, dtype)
    return y


def _key_heads(heads, key_heads, tiled):
    """The key head of each head: neighbouring heads share one, or (tiled) every `key_heads`-th head."""
    return np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)
