"""Weighted mean of values with decaying weights, by channel (op `wkv`)."""

import numpy as np

from numflow.reference.state import sequences


def wkv(k, v, decay, first, *, batch, state):
    """y = sum of w v / sum of w over the tokens of a sequence: w = e^(first + k) for the current token, and
    e^(k + decay (i - 1)) for the token i positions back (arXiv 2305.13048).

    k, v [T, W], decay (below 0) and first [W]. state [3, W]: both sums a and b, divided by e^m, and m, the largest
    exponent so far, so that nothing overflows.
    """
    y = np.empty_like(v)
    for rows, (memory,) in sequences(batch, state):
        a, b, m = memory
        for t in range(rows.start, rows.stop):
            if batch.positions[t] == 0:
                y[t], a[...], b[...], m[...] = v[t], v[t], 1, k[t]
                continue
            largest = np.maximum(m, k[t] + first)
            old, new = np.exp(m - largest), np.exp(k[t] + first - largest)
            y[t] = (old * a + new * v[t]) / (old * b + new)
            largest = np.maximum(m + decay, k[t])
            old, new = np.exp(m + decay - largest), np.exp(k[t] - largest)
            a[...], b[...], m[...] = old * a + new * v[t], old * b + new, largest
    return y
