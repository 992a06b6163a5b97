"""Sampling weights of candidates: an exponential that gives the same bits on every device, with exact sums.

A candidate with score `depth` relative to the best one (0 or below) has weight e^depth, with a relative error of 7e-7,
rounded to a multiple of UNIT. Sums of up to 2^20 weights are exact in float64 in any order; weights below e^-23 become
0. e^depth = 2^n (1 + f P(f)), n + f = depth log2(e), -1/2 <= f <= 1/2, by rounded float32 operations in the order of
`_weigh_chunk`. Kernels of devices do the same operations.
"""

import numpy as np

BITS = 32
UNIT = 2.0**-BITS
LEAST = -24.0  # depths at or below this have weight 0
LOG2_E = 1.4426950408889634
WHOLE = 1.5 * 2.0**23  # adding and subtracting WHOLE rounds to an integer, which is in the low bits of the sum
COARSE = 2.0**-9       # adding and subtracting COARSE rounds smaller values to multiples of UNIT
# P, constant term first: best uniform fit of the relative error, rounded to float32
P = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_CHUNK = 1 << 15  # weights per chunk: a chunk stays in the CPU cache
_LOG2_E, _WHOLE, _COARSE, _LEAST, _ONE = map(np.float32, (LOG2_E, WHOLE, COARSE, LEAST, 1))
_P = tuple(map(np.float32, P))


def weigh(depths: np.ndarray) -> np.ndarray:
    """Replace depths float32 [n], 0 or below, by their weights in place; returns the same array."""
    scratch = np.empty((2, min(len(depths), _CHUNK)), np.float32)
    for begin in range(0, len(depths), _CHUNK):
        chunk = depths[begin:begin + _CHUNK]
        _weigh_chunk(chunk, *scratch[:, :len(chunk)])
    return depths


def _weigh_chunk(weights: np.ndarray, whole: np.ndarray, rest: np.ndarray) -> None:
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
    """A number 0 .. 1 in units of 2^-32, below 2^32."""
    return min(int(value * 2.0**BITS), 2**BITS - 1)


def part(weights: np.ndarray, total: float, value: float) -> float:
    """The fraction `value` (0 .. 1) of a sum of weights; for float32 weights rounded down to a multiple of UNIT."""
    if weights.dtype != np.float32:
        return value * total
    return float(int(total * 2.0**BITS) * fraction(value) >> BITS) * UNIT
