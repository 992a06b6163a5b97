"""Search for headers and codes of numflow's own schemes: the reference in NumPy (search_kernels.py has the fast
kernels).

The search minimises sum c (decoded - x)^2 over a row, for importances c of the weights. If no importances are given and
a row's scales span over 3 octaves, small blocks must not be neglected, and the error is the sum of three terms: the sum
above relative to the row's sum of squares, the mean of the same ratio over blocks, and a quarter of the largest ratio
of a block. Only values that headers can represent are tried, so nothing is rounded after its choice:

1. For each block, try 8 clipping ranges and 8 zero points around the middle of the weights. The best pair is the
block's
   preferred scale and zero point.
2. For the row, collect candidate headers. The scale grid begins at the smallest preferred scale, or one or two thirds
of
   the way to the largest, and its end just reaches or just misses the largest. The window is the narrowest that spans
   the preferred zero points, or the next narrower one. With fine block headers only the first of each is tried. In a
   row whose scales span over 3 octaves, the grid begins at the smallest scale or at the thirds of the last 3 octaves.
3. For each candidate and each block, try every scale code from `narrowest` times the block's range to a little above
the
   range, each with all zero codes (or the 16 nearest to the middle). Codes are rounded with this header.

The candidate with the least error wins, the first one among equals. Sums run over a block's weights in order, so that
the compiled search, which does the same operations, returns the same bytes.
"""

import numpy as np

from numflow.errors import RequestError
from numflow.quant.layout import (
    BASE_BIAS,
    BASE_CODES,
    BASE_SHIFT,
    STEP_CODES,
    WINDOWS,
    Fields,
    RowScheme,
    pack_reference,
)
from numflow.quant.scheme import checked_weights, read_only

RANGES, OFFSETS, LANES, BASES = 8, 8, 16, 3
COARSE = 4                      # with up to so many scale bits, a row always tries several headers
WIDE = 12                       # a row is wide if its scales span more quarters of an octave
REACH = 96                      # blocks with scales further below the largest (in quarters of an octave) count as 0
WORST = 0.25                    # weight of the largest block error in a wide row
TOPS = 9                        # number of scale codes at which a wide row's largest scale is tried
WIDEST = np.float32(1.06)
MARGIN = np.float32(1.08)       # upper limit of tried scales, relative to the block's range
OFFSET_STEP = np.float32(0.04)  # between zero points in step 1, as a fraction of the range
HALF = np.float32(0.5)
F32 = np.float32
SMALLEST = F32(2.0 ** -110)   # smaller scales count as 0


def encode_reference(x: np.ndarray, scheme: RowScheme, importance: np.ndarray | None = None,
                     name: str = "matrix") -> np.ndarray:
    """float32 [N, K] -> uint8 [N, row_bytes], in NumPy.

    Args:
        importance: float32 [K] or [N, K], not negative; weights of squared errors. Default: all equal.

    Raises:
        RequestError: as `checked_weights`; weights over 2^27; wrong importances.
        FormatError: as `checked_weights`.
    """
    x = checked_weights(x, scheme, name)
    c = checked_importance(importance, x, name)
    return pack_reference(search_reference(x, scheme, c, importance is None, name))


def checked_importance(importance: np.ndarray | None, x: np.ndarray, name: str) -> np.ndarray:
    """Importances as float32 [1 or N, K], ones by default.

    Raises:
        RequestError: another shape, or values that are negative, infinite or NaN.
    """
    if importance is None:
        return read_only(np.ones((1, x.shape[1]), np.float32))
    c = np.ascontiguousarray(np.atleast_2d(importance), np.float32)
    if c.shape not in ((1, x.shape[1]), x.shape):
        raise RequestError(f"importances of {name} should be [{x.shape[1]}] or {list(x.shape)}, "
                           f"are {list(np.shape(importance))}")
    if not (c.min() >= 0 and np.isfinite(c.max())):
        raise RequestError(f"importances of {name} should be finite and not negative, are {c.min():g} to {c.max():g}")
    return read_only(c)


def check_magnitude(largest: float, name: str) -> None:
    """Refuse a matrix whose largest weight is out of the range of row headers.

    Raises:
        RequestError: names the weight.
    """
    if largest > 2.0 ** 27:
        raise RequestError(f"{name} has weights up to {largest:g}; 2^27 is the most that can be quantised")


