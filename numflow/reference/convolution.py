"""Causal depthwise convolution over the tokens of each sequence (op `causal_conv`)."""

import numpy as np

from numflow.reference.act import silu
from numflow.reference.state import sequences


def causal_conv(x, weight, bias=None, *, batch, state, kind):
    """y[t, c] = act(bias[c] + sum over j of weight[c, j] * x[t - K + 1 + j, c]); x [T, C], weight [C, K], bias [C]."""
    y = np.empty_like(x)
    for rows, (tail,) in sequences(batch, state):
        y[rows], tail[...] = convolve(x[rows], tail, weight)
    if bias is not None:
        y += bias
    return silu(y) if kind == "silu" else y


def convolve(x, tail, weight):
    """Convolution [n, C] of the rows x [n, C], preceded by the rows `tail` [K - 1, C], and the next tail."""
    x = np.concatenate([tail, x])
    n = len(x) - len(tail)
    return sum(x[j:j + n] * weight[:, j] for j in range(weight.shape[1])), x[n:]
