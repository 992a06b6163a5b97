"""A tile of an int8 product, 16 rows of weights times 8 tokens: twin of `numflow/cpu/linear/tile.py`.

The weights are decoded once for 8 tokens. Within a unit of 32 columns all arithmetic is on integers and exact; the sum
of a unit is scaled once. The fast kernel keeps the 8 x 16 sums in registers and computes 4 products of bytes per lane
in one instruction (VNNI: `vpdpbusd`). It also has all other schemes, float32 activations, outliers and ragged edges.
"""

import numpy as np

UNIT = 32


def as_int8(x):
    """Quantise activations f32 [T, K] to integers -127 .. 127 with a scale per unit: [T, U, 32], [T, U]."""
    x = x.reshape(len(x), -1, UNIT)
    scale = np.max(np.abs(x), axis=2) / np.float32(127)
    inverse = np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0).astype(np.float32)
    return np.rint(x * inverse[:, :, None]).astype(np.int32), scale


def tile(codes, scale, zero, x):
    """y [T, 16] of weights scale * (code - zero): codes u8 [16, K], scale, zero f32 [16, U], x f32 [T, K], T <= 8."""
    q, x_scale = as_int8(x)
    y = np.zeros((len(x), len(codes)), np.float32)
    for unit in range(scale.shape[1]):
        w = codes[:, UNIT * unit:UNIT * (unit + 1)].astype(np.int32)   # decoded once
        products = q[:, unit] @ w.T                                    # [T, 16], exact
        sums = q[:, unit].sum(axis=1)[:, None]                         # correction for the zero point
        y += x_scale[:, unit, None] * scale[:, unit] * (products - zero[:, unit] * sums)
    return y
