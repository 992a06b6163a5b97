"""Lab 10: a warp adds up.

A GPU kernel for y = w x, where w has 3.5 bits for each weight. Two weights, codes of 0 .. 10, are one number of 7 bits,
11 * second + first (11^2 = 121 fits into 2^7 = 128); here each pair is a u32 of its own, so that the arithmetic shows.

    y[row] = scale[row] * sum over k of (code[row, k] - 5) * x[k]
    pairs[row * count + j] holds the codes of columns 2 j (first) and 2 j + 1 (second)

One warp, 32 threads that run together, works on a row: `i.block_x()` is the row, `i.lane_index()` the thread's number
0 .. 31. Lane j takes the pairs j, j + 32, j + 64 ... below `count`, so that neighbours read neighbours. Each lane
then has a part of the sum, and i.shuffle_xor(value, mask) gives it the value of lane `lane ^ mask`: five exchanges
with masks 16, 8, 4, 2, 1 leave the whole sum in every lane (a butterfly). All lanes take part in an exchange. Lane 0
writes y.

Float32 numbers are f32(...), as on the device; indices and pairs are whole numbers as they come; pointers are indexed.
The kernel runs on the simulator, in eight orders of threads.

    numflow learn check 10       numflow learn hint 10       numflow learn bench 10
"""

from numflow.cuda.lang import intrinsics as i
from numflow.cuda.lang.scalar import f32

LAB = {
    "number": 10, "title": "A warp adds up", "minutes": 60, "functions": ["gemv"], "grader": "warp", "needs": [9],
    "hints": [
        "Draw 8 lanes with a number each, and arrows between lanes whose numbers differ in the bit 4, then 2, then 1. "
        "What does each lane have after each round?",
        "The hard part is that the loop ends at different times in different lanes, but no lane may miss an exchange: "
        "put the exchanges behind the loop, outside of every if.",
        "for at in range(lane, count, 32): pair = pairs[row * count + at]; total += (f32(pair % 11) - f32(5)) * x[2 * "
        "at] + (f32(pair // 11) - f32(5)) * x[2 * at + 1]; then total = f32(total + i.shuffle_xor(total, mask))."],
}
WARP, LEVELS, ZERO = 32, 11, 5


