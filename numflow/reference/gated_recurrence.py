"""Gated linear recurrence by channel (op `gated_recurrence`)."""

import numpy as np

from numflow.reference.act import sigmoid
from numflow.reference.state import sequences


def gated_recurrence(x, entry, fade, rate, entry_bias, fade_bias, *, batch, state):
    """h = a h + sqrt(1 - a^2) sigmoid(entry + entry_bias) x, with log a = -8 softplus(rate) sigmoid(fade + fade_bias).

    entry: input gate, fade: recurrence gate. x, entry, fade [T, W], rate and biases [W], state [W]. y = h. At the first
    token of a sequence a is 0 (arXiv 2402.19427).
    """
    log_a = np.float32(-8) * np.logaddexp(np.float32(0), rate) * sigmoid(fade + fade_bias)
    x = sigmoid(entry + entry_bias) * x
    a, norm = np.exp(log_a), np.sqrt(1 - np.exp(2 * log_a))
    y = np.empty_like(x)
    for rows, (h,) in sequences(batch, state):
        for t in range(rows.start, rows.stop):
            h[...] = x[t] if batch.positions[t] == 0 else a[t] * h + norm[t] * x[t]
            y[t] = h
    return y
