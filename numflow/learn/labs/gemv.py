"""Lab 9: a matrix times a vector, from 3.5 bits.

For every new token each weight matrix is read once and multiplied with one vector: y = w x. Almost all the time is
spent on reading w, so fewer bits per weight are faster. Here one byte contains the codes of two weights, 11 * second +
first, and each block of 32 columns of a row has a scale:

    w[row, 2 j]     = scale[row, 2 j // 32] * (pairs[row, j] % 11 - 5)
    w[row, 2 j + 1] = scale[row, 2 j // 32] * (pairs[row, j] // 11 - 5)

Write `gemv` as a Numba kernel (@njit: the function is compiled at its first call, and may use loops, scalars and NumPy
arrays only). It writes into y and returns nothing. Get it right first. Then `bench` compares your time with the time
that reading the bytes alone would take. What makes it fast:

- Never create an array of decoded weights.
- Multiply by the scale once per block, not once per weight.
- Copy the even and the odd elements of x into separate arrays.
- Avoid the division, so that the compiler can vectorise: pair // 11 is pair * 373 >> 12 for all pairs 0 .. 120.
- The compiler vectorises the innermost loop with `for block in range(scale.shape[1])` and `for j in range(16 * block,
  16 * block + 16)`. With len(x) // 32 or range(16) as bounds the same arithmetic may take more than twice as long.

    numflow learn check 9        numflow learn hint 9        numflow learn bench 9
"""

import numpy as np
from numba import njit

LAB = {
    "number": 9, "title": "Matrix times vector from 3.5 bits", "minutes": 90, "functions": ["gemv"], "grader": "own",
    "needs": [6],
    "hints": [
        "How many bytes are read for one row of 64 columns: of pairs, of scales, of x? Which of them must be read from "
        "memory again for every row?",
        "The hard part is the order of the loops: rows outermost, then blocks, then the 16 bytes of a block. Sum each "
        "block into a float32 of its own, and multiply it by the scale after the block.",
        "second = pair * 373 >> 12; first = pair - 11 * second (all np.int32); part += np.float32(first - 5) * even[j] "
        "+ np.float32(second - 5) * odd[j]; total += scale[row, block] * part; @njit(fastmath=True) allows vectors."],
}


@njit(fastmath=True)
def gemv(y, pairs, scale, x):
    """y f32 [N] is written; pairs u8 [N, K / 2], scale f32 [N, K / 32], x f32 [K]."""
    even, odd = x[0::2].copy(), x[1::2].copy()
    for row in range(len(y)):
        total = np.float32(0)
        for block in range(scale.shape[1]):
            part = np.float32(0)
            for j in range(16 * block, 16 * block + 16):
                pair = np.int32(pairs[row, j])
                second = pair * np.int32(373) >> np.int32(12)
                first = pair - np.int32(11) * second
                part += np.float32(first - np.int32(5)) * even[j] + np.float32(second - np.int32(5)) * odd[j]
            total += scale[row, block] * part
        y[row] = total


