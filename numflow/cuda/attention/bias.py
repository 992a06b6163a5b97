"""The mask of visible keys, and the scale, softcap and biases applied to a product of query and key (`attention`)."""

import functools

from numflow.cuda.lang.arithmetic import fabs, log, tanh
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, i32, u32

LOG2_E = 1.4426950408889634


@functools.cache
def biased(has_cap: bool, has_slopes: bool, has_buckets: bool, unit: float) -> DeviceFunction:
    """bias(product, scale, cap, slopes, buckets, distance, head, heads, n_buckets, spread, causal) -> score * unit.

    distance: i32, position of the key minus position of the query. unit: 1, or log2(e) for kernels that use exp2.
    """
    plain = not (has_cap or has_slopes or has_buckets)

    @device
    def bias(score, scale, cap, slopes, buckets, distance, head, heads, n_buckets, spread, causal):
        if plain:
            return score * (scale * f32(unit))
        score *= scale
        if has_cap:
            score = cap * tanh(score / cap)
        if has_slopes:
            score -= slopes[head] * fabs(f32(distance))
        if has_buckets:
            score += buckets[_bucket(distance, n_buckets, spread, causal != 0) * heads + head]
        return score * f32(unit)

    return bias


@device
def _bucket(distance, count, inverse, causal):
    """Bucket of a distance (key - query), as in T5: half of the buckets are exact, the rest logarithmic.

    inverse: 1 / log(largest distance / exact buckets).
    """
    first, back = i32(0), i32(-distance)
    if causal:
        back = i32(0) if back < 0 else back
    else:
        count = count >> u32(1)
        first = i32(count) if distance > 0 else i32(0)
        back = i32(-back) if back < 0 else back
    exact = i32(count >> u32(1))
    if back < exact:
        return first + back
    far = exact + i32(log(f32(back) / f32(exact)) * inverse * f32(i32(count) - exact))
    return first + (far if far < i32(count) - 1 else i32(count) - 1)


@device
def seen(position, length, causal, window, chunk):
    """The range of keys that a query at `position` sees: first key, and one past the last."""
    first, end = i32(0), i32(length)
    if causal != 0:
        end = i32(position + 1)
    if window > 0:
        first = i32(position - window + 1) if position >= window else i32(0)
        end = i32(position + window) if position + window < end else end
    if chunk > 0:
        begin = i32(position // chunk * chunk)
        first = begin if begin > first else first
    return first, end
