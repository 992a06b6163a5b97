"""Kernels that search scales and codes of IQ4_NL and IQ4_XS: x is about scale * level, from a codebook of 16 levels.

near f32 [255]: nearest level to each of -127 .. 127. x f32 [N, K]. w f32 [1 or N, K]: weights of squared errors.
"""

import numpy as np

from numflow.quant.threads import kernel, part

_SIZE = 32
_TRIED = 8    # the largest weight is tried at so many integers on each side of the outermost levels
_ROUNDS = 3   # iterations of fitting scale to codes and codes to scale


@part
def _index(x):
    """Table index of a weight divided by its scale."""
    return np.int64(min(max(np.rint(x), np.float32(-127)), np.float32(127))) + 127


@part
def _fit(x, w, begin, near, inverse):
    """(best scale, explained sum of squares) for the levels of x at scale 1 / inverse."""
    sqq = np.float32(0)
    sxq = np.float32(0)
    for i in range(begin, begin + _SIZE):
        q = near[_index(x[i] * inverse)]
        sqq += w[i] * (q * q)
        sxq += w[i] * (x[i] * q)
    if sqq <= 0:
        return np.float32(0), np.float32(0)
    return sxq / sqq, sxq * sxq / sqq


@kernel
def best_scales(x, w, near, scales, begin, end):
    """The best scale, of either sign, of each block of 32: scales f32 [N, K / 32]."""
    for row in range(begin, end):
        v, u = x[row], w[row % len(w)]
        for block in range(scales.shape[1]):
            start = block * _SIZE
            extreme = np.float32(0)
            for i in range(start, start + _SIZE):
                if abs(v[i]) > abs(extreme):
                    extreme = v[i]
            best, scale = np.float32(0), np.float32(0)
            if extreme != 0:
                for more in range(-_TRIED, _TRIED + 1):
                    for level in (near[0] - more, near[254] + more):
                        found = _fit(v, u, start, near, np.float32(level) / extreme)
                        if found[1] > best:
                            scale, best = found
                for _ in range(_ROUNDS):
                    if scale == 0:
                        break
                    found = _fit(v, u, start, near, np.float32(1) / scale)
                    if found[1] <= best:
                        break
                    scale, best = found
            scales[row, block] = scale


@kernel
def steps_of_scales(x, w, near, levels, d, scales, stored, sums, begin, end):
    """Integer scales -levels .. levels - 1 in units of d f32 [N, K / 256]: stored i8 [N, K / 32].

    Also writes sums f32 [N, K / 256, 3]: squared errors, and the two sums of a least-squares fit of d.
    """
    for row in range(begin, end):
        v, u = x[row], w[row % len(w)]
        sums[row] = 0
        for block in range(scales.shape[1]):
            start, group = block * _SIZE, block * _SIZE // 256
            a = d[row, group]
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
                for k in range(start, start + _SIZE):
                    residual = v[k] - step * near[_index(v[k] * inverse)]
                    error += u[k] * residual * residual
                if error < best:
                    best, s = error, scale
            stored[row, block] = np.int8(s)
            step = a * s
            inverse = np.float32(1) / step if step != 0 else np.float32(0)
            total = sums[row, group]
            total[0] += best
            for k in range(start, start + _SIZE):
                q = near[_index(v[k] * inverse)]
                total[1] += u[k] * (s * q * s * q)
                total[2] += u[k] * (s * q * v[k])


@kernel
def codes_of_scales(x, scales, codes_of, codes, begin, end):
    """codes u8 [N, K] for scales f32 [N, K / 32]. codes_of u8 [255]: code of each of -127 .. 127."""
    for row in range(begin, end):
        for block in range(scales.shape[1]):
            scale = scales[row, block]
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            for k in range(block * _SIZE, (block + 1) * _SIZE):
                codes[row, k] = codes_of[_index(x[row, k] * inverse)]
