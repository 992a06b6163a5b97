"""The search of search.py, compiled and shared among threads; the same bytes."""

import numpy as np

from numflow.kernel_cache import has_floor
from numflow.quant.layout import BASE_BIAS, BASE_SHIFT, STEP_CODES, WINDOWS, Fields, RowScheme
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
    SMALLEST,
    WIDE,
    WIDEST,
    check_magnitude,
    checked_importance,
)
from numflow.quant.threads import kernel, over_rows

_FLOOR = has_floor()
_ZERO, _ONE, _MIDDLE = np.float32(0), np.float32(1), np.float32(3.5)


def search(x: np.ndarray, scheme: RowScheme, importance: np.ndarray | None = None, name: str = "matrix",
           threads: int | None = None) -> Fields:
    """Headers and codes of x float32 [N, K]; arguments and errors as `search.encode_reference`."""
    x = checked_weights(x, scheme, name)
    c = checked_importance(importance, x, name)
    check_magnitude(max(float(x.max()), -float(x.min())), name)
    n, columns = x.shape
    fields = Fields(scheme, np.empty(n, np.uint16), np.empty((n, columns // scheme.block), np.uint16),
                    np.empty((n, columns), np.uint8))
    over_rows(_search, n, threads, x, c, *grid(scheme), fields.rows, fields.blocks, fields.codes)
    return fields


def grid(scheme: RowScheme) -> tuple:
    """What kernels need of a scheme: block, levels - 1, scale bits, narrowest, all steps, all zeros."""
    return (scheme.block, np.float32(scheme.levels - 1), scheme.scale_bits, np.float32(scheme.narrowest),
            scheme.steps(), scheme.zeros())


@kernel
def _search(x, c, block, top, scale_bits, narrowest, steps, zeros, rows, blocks, codes, begin, end):
    """x f32 [N, K], c f32 [1 or N, K]; steps i32 [32], zeros f32 [4, Z].

    rows u16 [N], blocks u16 [N, B] and codes u8 [N, K] are filled.
    """
    count = x.shape[1] // block
    low, high = np.empty(count, np.float32), np.empty(count, np.float32)
    liked, middles = np.empty(count, np.float32), np.empty(count, np.float32)
    tried, best = np.empty(count, np.uint16), np.empty(count, np.uint16)
    work = work_space(scale_bits)
    for row in range(begin, end):
        weights, importance = x[row], c[row if c.shape[0] > 1 else 0]
        for b in range(count):
            first = b * block
            low[b], high[b] = block_range(weights[first:first + block])
            liked[b], middles[b] = block_likes(weights[first:first + block], importance[first:first + block], low[b],
                                               high[b], top, narrowest, work)
        headers = row_headers(liked, middles, scale_bits, steps)
        least, chosen = np.inf, 0
        for header in headers:
            error = _row(weights, importance, low, high, header, block, top, scale_bits, narrowest, steps, zeros, least,
                         tried, work)
            if error < least:
                least, chosen = error, header
                best[:] = tried
        rows[row] = chosen
        blocks[row] = best
        scales = row_scales(chosen, scale_bits, steps)
        for b in range(count):
            if chosen == 0:
                blocks[row, b] = 0
                codes[row, b * block:(b + 1) * block] = 0
            else:
                inverse = _ONE / scales[best[b] & ((1 << scale_bits) - 1)]
                zero = zeros[chosen & 3, best[b] >> scale_bits]
                for i in range(b * block, (b + 1) * block):
                    codes[row, i] = np.uint8(nearest(weights[i] * inverse + zero, top))


@kernel
def work_space(scale_bits):
    """Room for what is tried for one block, f32 [4, tries]."""
    return np.empty((4, max((1 << scale_bits) * LANES, RANGES * OFFSETS)), np.float32)


@kernel
def nearest(value, top):
    """The code nearest to `value`, as float32."""
    if _FLOOR:
        return clipped(np.floor(value + HALF), top)
    return np.float32(np.int32(clipped(value + HALF, top)))  # the same; np.floor would be a call for each number


@kernel
def clipped(value, top):
    """`value`, but at least 0 and at most `top`."""
    value = value if value > _ZERO else _ZERO  # plain choices become vector instructions, min() and max() do not
    return value if value < top else top


@kernel
def block_range(w):
    """Smallest and largest of w and 0."""
    low = high = _ZERO
    for i in range(w.size):
        low, high = min(low, w[i]), max(high, w[i])
    return low, high


@kernel
def block_likes(w, c, low, high, top, narrowest, work):
    """Scale (0 for a block of zeros) and zero (as a share of the range) that a block would like."""
    best, scale, zero = np.inf, _ZERO, HALF
    inverses, zeros, errors, scales = work[0], work[1], work[2], work[3]
    if (high - low) / top * WIDEST <= SMALLEST:
        return scale, zero
    for k in range(RANGES):
        part = narrowest + (WIDEST - narrowest) * np.float32(k) / np.float32(RANGES - 1)
        s = (high - low) / top * part
        inverse = _ONE / s if s > SMALLEST else _ZERO
        middle = top * HALF - (low + high) * HALF * inverse
        for j in range(OFFSETS):
            at = k * OFFSETS + j
            scales[at], inverses[at] = s, inverse
            zeros[at] = clipped(middle + (np.float32(j) - _MIDDLE) * OFFSET_STEP * top, top)
    sum_errors(w, c, inverses, zeros, RANGES * OFFSETS, top, errors)
    for j in range(RANGES * OFFSETS):
        error = errors[j] * (np.float64(scales[j]) * scales[j])
        if error < best and scales[j] > SMALLEST:
            best, scale, zero = error, scales[j], zeros[j] / top
    return scale, zero


@kernel
def sum_errors(w, c, inverses, zeros, count, top, errors):
    """errors f32: sum of c * (code - weight in codes)^2, in order, for each of `count` pairs of 1 / scale and zero.

    Pairs are the inner loop, so that vectors hold pairs and every sum keeps its order.
    """
    for j in range(count):
        errors[j] = _ZERO
    for i in range(w.size):
        weight, importance = w[i], c[i]
        for j in range(count):
            value = weight * inverses[j] + zeros[j]
            distance = nearest(value, top) - value
            errors[j] += importance * (distance * distance)


@kernel
def row_headers(scales, middles, scale_bits, steps):
    """The row headers that are tried, int64 [H]."""
    patterns = scales.view(np.int32)
    smallest, largest, farthest = np.int64(1 << 31), np.int64(0), _ZERO
    for b in range(scales.size):
        if scales[b] > 0:
            smallest, largest = min(smallest, np.int64(patterns[b])), max(largest, np.int64(patterns[b]))
            farthest = max(farthest, abs(middles[b] - HALF))
    headers = np.zeros(32, np.int64)
    if (largest >> BASE_SHIFT) - BASE_BIAS < 1:
        return headers[:1]
    first, last = max(1, (smallest >> BASE_SHIFT) - BASE_BIAS), (largest >> BASE_SHIFT) - BASE_BIAS
    window, more, count = _window(farthest * np.float32(1.1)), 1 if scale_bits <= COARSE else 0, 0
    wide, reach = last - first > WIDE, min(last - first, WIDE)
    for i in range(-1 if wide else 0, BASES if more or wide else 1):
        base = first if i < 0 else last - reach + reach * i // BASES
        step = _step(largest - ((base + BASE_BIAS) << BASE_SHIFT), scale_bits, steps)
        for s in range(step, max(step - more, 0) - 1, -1):
            for w in range(window, min(window + more, WINDOWS - 1) + 1):
                headers[count] = base << 7 | s << 2 | w
                count += 1
    return headers[:count]


@kernel
def _step(missing, scale_bits, steps):
    code = 0
    while code < STEP_CODES - 1 and np.int64(steps[code]) * ((1 << scale_bits) - 1) < missing:
        code += 1
    return code


@kernel
def _window(farthest):
    window = 0
    while window < WINDOWS - 1 and farthest <= HALF / np.float32(2 << window):
        window += 1
    return window


@kernel
def row_scales(header, scale_bits, steps):
    """Scales of all scale codes under a row header, float32 [2^scale_bits]."""
    patterns = np.empty(1 << scale_bits, np.int32)
    for s in range(patterns.size):
        patterns[s] = (((header >> 7) + BASE_BIAS) << BASE_SHIFT) + s * np.int64(steps[header >> 2 & 31])
    return patterns.view(np.float32)


@kernel
def _row(w, c, low, high, header, block, top, scale_bits, narrowest, steps, zeros, limit, found, work):
    """Error of a row under a row header, its block headers in `found`; stops where the error is past `limit`."""
    if header == 0:
        return 0.0
    scales, window = row_scales(header, scale_bits, steps), header & 3
    lanes = min(LANES, zeros.shape[1])
    for s in range(scales.size):  # where all zero codes are tried, what is tried is the same for all blocks
        for z in range(lanes):
            work[0, s * lanes + z], work[1, s * lanes + z] = _ONE / scales[s], zeros[window, z]
    total = 0.0
    for b in range(low.size):
        first = b * block
        error, found[b] = _best_header(w[first:first + block], c[first:first + block], low[b], high[b], scales, window,
                                       top, scale_bits, narrowest, zeros[window], work)
        total += error
        if total > limit:
            break
    return total


@kernel
def _best_header(w, c, low, high, scales, window, top, scale_bits, narrowest, zeros, work):
    """Least error of a block, and the block header that has it."""
    span, lanes = high - low, min(LANES, zeros.size)
    one_sided = max(-low, high) / (HALF + HALF / np.float32(1 << window))
    shortest, longest = span / top * narrowest, max(span, one_sided) / top * MARGIN
    first, last = 0, 0
    while first < scales.size - 1 and scales[first + 1] <= shortest:
        first += 1
    while last < scales.size - 1 and scales[last] < longest:
        last += 1
    if zeros.size > lanes:
        for s in range(first, last + 1):
            z = _first_zero(low, high, _ONE / scales[s], zeros, top)
            for j in range(lanes):
                work[1, s * lanes + j] = zeros[z + j]
    at, errors = first * lanes, work[2]
    sum_errors(w, c, work[0, at:], work[1, at:], (last + 1 - first) * lanes, top, errors)
    least, chosen = np.inf, 0
    for s in range(first, last + 1):
        square = np.float64(scales[s]) * scales[s]
        for j in range((s - first) * lanes, (s + 1 - first) * lanes):
            error = errors[j] * square
            if error < least:
                least, chosen = error, j
    s = first + chosen // lanes
    z = _first_zero(low, high, _ONE / scales[s], zeros, top) if zeros.size > lanes else 0
    return least, s | (z + chosen % lanes) << scale_bits


@kernel
def _first_zero(low, high, inverse, zeros, top):
    """First of the zero codes that are tried with a scale."""
    middle = top * HALF - (low + high) * HALF * inverse
    z = np.int64(np.floor((middle - zeros[0]) / (zeros[1] - zeros[0]))) - LANES // 2
    return min(max(z, 0), zeros.size - LANES)