def gemv(y, pairs, scale, x, count):
    """y f32 [N], pairs u32 [N, count], scale f32 [N], x f32 [2 * count] are pointers; a block is a warp, for a row."""
    row, lane = i.block_x(), i.lane_index()
    total = f32(0)
    for at in range(lane, count, WARP):
        pair = pairs[row * count + at]
        total += (f32(pair % LEVELS) - f32(ZERO)) * x[2 * at] + (f32(pair // LEVELS) - f32(ZERO)) * x[2 * at + 1]
    for mask in (16, 8, 4, 2, 1):
        total = f32(total + i.shuffle_xor(total, mask))
    if lane == 0:
        y[row] = total * scale[row]


def _sum(pairs, x, count, row, lane, zero=ZERO, turned=False, other=None, step=2, second_at=None, row_at=None):
    """The part of a lane. other: the zero of second codes, if another one."""
    total = f32(0)
    for at in range(lane, count, WARP):
        pair = pairs[(row * count if row_at is None else row_at) + at]
        first, second = (pair // LEVELS, pair % LEVELS) if turned else (pair % LEVELS, pair // LEVELS)
        column = 2 * at + 1 if second_at is None else at + second_at
        total += ((f32(first) - f32(zero)) * x[step * at]
                  + (f32(second) - f32(zero if other is None else other)) * x[column])
    return total


def _butterfly(total, masks=(16, 8, 4, 2, 1)):
    for mask in masks:
        total = f32(total + i.shuffle_xor(total, mask))
    return total


def gemv__one_lane(y, pairs, scale, x, count):
    """the part of lane 0 alone: the lanes were not added up"""
    row, lane = i.block_x(), i.lane_index()
    total = _sum(pairs, x, count, row, lane)
    if lane == 0:
        y[row] = total * scale[row]


def gemv__no_zero(y, pairs, scale, x, count):
    """codes without their zero: 5 is to be subtracted from each"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, 0))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__zero_of_first(y, pairs, scale, x, count):
    """the second code without its zero: 5 is to be subtracted from both"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, ZERO, False, 0))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__zero_of_second(y, pairs, scale, x, count):
    """the first code without its zero: 5 is to be subtracted from both"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, 0, False, ZERO))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__columns_of_pairs(y, pairs, scale, x, count):
    """the number of a pair taken for that of its first column, which is 2 * at"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, step=1))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__of_number(y, pairs, scale, x, count):
    """columns `at` and `at` + 1 for pair `at`: they are 2 * at and 2 * at + 1"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, step=1, second_at=1))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__exchanged_too_often(y, pairs, scale, x, count):
    """exchanges in the loop, which add up what was added up before: they are to come once, behind it"""
    row, lane = i.block_x(), i.lane_index()
    total = f32(0)
    for at in range(lane, count, WARP):
        total = _butterfly(total + _sum(pairs, x, at + 1, row, at, row_at=row * count))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__lane_0_exchanges(y, pairs, scale, x, count):
    """exchanges that lane 0 does alone: all lanes have to take part"""
    row, lane = i.block_x(), i.lane_index()
    total = _sum(pairs, x, count, row, lane)
    if lane == 0:
        y[row] = _butterfly(total) * scale[row]


def gemv__last_writes(y, pairs, scale, x, count):
    """a part of the sum that every lane writes: who comes last stays"""
    row, lane = i.block_x(), i.lane_index()
    y[row] = _sum(pairs, x, count, row, lane) * scale[row]


def gemv__turned(y, pairs, scale, x, count):
    """pairs the wrong way round: the first column's code is pair % 11"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane, ZERO, True))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__four_rounds(y, pairs, scale, x, count):
    """a butterfly without its round of mask 16: half of the lanes are not in the sum"""
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
    """pairs of row 0 for every row"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, 0, lane))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__every_lane_all(y, pairs, scale, x, count):
    """every lane walking over all pairs: the sum is 32 times too large"""
    row, lane = i.block_x(), i.lane_index()
    total = f32(0)
    for start in range(min(WARP, count)):
        total += _sum(pairs, x, count, row, start)
    total = _butterfly(total)
    if lane == 0:
        y[row] = total * scale[row]


def gemv__exchange_inside(y, pairs, scale, x, count):
    """exchanges that some lanes do not take part in"""
    row, lane = i.block_x(), i.lane_index()
    total = _sum(pairs, x, count, row, lane)
    if lane < count:
        total = _butterfly(total)
    if lane == 0:
        y[row] = total * scale[row]


def gemv__no_neighbours(y, pairs, scale, x, count):
    """a butterfly without its round of mask 1: every second lane is not in the sum"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane), (16, 8, 4, 2))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__steps_of_16(y, pairs, scale, x, count):
    """lanes that go on by 16 pairs: those of the upper half of the warp are counted twice, 32 are a step"""
    row, lane = i.block_x(), i.lane_index()
    total = _butterfly(_sum(pairs, x, count, row, lane) + _sum(pairs, x, count, row, lane + 16))
    if lane == 0:
        y[row] = total * scale[row]


def gemv__odd_column_twice(y, pairs, scale, x, count):
    """column 2 j + 1 for both codes of pair j: the first one is of column 2 j"""
    row, lane, total = i.block_x(), i.lane_index(), f32(0)
    for at in range(lane, count, WARP):
        pair = pairs[row * count + at]
        total += f32(pair % LEVELS + pair // LEVELS - 2 * ZERO) * x[2 * at + 1]
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
    """The text of a model whose square matrices, those at the end of attention, `gemv` multiplies on the simulator."""
    import numpy as np

    from numflow.learn.graders.stories import paired, written
    from numflow.learn.graders.warp import product

    def made(w):
        rows, columns = w.shape
        if rows != columns or columns % 2:
            return lambda x: x @ w.T
        pairs, scale = paired(w, columns)
        return lambda x: np.stack([product(functions["gemv"], pairs, scale[:, 0], one) for one in x])

    return written(model, made)


def bench(functions):
    """Exchanges and barriers of a warp for a row of 256 weights."""
    from numflow.learn.graders.warp import exchanges

    return {"what": "exchanges of a warp for a row of 256 weights", "unit": "",
            "bars": [("yours", exchanges(functions["gemv"])), ("one for each bit of 32 lanes", 5)]}
