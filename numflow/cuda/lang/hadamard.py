"""The Hadamard transform of 32 columns (quant/kv.py), by shuffles over the lanes of a warp. It is its own inverse."""

import numpy as np

from numflow.cuda.lang.arithmetic import add_exactly, multiply_exactly
from numflow.cuda.lang.intrinsics import shuffle_xor
from numflow.cuda.lang.kernel import device
from numflow.cuda.lang.scalar import f32, u32
from numflow.quant.kv import NORM

_NORM = float(np.float32(NORM))


@device
def rotate(value, lane):
    """The transform of 32 columns, one in each lane, with the roundings and in the order of quant/kv.py."""
    value = add_exactly(shuffle_xor(value, 16), -value if lane & u32(16) != u32(0) else value)
    value = add_exactly(shuffle_xor(value, 8), -value if lane & u32(8) != u32(0) else value)
    value = add_exactly(shuffle_xor(value, 4), -value if lane & u32(4) != u32(0) else value)
    value = add_exactly(shuffle_xor(value, 2), -value if lane & u32(2) != u32(0) else value)
    value = add_exactly(shuffle_xor(value, 1), -value if lane & u32(1) != u32(0) else value)
    return multiply_exactly(value, f32(_NORM))


@device
def rotate_eight(x, lane, one, other):
    """The transform of 32 columns, 8 in each of 4 lanes, in place.

    one, other: the bits in which the indices of the 4 lanes differ. The columns may be in any order in which each bit
    of a column's index corresponds to one bit of the index in x or of the lane.
    """
    for i in range(4):
        a, b = x[i], x[i + 4]
        x[i], x[i + 4] = a + b, a - b
    for half in range(2):
        for i in range(2):
            a, b = x[4 * half + i], x[4 * half + i + 2]
            x[4 * half + i], x[4 * half + i + 2] = a + b, a - b
    for i in range(4):
        a, b = x[2 * i], x[2 * i + 1]
        x[2 * i], x[2 * i + 1] = a + b, a - b
    sign = f32(-1) if lane & u32(one) != u32(0) else f32(1)
    other_sign = f32(-1) if lane & u32(other) != u32(0) else f32(1)
    for i in range(8):
        value = shuffle_xor(x[i], one) + x[i] * sign
        x[i] = (shuffle_xor(value, other) + value * other_sign) * f32(_NORM)
