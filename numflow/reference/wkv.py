"""A mean of values whose weights fade, of each channel (op `wkv`)."""

import numpy as np

from numflow.reference.state import sequences


def wkv(k, v, decay, first, *, batch, state):
    """y = sum of w v / sum of w over a text's tokens: w = e^(first + k) of the present one, and of the one i tokens
    back e^(k + decay (i - 1)) (arXiv 2305.13048).

    k, v [T, W], decay (below 0) and first [W]. state [3, W]: both sums, divided by e^m, and m, the largest exponent so
    far, so that nothing overflows.
    """
    y = np.empty_like(v)
    for rows, (memory,) in sequences(batch, state):
        above, below, m = memory
        for t in range(rows.start, rows.stop):
            if batch.positions[t] == 0:
                y[t], above[...], below[...], m[...] = v[t], v[t], 1, k[t]
                continue
            most = np.maximum(m, k[t] + first)
            old, new = np.exp(m - most), np.exp(k[t] + first - most)
            y[t] = (old * above + new * v[t]) / (old * below + new)
            most = np.maximum(m + decay, k[t])
            old, new = np.exp(m + decay - most), np.exp(k[t] - most)
            above[...], below[...], m[...] = old * above + new * v[t], old * below + new, most
    return y
