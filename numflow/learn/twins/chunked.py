"""The delta rule in blocks of tokens, as matrices: twin of `numflow/cpu/attention/linear_attention.py`.

For each token the state S [dk, dv] decays, and the difference u between v and the state's value for k is added
(docs/state.md derives the blocked form):

    S <- exp(g) S        u = beta (v - S^T k)        S <- S + k u^T        y = S^T q

In a block, G_i is the sum of g up to token i, and exp(G_i - G_j) is the decay of token j's update at token i. The terms
of u_i that depend on earlier u_j are moved to the left side, so all u of a block solve one triangular system:

    (I + L) U = beta (V - exp(G) K S)        L = beta_i (k_i . k_j) exp(G_i - G_j) where j < i
    Y = exp(G) Q S + A U                     A = (q_i . k_j) exp(G_i - G_j) where j <= i
"""

import numpy as np


def block(q, k, v, g, beta, state):
    """(y [n, dv], the new state) of a block of n tokens of one head: q, k [n, dk], v [n, dv], g, beta [n]."""
    sums, beta = np.cumsum(g), beta[:, None]
    decay = np.exp(sums)[:, None]                                  # of the old state at token i
    between = np.exp(np.minimum(sums[:, None] - sums, 0))          # of token j's update at token i
    lower = np.tril(beta * (k @ k.T) * between, -1)                # L
    scores = np.tril((q @ k.T) * between)                          # A
    u = np.linalg.solve(np.eye(len(k)) + lower, beta * (v - decay * (k @ state)))
    return decay * (q @ state) + scores @ u, decay[-1] * state + (between[-1][:, None] * k).T @ u


def attention(q, k, v, g, beta, state, size=16):
    """A text in blocks of `size` tokens: (y [T, dv], the state after its last token)."""
    y = np.empty_like(v)
    for first in range(0, len(v), size):
        rows = slice(first, first + size)
        y[rows], state = block(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
    return y, state
