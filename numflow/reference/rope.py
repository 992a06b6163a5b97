"""Rotary position embeddings (ops `rope_angles`, `rope`)."""

import numpy as np

from numflow.network.by_length import chosen


def rope_angles(inv_freq, long=None, *, batch, scale, border=0, long_scale=1.0, stretch=1.0, span=0.0, offset=0):
    """(cos, sin)((position + offset) * inv_freq) * scale; inv_freq [F] -> [T, 2F], cosines first. border > 0: inv_freq
    and scale are those of each row's sequence (numflow.network.by_length).

    The product is rounded to float32 as in published models: at position 4000 the difference is visible.
    """
    scale = np.float32(scale)
    if border:
        counts = np.diff(batch.starts)
        limits = batch.limits
        if limits is None:
            limits = [batch.positions[end - 1] + 1 if n else 0 for end, n in zip(batch.starts[1:], counts)]
        rows = [chosen(int(limit), inv_freq, long, border=border, scale=scale, long_scale=long_scale, stretch=stretch,
                       span=span) for limit in limits]
        rows = np.repeat(np.stack(rows), counts, axis=0)
        inv_freq, scale = rows[:, :-1], rows[:, -1:]
    angle = (batch.positions + offset).astype(np.float32)[:, None] * inv_freq
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * scale


def rope(x, angles, *, heads, head_dim, pairing, start):
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair of columns of each head.

    x [T, heads * head_dim], angles [T, 2F]. Pair i is (start + i, start + i + F) for pairing 'half' and
    (start + 2i, start + 2i + 1) for 'adjacent'; columns outside [start, start + 2F) are copied.
    """
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    first = start + np.arange(half) * (1 if pairing == "half" else 2)
    second = first + (half if pairing == "half" else 1)
    y = x.reshape(len(x), heads, head_dim).copy()
    a, b = y[:, :, first], y[:, :, second]
    y[:, :, first] = a * cos - b * sin
    y[:, :, second] = b * cos + a * sin
    return y.reshape(x.shape)