def search_reference(x: np.ndarray, scheme: RowScheme, c: np.ndarray, by_block: bool, name: str) -> Fields:
    """Headers and codes of x float32 [N, K] with importances c float32 [1 or N, K].

    by_block: use the three-term error for wide rows.
    """
    check_magnitude(float(np.abs(x).max()), name)
    n, columns = x.shape
    w = x.reshape(n, -1, scheme.block)
    c = np.broadcast_to(c, x.shape).reshape(w.shape)
    low, high = np.minimum(w.min(axis=2), F32(0)), np.maximum(w.max(axis=2), F32(0))
    scales, zeros = _preferred(w, c, low, high, scheme)
    fields = Fields(scheme, np.zeros(n, np.uint16), np.zeros(w.shape[:2], np.uint16), np.zeros((n, columns), np.uint8))
    for row in range(n):
        headers = row_headers(scales[row], zeros[row], scheme)
        factors = _block_factors(w[row], scales[row], by_block)
        least = np.inf
        for header in headers:
            blocks, codes, error = _row(w[row], c[row], low[row], high[row], factors, header, scheme)
            if error < least:
                least = error
                fields.rows[row], fields.blocks[row], fields.codes[row] = header, blocks, codes.ravel()
    return fields


def _preferred(w, c, low, high, scheme: RowScheme) -> tuple[np.ndarray, np.ndarray]:
    """Step 1: preferred scale (0 for a zero block) and zero point (fraction of the range) of each block: f32 [N,
    blocks]."""
    top = F32(scheme.levels - 1)
    best = np.full(low.shape, np.inf)
    scales, zeros = np.zeros(low.shape, np.float32), np.full(low.shape, HALF)
    for k in range(RANGES):
        part = F32(scheme.narrowest) + (WIDEST - F32(scheme.narrowest)) * F32(k) / F32(RANGES - 1)
        scale = (high - low) / top * part
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(scale > SMALLEST, F32(1) / scale, F32(0))
        middle = top * HALF - (low + high) * HALF * inverse
        for j in range(OFFSETS):
            zero = np.minimum(np.maximum(middle + (F32(j) - F32(3.5)) * OFFSET_STEP * top, F32(0)), top)
            error = _errors(w, c, inverse, zero, top) * np.square(scale, dtype=np.float64)
            better = (error < best) & (scale > SMALLEST)
            best, scales, zeros = np.where(better, error, best), np.where(better, scale, scales), np.where(
                better, zero / top, zeros)
    return scales, zeros


def _errors(w, c, inverse, zero, top) -> np.ndarray:
    """Sum of c * (code - scaled weight)^2 over the last axis of w, in order, float32 [...]."""
    total = np.zeros(np.broadcast_shapes(inverse.shape, zero.shape), np.float32)
    for i in range(w.shape[-1]):
        value = w[..., i] * inverse + zero
        distance = np.minimum(np.maximum(np.floor(value + HALF), F32(0)), top) - value
        total += c[..., i] * (distance * distance)
    return total


def row_headers(scales: np.ndarray, zeros: np.ndarray, scheme: RowScheme) -> list[int]:
    """Step 2: candidate row headers for the preferred scales and zero points float32 [blocks]."""
    used = scales > 0
    first, last = _span(scales)
    if last < 1:
        return [0]
    largest, window, several = int(scales.view(np.int32).max()), _window(zeros[used]), int(scheme.scale_bits <= COARSE)
    grids = [(base, s) for base in _bases(first, last, several) for step in [_step(base, largest, scheme)]
             for s in range(step, max(step - several, 0) - 1, -1)]
    if last - first > WIDE:
        grids += _spanning_grids(first, last, largest, scheme)
    return [base << 7 | s << 2 | w for base, s in grids for w in range(window, min(window + several, WINDOWS - 1) + 1)]


def _span(scales: np.ndarray) -> tuple[int, int]:
    """Base codes of the smallest scale within REACH and of the largest scale; (0, 0) if all are 0."""
    patterns = scales.view(np.int32)
    last = (int(patterns.max()) >> BASE_SHIFT) - BASE_BIAS
    if last < 1:
        return 0, 0
    codes = (patterns >> BASE_SHIFT) - BASE_BIAS
    return max(1, int(codes[(scales > 0) & (codes >= last - REACH)].min())), last


def _block_factors(w: np.ndarray, scales: np.ndarray, by_block: bool) -> np.ndarray:
    """Factors of the squared error of each block w f32 [blocks, block]: in the sum over blocks, and in the maximum over
    blocks. float64 [2, blocks]."""
    factors = np.stack([np.ones(len(w)), np.zeros(len(w))])
    first, last = _span(scales)
    if not by_block or last - first <= WIDE:
        return factors
    squares = np.zeros(len(w))
    for i in range(w.shape[1]):
        squares += w[:, i].astype(np.float64) * w[:, i]
    counted = (scales > 0) & ((scales.view(np.int32) >> BASE_SHIFT) - BASE_BIAS >= first)
    factors[0] = 1 / np.add.accumulate(squares)[-1]
    factors[0, counted] += 1 / (counted.sum() * squares[counted])
    factors[1, counted] = WORST / squares[counted]
    return factors


