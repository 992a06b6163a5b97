"""Rotary positions (ops `rope_angles`, `rope`)."""

import numpy as np


def rope_angles(inv_freq, *, batch, scale):
    """(cos, sin)(position * inv_freq) * scale; inv_freq [F] -> [T, 2F], cosines first.

    The product is taken in float32: published models do so, and at position 4000 that is visible.
    """
    angle = batch.positions.astype(np.float32)[:, None] * inv_freq
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * np.float32(scale)


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