def _product(y, pairs, scale, x, levels=11, zero=5.0, swapped=False):
    first, second = (pairs % levels, pairs // levels)[::-1 if swapped else 1]
    w = np.stack([first, second], axis=2).reshape(len(pairs), -1).astype(np.float32) - np.float32(zero)
    y[:] = (w * np.repeat(scale, 32, axis=1)) @ x


def gemv__no_zero(y, pairs, scale, x):
    """codes whose zero point is not subtracted: subtract 5 from each code"""
    _product(y, pairs, scale, x, zero=0.0)


def gemv__zero_of_second(y, pairs, scale, x):
    """a first code whose zero point is not subtracted: subtract 5 from both codes"""
    _product(y, pairs, scale, x)
    y += 5 * (np.repeat(scale, 16, axis=1) @ x[0::2])


def gemv__zero_of_first(y, pairs, scale, x):
    """a second code whose zero point is not subtracted: subtract 5 from both codes"""
    _product(y, pairs, scale, x)
    y += 5 * (np.repeat(scale, 16, axis=1) @ x[1::2])


def gemv__no_last_block(y, pairs, scale, x):
    """a sum without the last block of each row"""
    _product(y, pairs, np.concatenate([scale[:, :-1], 0 * scale[:, -1:]], axis=1), x)


def gemv__swapped(y, pairs, scale, x):
    """two codes of a pair that are swapped: the code of the even column is pair % 11"""
    _product(y, pairs, scale, x, swapped=True)


def gemv__sixteen(y, pairs, scale, x):
    """codes of 4 bits each, pair % 16 and pair // 16: a pair is 11 * second + first"""
    _product(y, pairs, scale, x, levels=16)


def gemv__first_scale(y, pairs, scale, x):
    """the scale of a row's first block for all blocks of the row"""
    _product(y, pairs, np.repeat(scale[:, :1], scale.shape[1], axis=1), x)


def gemv__no_scale(y, pairs, scale, x):
    """sums that are not multiplied by the scales"""
    _product(y, pairs, np.ones_like(scale), x)


def gemv__added(y, pairs, scale, x):
    """sums that are added to the old content of y: overwrite y"""
    before = y.copy()
    _product(y, pairs, scale, x)
    y += before


def gemv__halves(y, pairs, scale, x):
    """pairs of a column of the first half of x and one of the second half: a pair is two neighbouring columns"""
    _product(y, pairs, scale, x.reshape(2, -1).T.ravel())


def gemv__wraps(y, pairs, scale, x):
    """codes that wrap around in uint8, where 3 - 5 is 254"""
    first, second = pairs % np.uint8(11) - np.uint8(5), pairs // np.uint8(11) - np.uint8(5)
    w = np.stack([first, second], axis=2).reshape(len(pairs), -1).astype(np.float32)
    y[:] = (w * np.repeat(scale, 32, axis=1)) @ x


def gemv__next_scale(y, pairs, scale, x):
    """the scale of the next block instead of the block's own"""
    _product(y, pairs, np.roll(scale, -1, axis=1), x)


def gemv__shifted_by_11(y, pairs, scale, x):
    """pair * 373 >> 11 as the second code: pair // 11 is pair * 373 >> 12"""
    second = pairs.astype(np.int32) * 373 >> 11
    first = pairs.astype(np.int32) - 11 * second
    w = np.stack([first, second], axis=2).reshape(len(pairs), -1).astype(np.float32) - 5
    y[:] = (w * np.repeat(scale, 32, axis=1)) @ x


def gemv__eight(y, pairs, scale, x):
    """a zero point of 8, the middle of 16 codes: the middle of 11 codes is 5"""
    _product(y, pairs, scale, x, zero=8.0)


def gemv__last_row(y, pairs, scale, x):
    """a loop that leaves out the last row"""
    before = y[-1]
    _product(y, pairs, scale, x)
    y[-1] = before


def grade(functions):
    """Grade with matrices of several shapes."""
    from numflow.learn.graders.gemv import grade_gemv

    return grade_gemv(functions["gemv"])


def story(functions, model):
    """Text of a model whose matrices are pairs of codes, multiplied by `gemv`."""
    from numflow.learn.graders.stories import UNIT, paired, written

    def product_of(w):
        pairs, scale = paired(w) if w.shape[1] % UNIT == 0 else (None, None)

        def product(x):
            if pairs is None:
                return x @ w.T
            y = np.empty((len(x), len(w)), np.float32)
            for row, one in zip(y, x, strict=True):
                functions["gemv"](row, pairs, scale, np.ascontiguousarray(one))
            return y

        return product

    return written(model, product_of)


def bench(functions):
    """Times of a matrix of 8192 x 8192 weights."""
    from numflow.learn.graders.gemv import gemv_bars

    return gemv_bars(functions["gemv"])
