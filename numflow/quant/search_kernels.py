"""The search of search.py as compiled kernels, run by several threads, with the same bytes."""

import numpy as np

from numflow.kernel_cache import has_floor
from numflow.quant.lanes import add_errors, least_of
from numflow.quant.layout import BASE_BIAS, BASE_CODES, BASE_SHIFT, STEP_CODES, WINDOWS, Fields, RowScheme
from numflow.quant.scheme import checked_weights
from numflow.quant.search import (
    BASES,
    COARSE,
    HALF,
    LANES,
    MARGIN,
    OFFSET_STEP,
    OFFSETS,
    RANGES,
    REACH,
    SMALLEST,
    TOPS,
    WIDE,
    WIDEST,
    WORST,
    check_magnitude,
    checked_importance,
)
from numflow.quant.threads import kernel, over_rows, part

_FLOOR = has_floor()
_ZERO, _ONE, _MIDDLE = np.float32(0), np.float32(1), np.float32(3.5)


def search(x: np.ndarray, scheme: RowScheme, importance: np.ndarray | None = None, name: str = "matrix",
           threads: int | None = None) -> Fields:
    """Search headers and codes of x float32 [N, K]; arguments and errors as in `search.encode_reference`."""
    x = checked_weights(x, scheme, name)
    c = checked_importance(importance, x, name)
    check_magnitude(max(float(x.max()), -float(x.min())), name)
    n, columns = x.shape
    fields = Fields(scheme, np.empty(n, np.uint16), np.empty((n, columns // scheme.block), np.uint16),
                    np.empty((n, columns), np.uint8))
    over_rows(_search, n, threads, x, c, importance is None, *grid(scheme), fields.rows, fields.blocks, fields.codes)
    return fields


def grid(scheme: RowScheme) -> tuple:
    """Kernel arguments of a scheme: block, levels - 1, scale bits, narrowest, all steps, all zero points."""
    return (scheme.block, np.float32(scheme.levels - 1), scheme.scale_bits, np.float32(scheme.narrowest),
            scheme.steps(), scheme.zeros())


@kernel
def _search(x, c, by_block, block, top, scale_bits, narrowest, steps, zeros, rows, blocks, codes, begin, end):
    """x f32 [N, K], c f32 [1 or N, K]; by_block: three-term error for wide rows.

    steps i32 [32], zeros f32 [4, Z]; writes rows u16 [N], blocks u16 [N, B], codes u8 [N, K].
    """
    count = x.shape[1] // block
    low, high = np.empty(count, np.float32), np.empty(count, np.float32)
    preferred, middles = np.empty(count, np.float32), np.empty(count, np.float32)
    factors, tried, best = np.empty((2, count), np.float64), np.empty(count, np.uint16), np.empty(count, np.uint16)
    work = work_space(scale_bits)
    for row in range(begin, end):
        weights, importance = x[row], c[row if c.shape[0] > 1 else 0]
        for b in range(count):
            low[b], high[b] = block_range(weights, b * block, block)
            preferred[b], middles[b] = preferred_header(weights, importance, b * block, block, low[b], high[b], top,
                                                        narrowest, work)
        headers = row_headers(preferred, middles, scale_bits, steps)
        block_factors(weights, preferred, by_block, block, factors)
        least, chosen = np.inf, 0
        for header in headers:
            error = _row(weights, importance, low, high, factors, header, block, top, scale_bits, narrowest, steps,
                         zeros, least, tried, work)
            if error < least:
                least, chosen = error, header
                best[:] = tried
        rows[row] = chosen
        scales = row_scales(chosen, scale_bits, steps)
        for b in range(count):
            blocks[row, b] = best[b] if chosen else 0
            inverse = _ONE / scales[best[b] & ((1 << scale_bits) - 1)] if chosen else _ZERO
            zero = zeros[chosen & 3, best[b] >> scale_bits] if chosen else _ZERO
            for i in range(b * block, (b + 1) * block):
                codes[row, i] = np.uint8(nearest(weights[i] * inverse + zero, top))


@part
def work_space(scale_bits):
    """Scratch arrays for the candidates of a block, f32: inverse scales, zero points, errors; with 16 spare
    elements."""
    candidates = max((1 << scale_bits) * LANES, RANGES * OFFSETS) + 16
    return np.zeros(candidates, np.float32), np.zeros(candidates, np.float32), np.zeros(candidates, np.float32)


@part
def nearest(value, top):
    """The code nearest to `value`, as float32."""
    if _FLOOR:
        return clipped(np.floor(value + HALF), top)
    return np.float32(np.int32(clipped(value + HALF, top)))  # the same result; np.floor would be a call per element


@part
def clipped(value, top):
    """`value` clamped to [0, top]."""
    value = value if value > _ZERO else _ZERO  # conditional expressions are vectorised, min() and max() are not
    return value if value < top else top


@part
def block_range(w, first, size):
    """Minimum and maximum of w[first:first + size] and 0."""
    low = high = _ZERO
    for i in range(first, first + size):
        low = w[i] if w[i] < low else low
        high = w[i] if w[i] > high else high
    return low, high


@part
def preferred_header(w, c, first, size, low, high, top, narrowest, work):
    """Preferred scale (0 for a zero block) and zero point (fraction of the range) of a block."""
    best, scale, zero = np.inf, _ZERO, HALF
    inverses, zeros, errors = work
    if (high - low) / top * WIDEST <= SMALLEST:
        return scale, zero
    for k in range(RANGES):
        s = _range_scale(k, low, high, top, narrowest)
        inverse = _ONE / s if s > SMALLEST else _ZERO
        middle = top * HALF - (low + high) * HALF * inverse
        for j in range(OFFSETS):
            i = k * OFFSETS + j
            inverses[i], zeros[i] = inverse, clipped(middle + (np.float32(j) - _MIDDLE) * OFFSET_STEP * top, top)
    sum_errors(w, c, first, size, inverses, zeros, 0, RANGES * OFFSETS, top, errors)
    chosen = 0
    for k in range(RANGES):
        s = _range_scale(k, low, high, top, narrowest)
        error = least_of(errors, k * OFFSETS, OFFSETS) * (np.float64(s) * s)
        if error < best and s > SMALLEST:
            best, chosen, scale = error, k * OFFSETS, s
    if scale > 0:
        least = least_of(errors, chosen, OFFSETS)
        zero = zeros[first_index(errors, least, chosen, chosen + OFFSETS)] / top
    return scale, zero


@part
def _range_scale(k, low, high, top, narrowest):
    """Scale of the k-th clipping range."""
    return (high - low) / top * (narrowest + (WIDEST - narrowest) * np.float32(k) / np.float32(RANGES - 1))


@part
def sum_errors(w, c, first, size, inverses, zeros, begin, end, top, errors):
    """errors[begin:end] = sum of c * (code - scaled weight)^2, in order, over w[first:first + size], for each candidate
    inverse scale and zero point. Up to 15 further elements are computed."""
    for at in range(begin, end, 16):
        add_errors(w, c, first, size, inverses, zeros, at, top, errors)


@part
def first_index(errors, value, begin, end):
    """First index in begin:end where errors equals `value`, `begin` if there is none."""
    for j in range(begin, end):
        if errors[j] == value:
            return j
    return begin


@part
def row_headers(scales, middles, scale_bits, steps):
    """Candidate row headers, int64 [H]."""
    first, last = _span(scales)
    headers, count = np.zeros(160, np.int64), 0
    if last < 1:
        return headers[:1]
    largest, farthest = np.int64(0), _ZERO
    patterns = scales.view(np.int32)
    for b in range(scales.size):
        if scales[b] > 0:
            largest, farthest = max(largest, np.int64(patterns[b])), max(farthest, abs(middles[b] - HALF))
    window, several = _window(farthest * np.float32(1.1)), 1 if scale_bits <= COARSE else 0
    wide, reach, codes = last - first > WIDE, min(last - first, WIDE), 1 << scale_bits
    for i in range(-1 if wide else 0, BASES if several or wide else 1):
        base = first if i < 0 else last - reach + reach * i // BASES
        step = _step(largest - ((base + BASE_BIAS) << BASE_SHIFT), codes - 1, steps)
        for s in range(step, max(step - several, 0) - 1, -1):
            count = _add_windows(headers, count, base, s, window, several)
    for code in range(max(1, codes - TOPS), codes if wide else 0):
        reaching = _step((last - first) << BASE_SHIFT, code, steps)
        for s in range(max(0, reaching - 1), reaching + 1):
            end = ((largest - np.int64(steps[s]) * code) >> BASE_SHIFT) - BASE_BIAS
            for base in (first, first + 1, end, end + 1):
                count = _add_windows(headers, count, base, s, window, several)
    return headers[:count]


@part
def _add_windows(headers, count, base, step, window, several):
    """Append the headers of a grid with all windows, if the base code is valid; returns the new count."""
    if 1 <= base < BASE_CODES:
        for w in range(window, min(window + several, WINDOWS - 1) + 1):
            headers[count] = base << 7 | step << 2 | w
            count += 1
    return count


@part
def _span(scales):
    """Base codes of the smallest scale within REACH and of the largest scale; (0, 0) if all are 0."""
    patterns, last = scales.view(np.int32), np.int64(0)
    for b in range(scales.size):
        last = max(last, (np.int64(patterns[b]) >> BASE_SHIFT) - BASE_BIAS)
    if last < 1:
        return np.int64(0), np.int64(0)
    first = last
    for b in range(scales.size):
        code = (np.int64(patterns[b]) >> BASE_SHIFT) - BASE_BIAS
        if scales[b] > 0 and code >= last - REACH:
            first = min(first, code)
    return max(np.int64(1), first), last


@part
def block_factors(w, scales, by_block, block, factors):
    """Factors f64 [2, blocks] of the squared error of each block: in the sum over blocks, and in the maximum."""
    first, last = _span(scales)
    factors[0], factors[1] = 1.0, 0.0
    if not by_block or last - first <= WIDE:
        return
    patterns, total, used = scales.view(np.int32), 0.0, 0
    for b in range(scales.size):
        squares = 0.0
        for i in range(b * block, (b + 1) * block):
            squares += np.float64(w[i]) * w[i]
        total += squares
        if scales[b] > 0 and (patterns[b] >> BASE_SHIFT) - BASE_BIAS >= first:
            factors[1, b] = squares
            used += 1
    for b in range(scales.size):
        squares = factors[1, b]  # 0 for a block without its own term
        factors[0, b] = 1 / total + (1 / (used * squares) if squares > 0 else 0.0)
        factors[1, b] = WORST / squares if squares > 0 else 0.0


@part
def _step(distance, top, steps):
    """The smallest step code with which scale code `top` is at least `distance` (of bit patterns) above the base."""
    code = 0
    while code < STEP_CODES - 1 and np.int64(steps[code]) * top < distance:
        code += 1
    return code


@part
def _window(farthest):
    window = 0
    while window < WINDOWS - 1 and farthest <= HALF / np.float32(2 << window):
        window += 1
    return window


@part
def row_scales(header, scale_bits, steps):
    """Scales of all scale codes with a row header, float32 [2^scale_bits]."""
    patterns = np.empty(1 << scale_bits, np.int32)
    for s in range(patterns.size):
        patterns[s] = (((header >> 7) + BASE_BIAS) << BASE_SHIFT) + s * np.int64(steps[header >> 2 & 31])
    return patterns.view(np.float32)


@part
def _row(w, c, low, high, factors, header, block, top, scale_bits, narrowest, steps, zeros, limit, chosen, work):
    """Error of a row with a row header; block headers are written to `chosen`. Stops when the error exceeds `limit`."""
    if header == 0:
        return 0.0
    scales, row_zeros = row_scales(header, scale_bits, steps), zeros[header & 3]
    lanes = min(LANES, row_zeros.size)
    inverses, tried_zeros, _ = work
    for s in range(scales.size):  # if all zero codes are candidates, candidates are the same for all blocks
        inverse = _ONE / scales[s]
        for z in range(lanes):
            inverses[s * lanes + z], tried_zeros[s * lanes + z] = inverse, row_zeros[z]
    total, worst, reach = 0.0, 0.0, HALF + HALF / np.float32(1 << (header & 3))
    for b in range(low.size):
        error, chosen[b] = _best_header(w, c, b * block, block, low[b], high[b], scales, reach, top, scale_bits,
                                        narrowest, row_zeros, work)
        total += error * factors[0, b]
        worst = max(worst, error * factors[1, b])
        if total + worst > limit:
            break
    return total + worst


@part
def _best_header(w, c, begin, size, low, high, scales, reach, top, scale_bits, narrowest, zeros, work):
    """Least error of a block and its block header. reach: upper end of the window, as a fraction of the codes."""
    span, lanes = high - low, min(LANES, zeros.size)
    shortest, longest = span / top * narrowest, max(span, max(-low, high) / reach) / top * MARGIN
    first, last = 0, 0
    for s in range(scales.size - 1):
        first += scales[s + 1] <= shortest
        last += scales[s] < longest
    inverses, tried_zeros, errors = work
    if zeros.size > lanes:
        for s in range(first, last + 1):
            z = _first_zero(low, high, inverses[s * lanes], zeros, top)
            for j in range(lanes):
                tried_zeros[s * lanes + j] = zeros[z + j]
    sum_errors(w, c, begin, size, inverses, tried_zeros, first * lanes, (last + 1) * lanes, top, errors)
    least, chosen = np.inf, first
    for s in range(first, last + 1):
        error = least_of(errors, s * lanes, lanes) * (np.float64(scales[s]) * scales[s])
        if error < least:
            least, chosen = error, s
    start = chosen * lanes
    z = first_index(errors, least_of(errors, start, lanes), start, start + lanes) - start
    z += _first_zero(low, high, inverses[start], zeros, top) if zeros.size > lanes else 0
    return least, chosen | z << scale_bits


@part
def _first_zero(low, high, inverse, zeros, top):
    """First candidate zero code for a scale."""
    middle = top * HALF - (low + high) * HALF * inverse
    z = np.int64(np.floor((middle - zeros[0]) / (zeros[1] - zeros[0]))) - LANES // 2
    return min(max(z, 0), zeros.size - LANES)
