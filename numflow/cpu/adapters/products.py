"""Products of rows with the matrices of an adapter (tables.py), for kernels.

Each function has a form for one row and a form for several rows, which give the same bits: the order of a row's sums is
the same in both.
"""

from numba import types

from numflow.cpu.adapters.tables import BIAS, FACTOR, HALF, RANK, SCALE, A, B
from numflow.cpu.runtime.access import f32_ptr, f64, i64
from numflow.cpu.simd.float32 import fma, load_part, store_part, sum_lanes
from numflow.cpu.simd.value import prefetch, staged
from numflow.cpu.simd.vector import inline, load_f16, load_f32, store_f32, zero_f32

_AHEAD = 2048  # prefetch distance in bytes
AT_ONCE = 4  # rows of A multiplied with a row of x at once (tables.RANKS), and tiles of 16 columns of y per item


@inline
def low_of_row(entry, rank, x, columns, h):
    """h[0 .. 3] = factor * (four rows of A, from `rank` on, times x), summed in 16 lanes, then as a balanced tree."""
    if i64(entry, HALF):
        _low_of_row(entry, i64(entry, A) + 2 * rank * _padded(columns), x, columns, h, True)
    else:
        _low_of_row(entry, i64(entry, A) + 4 * rank * _padded(columns), x, columns, h, False)


@inline
def low_of_rows(entry, rank, x, z, columns, h, g):
    """The same for two rows: h of x, and g of z."""
    if i64(entry, HALF):
        _low_of_rows(entry, i64(entry, A) + 2 * rank * _padded(columns), x, z, columns, h, g, True)
    else:
        _low_of_rows(entry, i64(entry, A) + 4 * rank * _padded(columns), x, z, columns, h, g, False)


@inline
def sums_of_row(entry, h, y, first, width):
    """y = scale y + B h + bias, for four tiles of 16 columns from tile `first` on, or as many as there are."""
    if i64(entry, HALF):
        _sums_of_row(entry, h, y, first, width, True)
    else:
        _sums_of_row(entry, h, y, first, width, False)


@inline
def sums_of_rows(entry, rows, h, h_bytes, y, y_bytes, first, width):
    """The same for rows[1] .. rows[4], at least two rows; missing rows are -1."""
    if i64(entry, HALF):
        _sums_of_rows(entry, rows, h, h_bytes, y, y_bytes, first, width, True)
    else:
        _sums_of_rows(entry, rows, h, h_bytes, y, y_bytes, first, width, False)


@staged(types.void, types.int64)
def _prefetch(address):
    """Prefetch a line into the L2 cache: a tenth faster with float16, no faster with float32."""
    prefetch(address, 2)


@inline
def _padded(columns):
    return (columns + 15) // 16 * 16


@inline
def _load(address, index, half):
    """Vector `index` of 16 elements at an address."""
    return load_f16(address + 32 * index) if half else load_f32(address + 64 * index)