def _bases(first: int, last: int, several: int) -> list[int]:
    """Candidate base codes for scales from base code `first` to `last`."""
    reach = min(last - first, WIDE)
    bases = [last - reach + reach * i // BASES for i in range(BASES if several or last - first > WIDE else 1)]
    return bases if last - first <= WIDE else [first, *bases]


def _spanning_grids(first: int, last: int, largest: int, scheme: RowScheme) -> list[tuple[int, int]]:
    """Base and step codes of grids whose first scale is near `first`, and one of whose last is near the pattern
    `largest`."""
    grids, steps, codes = [], scheme.steps(), 1 << scheme.scale_bits
    for top in range(max(1, codes - TOPS), codes):
        reaching = next((s for s in range(STEP_CODES) if int(steps[s]) * top >= last - first << BASE_SHIFT),
                        STEP_CODES - 1)
        for s in range(max(0, reaching - 1), reaching + 1):
            base = (largest - int(steps[s]) * top >> BASE_SHIFT) - BASE_BIAS
            grids += [(b, s) for b in (first, first + 1, base, base + 1) if 1 <= b < BASE_CODES]
    return grids


def _window(zeros: np.ndarray) -> int:
    """The narrowest window that contains all zero points, with a margin."""
    farthest = np.abs(zeros - HALF).max() * F32(1.1)
    window = 0
    while window < WINDOWS - 1 and farthest <= F32(0.5) / F32(2 << window):
        window += 1
    return window


def _step(base: int, largest: int, scheme: RowScheme) -> int:
    """The smallest step code with which a grid from `base` reaches the bit pattern `largest`."""
    missing, steps = largest - ((base + BASE_BIAS) << BASE_SHIFT), scheme.steps()
    code = 0
    while code < STEP_CODES - 1 and int(steps[code]) * ((1 << scheme.scale_bits) - 1) < missing:
        code += 1
    return code


def _row(w, c, low, high, factors, header: int, scheme: RowScheme):
    """Step 3: block headers uint16 [blocks], codes uint8 [blocks, block] and error of a row with a row header."""
    if header >> 7 == 0:
        return np.zeros(len(w), np.uint16), np.zeros(w.shape, np.uint8), 0.0
    fields = Fields(scheme, np.array([header], np.uint16), np.zeros((1, 0)), np.zeros((1, 0)))
    base, step, zeros = (part[0] for part in fields.row_grids())
    scales = (base + np.arange(1 << scheme.scale_bits, dtype=np.int32) * step).view(np.float32)
    inverse, top = F32(1) / scales, F32(scheme.levels - 1)
    first, last = _scale_codes(low, high, scales, header & 3, scheme)
    tried = (np.arange(len(scales)) >= first[:, None]) & (np.arange(len(scales)) <= last[:, None])
    z = _first_zeros(low, high, inverse, zeros, top)[:, :, None] + np.arange(min(LANES, len(zeros)))
    errors = _errors(w[:, None, None], c[:, None, None], inverse[None, :, None], zeros[z], top)
    errors = np.where(tried[:, :, None], errors * np.square(scales[:, None], dtype=np.float64), np.inf)
    errors = errors.reshape(len(w), -1)
    best, blocks = errors.argmin(axis=1), np.arange(len(w))
    s, z = best // z.shape[2], z.reshape(len(w), -1)[blocks, best]
    codes = np.floor(w * inverse[s][:, None] + zeros[z][:, None] + HALF)
    codes = np.minimum(np.maximum(codes, F32(0)), top).astype(np.uint8)
    error = np.add.accumulate(errors[blocks, best] * factors[0])[-1] + (errors[blocks, best] * factors[1]).max()
    return (s | z << scheme.scale_bits).astype(np.uint16), codes, float(error)


def _scale_codes(low, high, scales, window: int, scheme: RowScheme) -> tuple[np.ndarray, np.ndarray]:
    """First and last candidate scale code of each block."""
    top = F32(scheme.levels - 1)
    span = high - low
    one_sided = np.maximum(-low, high) / (HALF + HALF / F32(1 << window))
    first = np.searchsorted(scales, span / top * F32(scheme.narrowest), side="right") - 1
    last = np.searchsorted(scales, np.maximum(span, one_sided) / top * MARGIN)
    return np.maximum(first, 0), np.minimum(last, len(scales) - 1)


def _first_zeros(low, high, inverse, zeros, top) -> np.ndarray:
    """First candidate zero code for each block and scale code, int64 [blocks, scale codes]."""
    if len(zeros) <= LANES:
        return np.zeros((len(low), len(inverse)), np.int64)
    middle = top * HALF - (low + high)[:, None] * HALF * inverse
    nearest = np.floor((middle - zeros[0]) / (zeros[1] - zeros[0])).astype(np.int64)
    return np.clip(nearest - LANES // 2, 0, len(zeros) - LANES)
