"""Linear attention: a state that each token fades and adds to, in place of keys and values (op `linear_attention`)."""

import numpy as np

from numflow.quant.state import STATE_BLOCK, stored
from numflow.reference.state import sequences


def linear_attention(q, k, v, steps=None, beta=None, *, rate, skip=None, batch, state, heads, key_heads, tiled, scaled):
    """y = S^T q + skip v after S = exp(steps rate) S + k u^T, S [H, dk, dv]; u: v, steps v (scaled) or as beta says.

    q, k [T, G * dk], v [T, H * dv], steps [T, H] or [T, H * dk] or none (1), beta [T, H] or none, rate [H] or
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

    state [H, dk, dv] is changed in place. beta [n, H]: the delta rule, which writes what the state does not say yet
    (arXiv 2412.06464; with a decay for each key column 2510.26692).
    dtype: that the state is rounded to at the end of each block of tokens, by their positions.
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
    """The key head of each head: neighbours share one, or (tiled) every `key_heads`-th does."""
    return np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)