@inline
def _low_of_row(entry, a, x, columns, h, half):
    first, second, third, fourth = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    for i in range(columns // 16):
        value = load_f32(x + 64 * i)
        first, second = fma(value, _load(a, 4 * i, half), first), fma(value, _load(a, 4 * i + 1, half), second)
        third, fourth = fma(value, _load(a, 4 * i + 2, half), third), fma(value, _load(a, 4 * i + 3, half), fourth)
    if columns % 16:
        i = columns // 16
        value = load_part(x + 64 * i, columns % 16)
        first, second = fma(value, _load(a, 4 * i, half), first), fma(value, _load(a, 4 * i + 1, half), second)
        third, fourth = fma(value, _load(a, 4 * i + 2, half), third), fma(value, _load(a, 4 * i + 3, half), fourth)
    _store_two(entry, h, first, second)
    _store_two(entry, h + 8, third, fourth)


@inline
def _low_of_rows(entry, a, x, z, columns, h, g, half):
    first, second, third, fourth = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    fifth, sixth, seventh, eighth = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    for i in range(columns // 16):
        if half:
            _prefetch(a + 128 * i + _AHEAD)
            _prefetch(a + 128 * i + _AHEAD + 64)
        value, other, a_row = load_f32(x + 64 * i), load_f32(z + 64 * i), _load(a, 4 * i, half)
        first, fifth, a_row = fma(value, a_row, first), fma(other, a_row, fifth), _load(a, 4 * i + 1, half)
        second, sixth, a_row = fma(value, a_row, second), fma(other, a_row, sixth), _load(a, 4 * i + 2, half)
        third, seventh, a_row = fma(value, a_row, third), fma(other, a_row, seventh), _load(a, 4 * i + 3, half)
        fourth, eighth = fma(value, a_row, fourth), fma(other, a_row, eighth)
    if columns % 16:
        i, left = columns // 16, columns % 16
        value, other, a_row = load_part(x + 64 * i, left), load_part(z + 64 * i, left), _load(a, 4 * i, half)
        first, fifth, a_row = fma(value, a_row, first), fma(other, a_row, fifth), _load(a, 4 * i + 1, half)
        second, sixth, a_row = fma(value, a_row, second), fma(other, a_row, sixth), _load(a, 4 * i + 2, half)
        third, seventh, a_row = fma(value, a_row, third), fma(other, a_row, seventh), _load(a, 4 * i + 3, half)
        fourth, eighth = fma(value, a_row, fourth), fma(other, a_row, eighth)
    _store_two(entry, h, first, second)
    _store_two(entry, h + 8, third, fourth)
    _store_two(entry, g, fifth, sixth)
    _store_two(entry, g + 8, seventh, eighth)


@inline
def _store_two(entry, h, first, second):
    sums, factor = f32_ptr(h), f64(entry, FACTOR)
    sums[0], sums[1] = sum_lanes(first) * factor, sum_lanes(second) * factor


@inline
def _sums_of_row(entry, h, y, first, width, half):
    rank, values = i64(entry, RANK), f32_ptr(h)
    if 16 * (first + AT_ONCE) <= width:  # four independent accumulators
        b, one, two = _tile(entry, first, half), _bias(entry, first), _bias(entry, first + 1)
        three, four = _bias(entry, first + 2), _bias(entry, first + 3)
        for k in range(rank):
            value = values[k]
            one = fma(value, _load(b, k, half), one)
            two = fma(value, _load(b, k + rank, half), two)
            three = fma(value, _load(b, k + 2 * rank, half), three)
            four = fma(value, _load(b, k + 3 * rank, half), four)
        _add(entry, y, first, width, one)
        _add(entry, y, first + 1, width, two)
        _add(entry, y, first + 2, width, three)
        _add(entry, y, first + 3, width, four)
    else:
        for tile in range(first, (width + 15) // 16):
            b, total = _tile(entry, tile, half), _bias(entry, tile)
            for k in range(rank):
                total = fma(values[k], _load(b, k, half), total)
            _add(entry, y, tile, width, total)


@inline
def _sums_of_rows(entry, rows, h, h_bytes, y, y_bytes, first, width, half):
    rank, third, fourth = i64(entry, RANK), max(rows[3], rows[1]), max(rows[4], rows[1])  # missing: as the first
    h1, h2 = f32_ptr(h + rows[1] * h_bytes), f32_ptr(h + rows[2] * h_bytes)
    h3, h4 = f32_ptr(h + third * h_bytes), f32_ptr(h + fourth * h_bytes)
    for tile in range(first, min(first + AT_ONCE, (width + 15) // 16)):
        b, one = _tile(entry, tile, half), _bias(entry, tile)
        two, three, four = one, one, one
        for k in range(rank):
            if half:
                _prefetch(b + 32 * k + _AHEAD)
            b_row = _load(b, k, half)
            one, two = fma(h1[k], b_row, one), fma(h2[k], b_row, two)
            three, four = fma(h3[k], b_row, three), fma(h4[k], b_row, four)
        _add(entry, y + rows[1] * y_bytes, tile, width, one)
        _add(entry, y + rows[2] * y_bytes, tile, width, two)
        if rows[3] >= 0:
            _add(entry, y + rows[3] * y_bytes, tile, width, three)
        if rows[4] >= 0:
            _add(entry, y + rows[4] * y_bytes, tile, width, four)


@inline
def _tile(entry, tile, half):
    """Address of B for a tile of 16 columns of y."""
    return i64(entry, B) + (32 if half else 64) * tile * i64(entry, RANK)


@inline
def _bias(entry, tile):
    """Bias of a tile, zeros if there is none."""
    total = zero_f32()
    if i64(entry, BIAS):
        total = load_f32(i64(entry, BIAS) + 64 * tile)
    return total


@inline
def _add(entry, y, tile, width, total):
    """y = scale y + total, for a tile."""
    address, count = y + 64 * tile, width - 16 * tile
    if count >= 16:
        store_f32(address, _scaled(entry, load_f32(address), tile, total))
    else:
        store_part(address, _scaled(entry, load_part(address, count), tile, total), count)


@inline
def _scaled(entry, old, tile, total):
    """scale * old + total, for a tile."""
    if i64(entry, SCALE):
        total = fma(old, load_f32(i64(entry, SCALE) + 64 * tile), total)
    else:
        total = old + total
    return total
