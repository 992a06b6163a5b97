"""Lab 7: headers.

A header contains the scale and the zero point of a block of codes. Headers must be small: in q3h a row has a header of
16 bits, and each block of 32 weights a header of 6 bits. A good choice of the headers reduces the error as much as half
a bit more per weight.

    weight = scale * (code - zero)                       code 0 .. levels - 1
    row header:      base code << 7 | step code << 2 | window           9, 5 and 2 bits
    block header:    S | Z << scheme.scale_bits                         3 and 3 bits in q3h
    scale            the float32 whose bits are  B + S * D
    B                (base code + 108) << 21; a base code of 0 makes the whole row 0
    D                scheme.steps()[step code]
    zero             scheme.zeros()[window][Z]

`scheme` has the integers block, levels, scale_bits and zero_bits: 32, 11, 3 and 3 in q3h.

The bits of a float32, read as an integer, are nearly linear in its logarithm: equal steps of the integer are nearly
equal factors. So the 8 possible scales of a block lie between the float of B and the float of B + 7 D, at nearly equal
ratios. `grids` (given) returns all scales and zeros of a row header whose base code is not 0. The checker shows what
your code prints, such as scheme.zeros(). Weights outside of the range of the codes are clipped. Clipping is often the
better choice: a range that is a little smaller than the block's range has finer steps.

`headers` chooses the header of each row, S and Z of each block, and the codes. The sum of squared errors must be at
most 1.02 times the error of numflow's search: for normal weights, weights with long tails, with one outlier, all
positive, and with blocks and rows of zeros.

    numflow learn check 7        numflow learn hint 7        numflow learn bench 7
"""

import numpy as np

from numflow.quant.layout import Fields

LAB = {
    "number": 7, "title": "Headers", "minutes": 60, "functions": ["headers"], "grader": "own", "needs": [6],
    "hints": [
        "Draw the scales of a row's four blocks on a logarithmic line, and eight marks at equal distances: the first "
        "mark is B, the distance is D. Which marks must be near which scales?",
        "Search by trial: for a row header, all 64 pairs of S and Z can be tried at once for all blocks, as an array "
        "[blocks, S, Z, 32]. The best pair of each block gives the error of the header.",
        "The ideal scale of a block is its range / (levels - 1). Try base codes from 0.5 times the smallest to the "
        "smallest of them; for each, the step codes for which the scale of B + 7 D is 0.6 to 2 times the largest; and "
        "all four windows. Keep the header with the least error."],
}


def grids(header, scheme):
    """All scales f32 [2^scale_bits] and zeros f32 [2^zero_bits] of a row header."""
    base = (header >> 7) + 108 << 21
    scales = (base + np.arange(1 << scheme.scale_bits) * scheme.steps()[header >> 2 & 31]).astype(np.int32)
    return scales.view(np.float32), scheme.zeros()[header & 3]


def headers(x, scheme):
    """x f32 [N, K] -> Fields(scheme, rows u16 [N], blocks u16 [N, K / block], codes u8 [N, K])."""
    return _headers(x, scheme)


