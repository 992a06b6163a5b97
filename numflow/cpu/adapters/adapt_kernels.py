"""Kernels of products of low rank (adapt.py), and of the entries of tables.py."""

from numflow.cpu.adapters.adapt import DOWN, LOOK_UP, ROUTED_DOWN, ROUTED_UP, UP
from numflow.cpu.adapters.products import AT_ONCE, low_of_row, low_of_rows, sums_of_row, sums_of_rows
from numflow.cpu.adapters.tables import BIAS, FIELDS, RANK, SCALE, TILE_WORDS, A
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import TOKENS, kernel
from numflow.cpu.simd.vector import inline


@kernel
def adapter_down(args, thread, n_threads):
    """h[row] = A x of the row's adapter. Items: tiles of rows times fours of ranks, of which they may have fewer."""
    fours, tiles = i64(args, DOWN.ranks) // AT_ONCE, i64(args, DOWN.tiles)
    begin, end = share(i64(tiles, 0) * fours, thread, n_threads)
    columns, x_bytes, h_bytes = i64(args, DOWN.columns), 4 * i64(args, DOWN.x_stride), 4 * i64(args, DOWN.ranks)
    for item in range(begin, end):
        rows, rank = i32_ptr(i64(tiles, 1) + 4 * TILE_WORDS * (item // fours)), item % fours * AT_ONCE
        entry = i64(args, DOWN.table) + 8 * FIELDS * rows[0]
        if rank < i64(entry, RANK):
            x, h = i64(args, DOWN.x), i64(args, DOWN.h) + 4 * rank
            for pair in range(1, TILE_WORDS, 2):
                row, other = rows[pair], rows[pair + 1]
                if other >= 0:
                    low_of_rows(entry, rank, x + row * x_bytes, x + other * x_bytes, columns, h + row * h_bytes,
                                 h + other * h_bytes)
                elif row >= 0:
                    low_of_row(entry, rank, x + row * x_bytes, columns, h + row * h_bytes)


@kernel
def adapter_up(args, thread, n_threads):
    """y[row] = scale y[row] + B h + bias. Items: tiles of rows times fours of tiles of 16 columns."""
    width, tiles = i64(args, UP.width), i64(args, UP.tiles)
    fours = (width + 16 * AT_ONCE - 1) // (16 * AT_ONCE)
    begin, end = share(i64(tiles, 0) * fours, thread, n_threads)
    y, y_bytes, h, h_bytes = i64(args, UP.y), 4 * i64(args, UP.y_stride), i64(args, UP.h), 4 * i64(args, UP.ranks)
    for item in range(begin, end):
        rows, first = i32_ptr(i64(tiles, 1) + 4 * TILE_WORDS * (item // fours)), item % fours * AT_ONCE
        entry = i64(args, UP.table) + 8 * FIELDS * rows[0]
        if _has(entry):
            if rows[2] < 0:
                sums_of_row(entry, h + rows[1] * h_bytes, y + rows[1] * y_bytes, first, width)
            else:
                sums_of_rows(entry, rows, h, h_bytes, y, y_bytes, first, width)


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
def routed_down(args, thread, n_threads):
    """h[row] = A x of the expert of the row's adapter. Items: rows times fours of ranks."""
    fours = i64(args, ROUTED_DOWN.ranks) // AT_ONCE
    rows = i64(i64(args, ROUTED_DOWN.header), i64(args, ROUTED_DOWN.rows))
    begin, end = share(rows * fours, thread, n_threads)
    for item in range(begin, end):
        row, rank = item // fours, item % fours * AT_ONCE
        entry = _entry(args, row)
        if entry and rank < i64(entry, RANK):
            x = i64(args, ROUTED_DOWN.x) + 4 * (row // i64(args, ROUTED_DOWN.shared)) * i64(args, ROUTED_DOWN.x_stride)
            h = i64(args, ROUTED_DOWN.h) + 4 * (row * i64(args, ROUTED_DOWN.ranks) + rank)
            low_of_row(entry, rank, x, i64(args, ROUTED_DOWN.columns), h)


@kernel
def routed_up(args, thread, n_threads):
    """y[row] = scale y[row] + B h + bias. Items: rows times fours of tiles of 16 columns."""
    width = i64(args, ROUTED_UP.width)
    fours = (width + 16 * AT_ONCE - 1) // (16 * AT_ONCE)
    begin, end = share(i64(i64(args, ROUTED_UP.header), i64(args, ROUTED_UP.rows)) * fours, thread, n_threads)
    for item in range(begin, end):
        row = item // fours
        entry = _entry(args, row)
        if entry and _has(entry):
            h = i64(args, ROUTED_UP.h) + 4 * row * i64(args, ROUTED_UP.ranks)
            y = i64(args, ROUTED_UP.y) + 4 * row * i64(args, ROUTED_UP.y_stride)
            sums_of_row(entry, h, y, item % fours * AT_ONCE, width)


@inline
def _has(entry):
    """True where an adapter changes anything."""
    return i64(entry, RANK) or i64(entry, BIAS) or i64(entry, SCALE)


@inline
def _entry(args, row):
    """Address of the entry of the expert of a row's adapter; 0 without one.

    The slots read here are those that both routed kernels share.
    """
    header, token = i64(args, ROUTED_UP.header), row // i64(args, ROUTED_UP.routes)
    number = i32_ptr(i64(header, i64(args, ROUTED_UP.numbers)))[token]
    if number < 0:
        return 0
    place = row % i64(args, ROUTED_UP.routes)
    expert = i32_ptr(i64(args, ROUTED_UP.ids) + 4 * token * i64(args, ROUTED_UP.ids_stride))[place]
    expert -= i64(args, ROUTED_UP.first)
    if expert < 0 or expert >= i64(args, ROUTED_UP.experts):
        return 0
    return i64(args, ROUTED_UP.table) + 8 * FIELDS * (number * i64(args, ROUTED_UP.experts) + expert)
