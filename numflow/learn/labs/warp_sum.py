"""Lab 10: a warp adds up.

A GPU kernel for y = w x, where w has 3.5 bits per weight. Two codes 0 .. 10 are stored as one pair of 7 bits,
11 * second + first (11^2 = 121 fits into 2^7 = 128). Here each pair is a u32 of its own, to keep the unpacking simple.

    y[row] = scale[row] * sum over k of (code[row, k] - 5) * x[k]
    pairs[row * count + j] holds the codes of columns 2 j (first) and 2 j + 1 (second)

One warp (32 threads that run together) computes one row: `i.block_x()` is the row, `i.lane_index()` is the thread's
index 0 .. 31 in the warp (its lane). Lane n takes the pairs n, n + 32, n + 64 ... below `count`, so that neighbouring
lanes read neighbouring memory. Each lane then has a partial sum. i.shuffle_xor(value, mask) returns the value of lane
`lane ^ mask`: after five exchanges, with masks 16, 8, 4, 2, 1, every lane has the whole sum (a butterfly reduction).
All lanes must take part in every exchange. Lane 0 writes y.

Float32 constants and conversions are written f32(...), as on the device. Indices and pairs are plain integers. Pointers
are indexed like arrays. The kernel runs on the simulator, in eight orders of threads.

    numflow learn check 10       numflow learn hint 10       numflow learn bench 10
"""

from numflow.cuda.lang import intrinsics as i
from numflow.cuda.lang.scalar import f32

LAB = {
    "number": 10, "title": "A warp adds up", "minutes": 60, "functions": ["gemv"], "grader": "warp", "needs": [9],
    "hints": [
        "Draw 8 lanes with a value each. Draw arrows between lanes whose indices differ by 4, then by 2, then by 1. "
        "Which sum does each lane have after each round?",
        "The hard part: the loop ends at different times in different lanes, but no lane may miss an exchange. Put the "
        "exchanges after the loop, outside of every if.",
        "for j in range(lane, count, 32): pair = pairs[row * count + j]; total += (f32(pair % 11) - f32(5)) * x[2 * j] "
        "+ (f32(pair // 11) - f32(5)) * x[2 * j + 1]; then total = f32(total + i.shuffle_xor(total, mask))."],
}
WARP, LEVELS, ZERO = 32, 11, 5


