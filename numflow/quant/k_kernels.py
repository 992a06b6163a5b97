"""Kernels that search the codes of GGML's K types: first scales of sub-blocks, then codes for quantised scales.

A super-block of 256 weights consists of sub-blocks. Types with a minimum: x is about d * scale * q - dmin * least, q >=
0.
Others: x is about d * scale * q, q of either sign. Scale and least of a sub-block are small integers, d and dmin are
float16. The search minimises the sum of squared errors with weights w f32 [1 or N, K].
"""

import numpy as np

from numflow.quant.threads import kernel, part

_STEPS = 12   # ranges tried for a sub-block, from one code fewer than all to one more
_ROUNDS = 3   # iterations of fitting scale to codes and codes to scale


@part
def _round(x, low, high):
    return min(max(np.float32(np.rint(x)), np.float32(low)), np.float32(high))


@part
def _fit(x, w, begin, size, top, inverse, least):
    """Least-squares (scale, least, error) for the codes of x at scale 1 / inverse and this `least`."""
    n = np.float32(0)
    sq = np.float32(0)
    sqq = np.float32(0)
    sx = np.float32(0)
    sxq = np.float32(0)
    sxx = np.float32(0)
    for i in range(begin, begin + size):
        q = _round((x[i] + least) * inverse, 0, top)
        weighted = w[i] * q
        n += w[i]
        sq += weighted
        sqq += weighted * q
        sx += w[i] * x[i]
        sxq += x[i] * weighted
        sxx += w[i] * x[i] * x[i]
    determinant = n * sqq - sq * sq
    scale = np.float32(0)
    found = np.float32(-1)
    if determinant > np.float32(1e-6) * n * sqq:
        scale = (n * sxq - sq * sx) / determinant
        found = (sq * sxq - sqq * sx) / determinant
    if scale < 0 or (scale == 0 and sx < 0):  # a single level fits best
        scale = np.float32(0)
        found = max(np.float32(0), -sx / n)
    elif found < 0:
        found = np.float32(0)
        scale = max(np.float32(0), sxq / sqq) if sqq > 0 else np.float32(0)
    error = (sxx + scale * scale * sqq + n * found * found
             - 2 * (scale * sxq - found * sx + scale * found * sq))
    return scale, found, error


@kernel
def scales_and_minima(x, w, size, top, scales, minima, begin, end):
    """The best scale and minimum (subtracted, >= 0) of each sub-block of x f32 [N, K], codes 0 .. top.

    Writes scales, minima f32 [N, K / size].
    """
    for row in range(begin, end):
        v, u = x[row], w[row % len(w)]
        for block in range(scales.shape[1]):
            start = block * size
            low = np.float32(0)
            high = v[start]
            for i in range(start, start + size):
                low = min(low, v[i])
                high = max(high, v[i])
            best = np.float32(np.inf)
            scale = np.float32(0)
            least = -low
            if high > low:
                for step in range(_STEPS + 1):
                    inverse = (top - np.float32(1) + np.float32(2) * step / _STEPS) / (high - low)
                    found = _fit(v, u, start, size, top, inverse, -low)
                    if found[2] < best:
                        scale, least, best = found
                for _ in range(_ROUNDS):
                    if scale <= 0:
                        break
                    found = _fit(v, u, start, size, top, np.float32(1) / scale, least)
                    if found[2] >= best:
                        break
                    scale, least, best = found
            scales[row, block], minima[row, block] = scale, least


