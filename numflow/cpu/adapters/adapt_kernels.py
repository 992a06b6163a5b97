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
    """h[row] = A x of the expert of the row's adapter. Items: tiles of rows times fours of ranks."""
    fours, columns = i64(args, ROUTED_DOWN.ranks) // AT_ONCE, i64(args, ROUTED_DOWN.columns)
    tiles = _tiles(args, thread)
    begin, end = share(_group(args, thread) * fours, thread, n_threads)
    x_bytes, h_bytes = 4 * i64(args, ROUTED_DOWN.x_stride), 4 * i64(args, ROUTED_DOWN.ranks)
    shared, x = i64(args, ROUTED_DOWN.shared), i64(args, ROUTED_DOWN.x)
    for item in range(begin, end):
        rows, rank = i32_ptr(tiles + 4 * TILE_WORDS * (item // fours)), item % fours * AT_ONCE
        entry = i64(args, ROUTED_DOWN.table) + 8 * FIELDS * rows[0]
        if rank < i64(entry, RANK):
            h = i64(args, ROUTED_DOWN.h) + 4 * rank
            for pair in range(1, TILE_WORDS, 2):
                row, other = rows[pair], rows[pair + 1]
                if other >= 0:
                    low_of_rows(entry, rank, x + row // shared * x_bytes, x + other // shared * x_bytes, columns,
                                h + row * h_bytes, h + other * h_bytes)
                elif row >= 0:
                    low_of_row(entry, rank, x + row // shared * x_bytes, columns, h + row * h_bytes)


@kernel
def routed_up(args, thread, n_threads):
    """y[row] = scale y[row] + B h + bias. Items: tiles of rows times fours of tiles of 16 columns."""
    width, tiles = i64(args, ROUTED_UP.width), _tiles(args, thread)
    fours = (width + 16 * AT_ONCE - 1) // (16 * AT_ONCE)
    begin, end = share(_group(args, thread) * fours, thread, n_threads)
    y, h = i64(args, ROUTED_UP.y), i64(args, ROUTED_UP.h)
    y_bytes, h_bytes = 4 * i64(args, ROUTED_UP.y_stride), 4 * i64(args, ROUTED_UP.ranks)
    for item in range(begin, end):
        rows, first = i32_ptr(tiles + 4 * TILE_WORDS * (item // fours)), item % fours * AT_ONCE
        entry = i64(args, ROUTED_UP.table) + 8 * FIELDS * rows[0]
        if _has(entry):
            if rows[2] < 0:
                sums_of_row(entry, h + rows[1] * h_bytes, y + rows[1] * y_bytes, first, width)
            else:
                sums_of_rows(entry, rows, h, h_bytes, y, y_bytes, first, width)


@inline
def _tiles(args, thread):
    """Address of the tiles that a thread groups rows in, as tables.row_tiles has them, by entries.

    The slots read here and below are those that both routed kernels share.
    """
    own = i64(args, ROUTED_UP.groups) + 4 * thread * i64(args, ROUTED_UP.group_words)
    return own + 4 * (i64(args, ROUTED_UP.entries) + i64(args, ROUTED_UP.room))


@inline
def _group(args, thread):
    """Group the rows of a batch by the entry of their adapter and expert; the number of tiles."""
    rows = i64(i64(args, ROUTED_UP.header), i64(args, ROUTED_UP.rows))
    own = i64(args, ROUTED_UP.groups) + 4 * thread * i64(args, ROUTED_UP.group_words)
    heads, after = i32_ptr(own), i32_ptr(own + 4 * i64(args, ROUTED_UP.entries))
    # Chains of the rows of each entry, the first of them at its head. Only entries that rows have are touched.
    for row in range(rows):
        entry = _entry(args, row)
        if entry >= 0:
            heads[entry] = -1
    for row in range(rows - 1, -1, -1):
        entry = _entry(args, row)
        if entry >= 0:
            after[row], heads[entry] = heads[entry], row
    # Each chain cut into fours.
    tiles, count = i32_ptr(_tiles(args, thread)), 0
    for row in range(rows):
        entry = _entry(args, row)
        if entry >= 0 and heads[entry] == row:
            left = row
            while left >= 0:
                tile = TILE_WORDS * count
                tiles[tile] = entry
                for place in range(1, TILE_WORDS):
                    tiles[tile + place] = left
                    if left >= 0:
                        left = after[left]
                count += 1
    return count


@inline
def _has(entry):
    """True where an adapter changes anything."""
    return i64(entry, RANK) or i64(entry, BIAS) or i64(entry, SCALE)


@inline
def _entry(args, row):
    """Number of the entry of the expert of a row's adapter; -1 without one."""
    header, token = i64(args, ROUTED_UP.header), row // i64(args, ROUTED_UP.routes)
    number = i32_ptr(i64(header, i64(args, ROUTED_UP.numbers)))[token]
    place = row % i64(args, ROUTED_UP.routes)
    found = -1
    if number >= 0:
        expert = i32_ptr(i64(args, ROUTED_UP.ids) + 4 * token * i64(args, ROUTED_UP.ids_stride))[place]
        expert -= i64(args, ROUTED_UP.first)
        if 0 <= expert < i64(args, ROUTED_UP.experts):
            found = number * i64(args, ROUTED_UP.experts) + expert
    return found
