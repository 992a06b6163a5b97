"""exp, tanh, sigmoid, softplus and the normal distribution on f32x16: polynomials without branches.

Largest errors against double precision (tests/cpu/test_math.py): exp, sigmoid, tanh and softplus 2e-7 relative,
normal_cdf 1e-7 absolute. The coefficients are fits of least maximum error in double precision, rounded to float32.
"""

import numpy as np

from numflow.cpu.simd.float32 import copysign, fma, magnitude, maximum, splat, two_to, where_less
from numflow.cpu.simd.vector import inline

_F = np.float32
_LOG2_E, _LN2_HIGH, _LN2_LOW = _F(1.4426950408889634), _F(0.693145751953125), _F(1.42860677e-06)
_ROUND = _F(1.5 * 2.0**23)  # adding and then subtracting this rounds to an integer
_EXP_MIN, _EXP_MAX = _F(-87.33), _F(88.37)
# exp(r) = 1 + r + r^2 (E0 + E1 r + ...) for |r| <= ln(2) / 2
_E0, _E1, _E2, _E3, _E4 = _F(0.49999994), _F(0.16666521), _F(0.04166839), _F(0.00836871), _F(0.0013814613)
# tanh(x) = x + x^3 (T0 + T1 x^2 + ...) for |x| < 0.625
_T0, _T1, _T2, _T3, _T4 = _F(-0.3333328), _F(0.13331442), _F(-0.053739715), _F(0.020639088), _F(-0.0057049873)
_TANH_SMALL = _F(0.625)
_ZERO, _HALF, _ONE, _TWO, _INFINITY = _F(0), _F(0.5), _F(1), _F(2), _F(np.inf)
_SQRT_HALF = _F(0.5**0.5)
# normal_cdf(x) = 1/2 + x (N0 + N1 x^2 + ...) for |x| < 1.25
_N0, _N1, _N2, _N3 = _F(0.39894226), _F(-0.06648999), _F(0.0099715), _F(-0.0011827096)
_N4, _N5, _CDF_SMALL = _F(0.00011032747), _F(-6.644862e-06), _F(1.25)
# atanh(w) = w (1 + A1 w^2 + ...)
_A1, _A2, _A3, _A4, _A5, _A6 = (_F(1 / n) for n in (3, 5, 7, 9, 11, 13))
# erfc(z) = exp(-z^2) t (C0 + C1 t + ...) for z >= 0, t = 1 / (1 + z / 2)
_C0, _C1, _C2, _C3, _C4 = _F(0.28208643), _F(0.2823753), _F(0.24310377), _F(0.20268683), _F(-0.02662557)
_C5, _C6, _C7, _C8 = _F(0.27806702), _F(-0.48719978), _F(0.2845749), _F(-0.059068948)


@inline
def exp(x):
    """e^x; 0 below -87.33, infinity above 88.37, NaN for NaN."""
    return where_less(splat(_EXP_MAX), x, splat(_INFINITY), exp_to_1(x))


@inline
def exp_to_1(x):
    """e^x for x <= 0 or NaN, so that the result is at most 1, or NaN."""
    rounded = x * _LOG2_E + _ROUND
    n = rounded - _ROUND
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    p = fma(fma(fma(fma(r, _E4, _E3), r, _E2), r, _E1), r, _E0)
    p = fma(r * r, p, r) + _ONE
    return where_less(x, splat(_EXP_MIN), splat(_ZERO), p * two_to(rounded))


@inline
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return _ONE / (exp(-x) + _ONE)


@inline
def tanh(x):
    """tanh(x): a polynomial near 0, 1 - 2 / (e^2|x| + 1) elsewhere."""
    z, a = x * x, magnitude(x)
    p = fma(fma(fma(fma(z, _T4, _T3), z, _T2), z, _T1), z, _T0)
    small, large = fma(z * x, p, x), _ONE - _TWO / (exp(a + a) + _ONE)
    return where_less(a, splat(_TANH_SMALL), small, copysign(large, x))


@inline
def softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + z), z = e^-|x|: the series of 2 atanh(w) for w = z / (2 + z), up to 1/3."""
    z = exp(-magnitude(x))
    w = z / (z + _TWO)
    s, t = w * w, w + w
    p = fma(fma(fma(fma(fma(s, _A6, _A5), s, _A4), s, _A3), s, _A2), s, _A1)
    return fma(t * s, p, t) + maximum(x, splat(_ZERO))


@inline
def normal_cdf(x):
    """P(standard normal <= x) = (1 + erf(x / sqrt(2))) / 2, precise in the lower tail too."""
    a, z = magnitude(x), x * x
    p = fma(fma(fma(fma(fma(z, _N5, _N4), z, _N3), z, _N2), z, _N1), z, _N0)
    middle = fma(p, x, _HALF)
    z = a * _SQRT_HALF
    t = _ONE / fma(z, _HALF, _ONE)
    p = fma(fma(fma(fma(t, _C8, _C7), t, _C6), t, _C5), t, _C4)
    p = fma(fma(fma(fma(p, t, _C3), t, _C2), t, _C1), t, _C0)
    tail = (p * t) * (exp(-(z * z)) * _HALF)
    sides = where_less(x, splat(_ZERO), tail, _ONE - tail)
    return where_less(a, splat(_CDF_SMALL), middle, sides)
