"""Weights of candidates, the same bits wherever they are computed, and whole parts of their sums.

A candidate whose score is `depth` from the best one (0 or below) weighs e^depth, to 7e-7 of it, as a multiple of UNIT:
sums of up to 2^20 of them are exact as float64 whatever their order, and what is below e^-23 weighs nothing. e^depth is
2^n (1 + f P(f)), n + f = depth log2(e), -1/2 <= f <= 1/2, by rounded float32 operations in the order of `_some`.
Kernels of devices do the same operations.
"""

import numpy as np

BITS = 32
UNIT = 2.0**-BITS
LEAST = -24.0  # what is as far from the best score, or further, weighs nothing
LOG2_E = 1.4426950408889634
WHOLE = 1.5 * 2.0**23  # adding and subtracting it rounds to a whole number, which is in the low bits of the sum
COARSE = 2.0**-9       # adding and subtracting it rounds to multiples of UNIT what is below it
# P, the constant first: least-maximum fit of the relative error, rounded to float32
P = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_CHUNK = 1 << 15  # weights at once: they stay in a cache
_LOG2_E, _WHOLE, _COARSE, _LEAST, _ONE = map(np.float32, (LOG2_E, WHOLE, COARSE, LEAST, 1))
_P = tuple(map(np.float32, P))


def weigh(depths: np.ndarray) -> np.ndarray:
    """Put the weights of depths float32 [n], 0 or below, in their place: the same array."""
    room = np.empty((2, min(len(depths), _CHUNK)), np.float32)
    for begin in range(0, len(depths), _CHUNK):
        own = depths[begin:begin + _CHUNK]
        _some(own, *room[:, :len(own)])
    return depths


def _some(weights: np.ndarray, whole: np.ndarray, rest: np.ndarray) -> None:
    np.maximum(weights, _LEAST, out=rest)
    rest *= _LOG2_E
    np.add(rest, _WHOLE, out=whole)
    np.subtract(whole, _WHOLE, out=weights)
    rest -= weights
    np.multiply(rest, _P[-1], out=weights)
    for coefficient in (*_P[-2::-1], _ONE):
        weights += coefficient
        if coefficient is not _ONE:
            weights *= rest
    power = whole.view(np.int32)
    power <<= 23
    bits = weights.view(np.int32)
    bits += power
    weights += _COARSE
    weights -= _COARSE


def fraction(value: float) -> int:
    """A number 0 .. 1 in 2^-32, below 2^32."""
    return min(int(value * 2.0**BITS), 2**BITS - 1)


def part(weights: np.ndarray, total: float, value: float) -> float:
    """So much (0 .. 1) of a sum of weights; of float32 ones, which are multiples of UNIT, one as well, rounded down."""
    if weights.dtype != np.float32:
        return value * total
    return float(int(total * 2.0**BITS) * fraction(value) >> BITS) * UNIT
