"""The delta rule in blocks of tokens, as matrices: twin of `numflow/cpu/attention/linear_attention.py`.

Token by token a state S [dk, dv] fades and takes up what it does not say of a key yet (docs/state.md derives the rest):

    S <- exp(g) S        u = beta (v - S^T k)        S <- S + k u^T        y = S^T q

Of a block G_i is the sum of g up to token i, and exp(G_i - G_j) what is left of token j at token i. What an u takes of
the ones before it comes to the left side, so all of them are the solution of one triangular system:

    (I + L) U = beta (V - exp(G) K S)        L = beta_i (k_i . k_j) exp(G_i - G_j) where j < i
    Y = exp(G) Q S + A U                     A = (q_i . k_j) exp(G_i - G_j) where j <= i
"""

import numpy as np


def block(q, k, v, g, beta, state):
    """(y [n, dv], the state behind it) of the n tokens of a block of one head: q, k [n, dk], v [n, dv], g, beta [n]."""
    sums, beta = np.cumsum(g), beta[:, None]
    fade = np.exp(sums)[:, None]
    left = np.exp(np.minimum(sums[:, None] - sums, 0))  # of token j at token i
    before = np.tril(beta * (k @ k.T) * left, -1)
    seen = np.tril((q @ k.T) * left)
    u = np.linalg.solve(np.eye(len(k)) + before, beta * (v - fade * (k @ state)))
    return fade * (q @ state) + seen @ u, fade[-1] * state + (left[-1][:, None] * k).T @ u


def attention(q, k, v, g, beta, state, size=16):
    """A text in blocks of `size` tokens: (y [T, dv], the state at its end)."""
    y = np.empty_like(v)
    for at in range(0, len(v), size):
        rows = slice(at, at + size)
        y[rows], state = block(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
    return y, state
