"""Kernels that find scales and codes of IQ4_NL and IQ4_XS: x is about scale * level, the levels of a table of 16.

near f32 [255] has the level nearest to each of -127 .. 127; x f32 [N, K]; w f32 [1 or N, K] weights squared errors.
"""

import numpy as np

from numflow.quant.threads import kernel, part

_SIZE = 32
_TRIED = 8    # whole numbers to both sides of the outermost levels that the largest weight is put at
_ROUNDS = 3   # times that codes and scale are fitted to each other


@part
def _place(x):
    """Of a weight by its scale, in the tables."""
    return np.int64(min(max(np.rint(x), np.float32(-127)), np.float32(127))) + 127


@part
def _fit(x, w, begin, near, inverse):
    """(scale, what of the squares it explains) of the levels which x has with a scale of 1 / inverse."""
    sqq = np.float32(0)
    sxq = np.float32(0)
    for i in range(begin, begin + _SIZE):
        q = near[_place(x[i] * inverse)]
        sqq += w[i] * (q * q)
        sxq += w[i] * (x[i] * q)
    if sqq <= 0:
        return np.float32(0), np.float32(0)
    return sxq / sqq, sxq * sxq / sqq


@kernel
def best_scales(x, w, near, scales, begin, end):
    """The best scale of each block of 32, of either sign: scales f32 [N, K / 32]."""
    for row in range(begin, end):
        v, u = x[row], w[row % len(w)]
        for block in range(scales.shape[1]):
            at = block * _SIZE
            extreme = np.float32(0)
            for i in range(at, at + _SIZE):
                if abs(v[i]) > abs(extreme):
                    extreme = v[i]
            best, scale = np.float32(0), np.float32(0)
            if extreme != 0:
                for more in range(-_TRIED, _TRIED + 1):
                    for level in (near[0] - more, near[254] + more):
                        found = _fit(v, u, at, near, np.float32(level) / extreme)
                        if found[1] > best:
                            scale, best = found
                for _ in range(_ROUNDS):
                    if scale == 0:
                        break
                    found = _fit(v, u, at, near, np.float32(1) / scale)
                    if found[1] <= best:
                        break
                    scale, best = found
            scales[row, block] = scale


@kernel
def steps_of_scales(x, w, near, levels, d, scales, stored, sums, begin, end):
    """Scales as whole numbers -levels .. levels - 1 of d f32 [N, K / 256]: stored i8 [N, K / 32].

    sums f32 [N, K / 256, 3] are written too: of squared errors, and of what fitting d anew takes.
    """
    for row in range(begin, end):
        v, u = x[row], w[row % len(w)]
        sums[row] = 0
        for block in range(scales.shape[1]):
            at, over = block * _SIZE, block * _SIZE // 256
            a = d[row, over]
            middle = np.float32(np.rint(scales[row, block] / a)) if a != 0 else np.float32(0)
            middle = min(max(middle, -levels), levels - 1)
            best, s = np.float32(np.inf), middle
            for i in range(-1, 2):
                scale = middle + i
                if scale < -levels or scale >= levels:
                    continue
                error = np.float32(0)
                step = a * scale
                inverse = np.float32(1) / step if step != 0 else np.float32(0)
                for k in range(at, at + _SIZE):
                    missing = v[k] - step * near[_place(v[k] * inverse)]
                    error += u[k] * missing * missing
                if error < best:
                    best, s = error, scale
            stored[row, block] = np.int8(s)
            step = a * s
            inverse = np.float32(1) / step if step != 0 else np.float32(0)
            total = sums[row, over]
            total[0] += best
            for k in range(at, at + _SIZE):
                q = near[_place(v[k] * inverse)]
                total[1] += u[k] * (s * q * s * q)
                total[2] += u[k] * (s * q * v[k])


@kernel
def codes_of_scales(x, scales, codes_of, codes, begin, end):
    """codes u8 [N, K] for scales f32 [N, K / 32]; codes_of u8 [255] has the code of -127 .. 127."""
    for row in range(begin, end):
        for block in range(scales.shape[1]):
            scale = scales[row, block]
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for k in range(block * _SIZE, (block + 1) * _SIZE):
                codes[row, k] = codes_of[_place(x[row, k] * inverse)]