def gemv(y, pairs, scale, x, count):
    """Pointers y f32 [N], pairs u32 [N, count], scale f32 [N], x f32 [2 * count]; a block is one warp, for one row."""
    row, lane = i.block_x(), i.lane_index()
    total = f32(0)
    for j in range(lane, count, WARP):
        pair = pairs[row * count + j]
        total += (f32(pair % LEVELS) - f32(ZERO)) * x[2 * j] + (f32(pair // LEVELS) - f32(ZERO)) * x[2 * j + 1]
    for mask in (16, 8, 4, 2, 1):
        total = f32(total + i.shuffle_xor(total, mask))
    if lane == 0:
        y[row] = total * scale[row]


def _sum(pairs, x, count, row, lane, zero=ZERO, swapped=False, second_zero=None, step=2, second_offset=None,
         row_offset=None):
    """Partial sum of a lane. zero: zero point of first codes; second_zero: of second codes, None: the same."""
    total = f32(0)
    for j in range(lane, count, WARP):
        pair = pairs[(row * count if row_offset is None else row_offset) + j]
        first, second = (pair // LEVELS, pair % LEVELS) if swapped else (pair % LEVELS, pair // LEVELS)
        column = 2 * j + 1 if second_offset is None else j + second_offset
        total += ((f32(first) - f32(zero)) * x[step * j]
                  + (f32(second) - f32(zero if second_zero is None else second_zero)) * x[column])
    return total


def _butterfly(total, masks=(16, 8, 4, 2, 1)):
    for mask in masks:
        total = f32(total + i.shuffle_xor(total, mask))
    return total


def gemv__one_lane(y, pairs, scale, x, count):
    """the partial sum of lane 0 only: the sums of the lanes were not added"""
    row, lane = i.block_x(), i.lane_index()
    total = _sum(pairs, x, count, row, lane)
    if lane == 0:
        y[row] = total * scale[row]


def gemv__no_zero(y, pairs, scale, x, count):
    """codes whose zero point is not subtracted: subtract 5 from each code"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, 0))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__zero_of_first(y, pairs, scale, x, count):
    """a second code whose zero point is not subtracted: subtract 5 from both codes"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, ZERO, False, 0))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__zero_of_second(y, pairs, scale, x, count):
    """a first code whose zero point is not subtracted: subtract 5 from both codes"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, 0, False, ZERO))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__columns_of_pairs(y, pairs, scale, x, count):
    """the index j of a pair used as the index of its first column, which is 2 * j"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, step=1))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__of_number(y, pairs, scale, x, count):
    """columns j and j + 1 for pair j: its columns are 2 * j and 2 * j + 1"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, step=1, second_offset=1))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__exchanged_too_often(y, pairs, scale, x, count):
    """exchanges inside the loop, which add the same sums several times: exchange once, after the loop"""
    row, lane = i.block_x(), i.lane_index()
    total = f32(0)
    for j in range(lane, count, WARP):
        total = _butterfly(total + _sum(pairs, x, j + 1, row, j, row_offset=row * count))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__lane_0_exchanges(y, pairs, scale, x, count):
    """exchanges that only lane 0 executes: all lanes must take part"""
    row, lane = i.block_x(), i.lane_index()
    total = _sum(pairs, x, count, row, lane)
    if lane == 0:
        y[row] = _butterfly(total) * scale[row]


def gemv__last_writes(y, pairs, scale, x, count):
    """a partial sum that every lane writes to y: the last write wins"""
    row, lane = i.block_x(), i.lane_index()
    y[row] = _sum(pairs, x, count, row, lane) * scale[row]


def gemv__swapped(y, pairs, scale, x, count):
    """two codes of a pair that are swapped: the code of the first column is pair % 11"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, ZERO, True))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__four_rounds(y, pairs, scale, x, count):
    """a butterfly without mask 16: half of the lanes are missing in the sum"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane), (8, 4, 2, 1))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__no_scale(y, pairs, scale, x, count):
    """a sum that is not multiplied by the row's scale"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane))
    if lane == 0:
        y[row] = total


def gemv__first_row(y, pairs, scale, x, count):
    """the pairs of row 0 for every row"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, 0, lane))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__every_lane_all(y, pairs, scale, x, count):
    """all pairs in every lane: the sum is 32 times too large"""
    row, lane = i.block_x(), i.lane_index()
    total = f32(0)
    for start in range(min(WARP, count)):
        total += _sum(pairs, x, count, row, start)
    total = _butterfly(total)
    if lane == 0:
        y[row] = total * scale[row]


def gemv__exchange_inside(y, pairs, scale, x, count):
    """exchanges inside an if, in which some lanes do not take part"""
    row, lane = i.block_x(), i.lane_index()
    total = _sum(pairs, x, count, row, lane)
    if lane < count:
        total = _butterfly(total)
    if lane == 0:
        y[row] = total * scale[row]


def gemv__no_neighbours(y, pairs, scale, x, count):
    """a butterfly without mask 1: every second lane is missing in the sum"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane), (16, 8, 4, 2))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__steps_of_16(y, pairs, scale, x, count):
    """a loop step of 16 pairs instead of 32: pairs are summed twice"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane) + _sum(pairs, x, count, row, lane + 16))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__odd_column_twice(y, pairs, scale, x, count):
    """column 2 j + 1 for both codes of pair j: the first code belongs to column 2 j"""
    row, lane, total = i.block_x(), i.lane_index(), f32(0)
    for j in range(lane, count, WARP):
        pair = pairs[row * count + j]
        total += f32(pair % LEVELS + pair // LEVELS - 2 * ZERO) * x[2 * j + 1]
    total = _butterfly(total)
    if lane == 0:
        y[row] = total * scale[row]


def gemv__scaled_twice(y, pairs, scale, x, count):
    """a sum that is multiplied by the scale twice"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane))
    if lane == 0:
        y[row] = total * scale[row] * scale[row]


def gemv__six_rounds(y, pairs, scale, x, count):
    """a butterfly with one round too many, which doubles the sum"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane), (16, 8, 4, 2, 1, 1))
    if lane == 0:
        y[row] = total * scale[row]


def story(functions, model):
    """Text of a model whose square matrices (the output projections of attention) `gemv` multiplies on the simulator.
    """
    import numpy as np

    from numflow.learn.graders.stories import paired, written
    from numflow.learn.graders.warp import product

    def product_of(w):
        rows, columns = w.shape
        if rows != columns or columns % 2:
            return lambda x: x @ w.T
        pairs, scale = paired(w, columns)
        return lambda x: np.stack([product(functions["gemv"], pairs, scale[:, 0], one) for one in x])

    return written(model, product_of)


def bench(functions):
    """Number of exchanges of a warp for a row of 256 weights."""
    from numflow.learn.graders.warp import exchanges

    return {"what": "exchanges of a warp for a row of 256 weights", "unit": "",
            "bars": [("yours", exchanges(functions["gemv"])), ("one for each bit of 32 lanes", 5)]}
