"""A tile of a product with int8: 16 rows of weights times 8 tokens, twin of `numflow/cpu/linear/tile.py`.

One decoding of the weights serves 8 products. Within a unit of 32 columns everything is a whole number and exact; a
unit's sum is scaled once. The fast one keeps the 8 x 16 sums in registers and takes 4 products of bytes in one
instruction (VNNI: `vpdpbusd`); it has all other schemes, exact activations, outliers and borders.
"""

import numpy as np

UNIT = 32


def as_int8(x):
    """Activations f32 [T, K] as whole numbers -127 .. 127 and a scale for each unit: [T, U, 32], [T, U]."""
    x = x.reshape(len(x), -1, UNIT)
    scale = np.max(np.abs(x), axis=2) / np.float32(127)
    inverse = np.where(scale > 0, 1 / np.where(scale > 0, scale, 1), 0).astype(np.float32)
    return np.rint(x * inverse[:, :, None]).astype(np.int32), scale


def tile(codes, scale, zero, x):
    """y [T, 16] of weights scale * (code - zero): codes u8 [16, K], scale, zero f32 [16, U], x f32 [T, K], T <= 8."""
    numbers, by = as_int8(x)
    y = np.zeros((len(x), len(codes)), np.float32)
    for unit in range(scale.shape[1]):
        w = codes[:, UNIT * unit:UNIT * (unit + 1)].astype(np.int32)   # decoded once
        products = numbers[:, unit] @ w.T                              # [T, 16], exact
        sums = numbers[:, unit].sum(axis=1)[:, None]                   # what a zero of 1 takes away
        y += by[:, unit, None] * scale[:, unit] * (products - zero[:, unit] * sums)
    return y