@kernel
def codes_with_minima(x, w, size, top, levels, d, dmin, scales, minima, stored, least, codes, sums, begin, end):
    """Codes and stored scales for given d and dmin f32 [N, K / 256].

    levels: scales and minima are 0 .. levels. Writes stored, least u8 [N, K / size], codes u8 [N, K], and sums
    f32 [N, K / 256, 6]: squared errors, and the five sums of a least-squares fit of d and dmin.
    """
    for row in range(begin, end):
        v, u = x[row], w[row % len(w)]
        sums[row] = 0
        for block in range(scales.shape[1]):
            start, group = block * size, block * size // 256
            a, b = d[row, group], dmin[row, group]
            near = _round(scales[row, block] / a, 0, levels) if a > 0 else np.float32(0)
            under = _round(minima[row, block] / b, 0, levels) if b > 0 else np.float32(0)
            best, s, m = np.float32(np.inf), near, under
            for i in range(-1, 2):
                for j in range(-1, 2):
                    scale, minimum = near + i, under + j
                    if scale < 0 or scale > levels or minimum < 0 or minimum > levels:
                        continue
                    error = np.float32(0)
                    step, shift = a * scale, b * minimum
                    inverse = np.float32(1) / step if step > 0 else np.float32(0)
                    for k in range(start, start + size):
                        residual = v[k] + shift - step * _round((v[k] + shift) * inverse, 0, top)
                        error += u[k] * residual * residual
                    if error < best:
                        best, s, m = error, scale, minimum
            stored[row, block], least[row, block] = np.uint8(s), np.uint8(m)
            step, shift = a * s, b * m
            inverse = np.float32(1) / step if step > 0 else np.float32(0)
            total = sums[row, group]
            total[0] += best
            for k in range(start, start + size):
                q = _round((v[k] + shift) * inverse, 0, top)
                codes[row, k] = np.uint8(q)
                total[1] += u[k] * (s * q * s * q)
                total[2] += u[k] * (s * q * m)
                total[3] += u[k] * (m * m)
                total[4] += u[k] * (s * q * v[k])
                total[5] += u[k] * (m * v[k])


@part
def _fit_signed(x, w, begin, size, low, high, inverse):
    """(best scale, explained sum of squares) for the codes of x at scale 1 / inverse."""
    sqq = np.float32(0)
    sxq = np.float32(0)
    for i in range(begin, begin + size):
        q = _round(x[i] * inverse, low, high)
        sqq += w[i] * (q * q)
        sxq += w[i] * (x[i] * q)
    if sqq <= 0:
        return np.float32(0), np.float32(0)
    return sxq / sqq, sxq * sxq / sqq


@kernel
def signed_scales(x, w, size, low, high, scales, begin, end):
    """The best scale, of either sign, of each sub-block of x f32 [N, K], codes low .. high. scales f32 [N, K /
    size]."""
    for row in range(begin, end):
        v, u = x[row], w[row % len(w)]
        for block in range(scales.shape[1]):
            start = block * size
            extreme = np.float32(0)
            for i in range(start, start + size):
                if abs(v[i]) > abs(extreme):
                    extreme = v[i]
            best, scale = np.float32(0), np.float32(0)
            if extreme != 0:
                for step in range(_STEPS + 1):
                    more = np.float32(2) * step / _STEPS - np.float32(1)
                    for end_code in (low - more, high + more):
                        found = _fit_signed(v, u, start, size, low, high, end_code / extreme)
                        if found[1] > best:
                            scale, best = found
                for _ in range(_ROUNDS):
                    if scale == 0:
                        break
                    found = _fit_signed(v, u, start, size, low, high, np.float32(1) / scale)
                    if found[1] <= best:
                        break
                    scale, best = found
            scales[row, block] = scale


@kernel
def signed_codes(x, w, size, low, high, levels, d, scales, stored, codes, sums, begin, end):
    """Codes and stored scales (-levels .. levels - 1) for a given d f32 [N, K / 256].

    Writes stored i8 [N, K / size], codes i8 [N, K], and sums f32 [N, K / 256, 3]: squared errors, and the two sums of a
    least-squares fit of d.
    """
    for row in range(begin, end):
        v, u = x[row], w[row % len(w)]
        sums[row] = 0
        for block in range(scales.shape[1]):
            start, group = block * size, block * size // 256
            a = d[row, group]
            near = _round(scales[row, block] / a, -levels, levels - 1) if a != 0 else np.float32(0)
            best, s = np.float32(np.inf), near
            for i in range(-1, 2):
                scale = near + i
                if scale < -levels or scale >= levels:
                    continue
                error = np.float32(0)
                step = a * scale
                inverse = np.float32(1) / step if step != 0 else np.float32(0)
                for k in range(start, start + size):
                    residual = v[k] - step * _round(v[k] * inverse, low, high)
                    error += u[k] * residual * residual
                if error < best:
                    best, s = error, scale
            stored[row, block] = np.int8(s)
            step = a * s
            inverse = np.float32(1) / step if step != 0 else np.float32(0)
            total = sums[row, group]
            total[0] += best
            for k in range(start, start + size):
                q = _round(v[k] * inverse, low, high)
                codes[row, k] = np.int8(q)
                total[1] += u[k] * (s * q * s * q)
                total[2] += u[k] * (s * q * v[k])