def _headers(x, scheme, windows=(0, 1, 2, 3), half=0.5, middle=False, single=False):
    rows, blocks = np.zeros(len(x), np.uint16), np.zeros((len(x), x.shape[1] // scheme.block), np.uint16)
    codes = np.zeros(x.shape, np.uint8)
    for row, w in enumerate(x.reshape(len(x), -1, scheme.block)):
        least = np.inf
        for header in _candidates(w, scheme, windows):
            scales, zeros = grids(header, scheme)
            scales = scales[None, :, None, None]
            tried = np.clip(np.floor(w[:, None, None, :] / scales + zeros[None, None, :, None] + np.float32(half)),
                            0, scheme.levels - 1)
            error = ((scales * (tried - zeros[None, None, :, None]) - w[:, None, None, :]) ** 2).sum(axis=3)
            if middle:
                error[:, :, np.arange(len(zeros)) != len(zeros) // 2] = np.inf
            if single:
                error[:, :-1] = np.inf
            best = error.reshape(len(w), -1).argmin(axis=1)
            total = error.reshape(len(w), -1).min(axis=1).sum()
            if total < least:
                s, z = np.divmod(best, len(zeros))
                least, rows[row], blocks[row] = total, header, s | z << scheme.scale_bits
                codes[row] = tried[np.arange(len(w)), s, z].ravel()
    return Fields(scheme, rows, blocks, codes)


def _candidates(w, scheme, windows):
    """Row headers to try for w [blocks, block]."""
    scales = (np.maximum(w.max(axis=1), 0) - np.minimum(w.min(axis=1), 0)) / np.float32(scheme.levels - 1)
    if not scales.any():
        return [0]
    top, steps = (1 << scheme.scale_bits) - 1, scheme.steps().astype(np.int64)
    least, last = scales[scales > 0].min(), scales.max()
    low, most, end = ((int(value.view(np.int32)) >> 21) - 108
                      for value in np.float32([least * 0.5, least, last]))
    bases, found = {*range(low, most + 2), (2 * most + end) // 3, (most + 2 * end) // 3}, []
    for base in sorted(base for base in bases if 0 < base < 512):
        reach = ((base + 108 << 21) + top * steps).astype(np.int64)
        ends = np.minimum(reach, 0x7F000000).astype(np.int32).view(np.float32)
        near = np.flatnonzero((ends > last * 0.6) & (ends < last * 2))
        for step in near if len(near) else [int(np.abs(ends - last).argmin())]:
            found += [base << 7 | int(step) << 2 | window for window in windows]
    return found


def headers__middle(x, scheme):
    """zeros in the middle of the codes for all blocks: choose the zero of each block by its weights"""
    return _headers(x, scheme, middle=True)


def headers__one_scale(x, scheme):
    """one scale for all blocks of a row: choose S for each block"""
    return _headers(x, scheme, single=True)


def headers__cut_off(x, scheme):
    """codes that are truncated instead of rounded"""
    return _headers(x, scheme, half=0.0)


def headers__wide_window(x, scheme):
    """zeros of the widest window only: a narrower window has finer steps"""
    return _headers(x, scheme, windows=(0,))


def headers__swapped(x, scheme):
    """block headers with Z in the low bits: the low bits are S"""
    fields = headers(x, scheme)
    s, z = fields.blocks & (1 << scheme.scale_bits) - 1, fields.blocks >> scheme.scale_bits
    return Fields(scheme, fields.rows, (z | s << scheme.zero_bits).astype(np.uint16), fields.codes)


def headers__row_of_ones(x, scheme):
    """a row header in which step code and window are swapped"""
    fields = headers(x, scheme)
    step, window = fields.rows >> 2 & 31, fields.rows & 3
    return Fields(scheme, (fields.rows >> 7 << 7 | window << 5 | step).astype(np.uint16), fields.blocks, fields.codes)


def grade(functions):
    """Grade with four rows of each kind of weights in q3h, then of one kind in q3 and q2."""
    from numflow.learn.graders.calls import Call, grade_calls
    from numflow.learn.graders.quantised import KINDS, headers_judge, rows_of
    from numflow.quant.layout import ROW_SCHEMES

    return grade_calls(functions, [
        Call(f"{kind}-{name}", "headers", (rows_of(kind), ROW_SCHEMES[name]), judge=headers_judge(kind, name))
        for kind, name in (*((kind, "q3h") for kind in KINDS), ("normal", "q3"), ("laplace", "q2"))])


def bench(functions):
    """Errors of rows by your headers and by numflow's."""
    from numflow.learn.graders.quantised import KINDS, row_errors

    bars = [bar for kind in KINDS for bar in row_errors(functions["headers"], kind, "q3h")]
    return {"what": "error in q3h, relative to the weights", "unit": "%", "bars": bars}
