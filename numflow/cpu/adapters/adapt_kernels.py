"""Kernels of products of low rank (adapt.py), and of the entries of tables.py."""

from numflow.cpu.adapters.adapt import DOWN, LOOK_UP, UP
from numflow.cpu.adapters.tables import BIAS, FIELDS, RANK, SCALE, A, B
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import TOKENS, kernel
from numflow.cpu.simd.float32 import fma, load_part, store_part, sum_lanes
from numflow.cpu.simd.vector import inline, zero_f32

_AT_ONCE = 4  # rows of A that meet a row of x at once (tables.RANKS), and tiles of y that are summed at once


@kernel
def adapter_down(args, thread, n_threads):
    """h[row] = A x of the row's adapter. Items: rows times fours of ranks, of which a row may have fewer."""
    fours = i64(args, DOWN.ranks) // _AT_ONCE
    rows = i64(i64(args, DOWN.header), i64(args, DOWN.rows))
    begin, end = share(rows * fours, thread, n_threads)
    for item in range(begin, end):
        row, rank = item // fours, item % fours * _AT_ONCE
        entry = _entry(args, row, i64(args, DOWN.routes))
        if entry and rank < i64(entry, RANK):
            columns = i64(args, DOWN.columns)
            x = i64(args, DOWN.x) + 4 * (row // i64(args, DOWN.shared)) * i64(args, DOWN.x_stride)
            h = i64(args, DOWN.h) + 4 * (row * i64(args, DOWN.ranks) + rank)
            _dot_four(i64(entry, A) + 4 * rank * columns, x, columns, h)


@kernel
def adapter_rows(args, thread, n_threads):
    """h[t] = row tokens[t] of A, or zeros where others have it. Items: rows."""
    header, ranks = i64(args, LOOK_UP.header), i64(args, LOOK_UP.ranks)
    first, held = i64(args, LOOK_UP.first), i64(args, LOOK_UP.held)
    tokens, numbers = i32_ptr(i64(header, TOKENS)), i32_ptr(i64(header, i64(args, LOOK_UP.numbers)))
    begin, end = share(i64(header, i64(args, LOOK_UP.rows)), thread, n_threads)
    for t in range(begin, end):
        if numbers[t] >= 0:
            entry = i64(args, LOOK_UP.table) + 8 * FIELDS * numbers[t]
            rank, h = i64(entry, RANK), f32_ptr(i64(args, LOOK_UP.h) + 4 * t * ranks)
            row = tokens[t] - first
            if 0 <= row < held:
                a = f32_ptr(i64(entry, A) + 4 * row * rank)
                for k in range(rank):
                    h[k] = a[k]
            else:
                for k in range(rank):
                    h[k] = 0.0


@kernel
def adapter_up(args, thread, n_threads):
    """y[row] = scale y[row] + B h + bias. Items: rows times fours of tiles of 16 columns."""
    width = i64(args, UP.width)
    tiles = (width + 15) // 16
    fours = (tiles + _AT_ONCE - 1) // _AT_ONCE
    begin, end = share(i64(i64(args, UP.header), i64(args, UP.rows)) * fours, thread, n_threads)
    for item in range(begin, end):
        row, tile = item // fours, item % fours * _AT_ONCE
        entry = _entry(args, row, i64(args, UP.routes))
        if entry and (i64(entry, RANK) or i64(entry, BIAS) or i64(entry, SCALE)):
            h = i64(args, UP.h) + 4 * row * i64(args, UP.ranks)
            y = i64(args, UP.y) + 4 * row * i64(args, UP.y_stride)
            if tile + _AT_ONCE <= tiles:
                _up_four(entry, h, y, tile, width)
            else:
                for one in range(tile, tiles):
                    _up_one(entry, h, y, one, width)


@inline
def _entry(args, row, routes):
    """Address of the entry of a row's adapter, of its expert where rows are routes; 0 without one.

    The slots read here are those that `down` and `up` share.
    """
    header = i64(args, UP.header)
    number = i32_ptr(i64(header, i64(args, UP.numbers)))[row // routes]
    if number < 0:
        return 0
    expert = 0
    if i64(args, UP.ids):
        expert = i32_ptr(i64(args, UP.ids) + 4 * (row // routes) * i64(args, UP.ids_stride))[row % routes]
        expert -= i64(args, UP.first)
        if expert < 0 or expert >= i64(args, UP.experts):
            return 0
    return i64(args, UP.table) + 8 * FIELDS * (number * i64(args, UP.experts) + expert)


@inline
def _dot_four(a, x, columns, h):
    """h[0 .. 3] = four rows of A times x, each in 16 lanes that are added as a tree."""
    first, second, third, fourth = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    for i in range(0, columns, 16):
        left = columns - i
        value = load_part(x + 4 * i, left)
        first = fma(value, load_part(a + 4 * i, left), first)
        second = fma(value, load_part(a + 4 * (columns + i), left), second)
        third = fma(value, load_part(a + 4 * (2 * columns + i), left), third)
        fourth = fma(value, load_part(a + 4 * (3 * columns + i), left), fourth)
    sums = f32_ptr(h)
    sums[0], sums[1], sums[2], sums[3] = sum_lanes(first), sum_lanes(second), sum_lanes(third), sum_lanes(fourth)


@inline
def _up_four(entry, h, y, tile, width):
    """y of four tiles, whose sums need not wait for each other."""
    rank, values = i64(entry, RANK), f32_ptr(h)
    b, more = i64(entry, B) + 64 * tile * rank, 64 * rank
    first, second = _bias(entry, tile), _bias(entry, tile + 1)
    third, fourth = _bias(entry, tile + 2), _bias(entry, tile + 3)
    for k in range(rank):
        value, at = values[k], b + 64 * k
        first = fma(value, load_part(at, 16), first)
        second = fma(value, load_part(at + more, 16), second)
        third = fma(value, load_part(at + 2 * more, 16), third)
        fourth = fma(value, load_part(at + 3 * more, 16), fourth)
    _add(entry, y, tile, width, first)
    _add(entry, y, tile + 1, width, second)
    _add(entry, y, tile + 2, width, third)
    _add(entry, y, tile + 3, width, fourth)


@inline
def _up_one(entry, h, y, tile, width):
    """The same of one tile, in the same order."""
    rank, values, total = i64(entry, RANK), f32_ptr(h), _bias(entry, tile)
    for k in range(rank):
        total = fma(values[k], load_part(i64(entry, B) + 64 * (tile * rank + k), 16), total)
    _add(entry, y, tile, width, total)


@inline
def _bias(entry, tile):
    """Bias of a tile, zeros without any."""
    total = zero_f32()
    if i64(entry, BIAS):
        total = load_part(i64(entry, BIAS) + 64 * tile, 16)
    return total


@inline
def _add(entry, y, tile, width, total):
    """y = scale y + total, of a tile."""
    at, count = y + 64 * tile, width - 16 * tile
    if i64(entry, SCALE):
        total = fma(load_part(at, count), load_part(i64(entry, SCALE) + 64 * tile, 16), total)
    else:
        total = load_part(at, count) + total
    store_part(at, total, count)
