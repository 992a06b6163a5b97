"""Kernels of low-rank adapters (adapt.py); their matrices are found by the entries of tables.py."""

from numflow.cpu.adapters.adapt import DOWN, LOOK_UP, ROUTED_DOWN, ROUTED_UP, UP
from numflow.cpu.adapters.products import AT_ONCE, low_of_row, low_of_rows, sums_of_row, sums_of_rows
from numflow.cpu.adapters.tables import BIAS, FIELDS, RANK, SCALE, TILE_WORDS, A
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import TOKENS, kernel
from numflow.cpu.simd.vector import inline


@kernel
def adapter_down(args, thread, n_threads):
    """h[row] = A x of the row's adapter. Items: tiles of rows times 4 ranks, up to the largest rank of all adapters."""
    quads, tiles = i64(args, DOWN.ranks) // AT_ONCE, i64(args, DOWN.tiles)
    begin, end = share(i64(tiles, 0) * quads, thread, n_threads)
    columns, x_bytes, h_bytes = i64(args, DOWN.columns), 4 * i64(args, DOWN.x_stride), 4 * i64(args, DOWN.ranks)
    for item in range(begin, end):
        rows, rank = i32_ptr(i64(tiles, 1) + 4 * TILE_WORDS * (item // quads)), item % quads * AT_ONCE
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
    """y[row] = scale y[row] + B h + bias. Items: tiles of rows times 64 columns."""
    width, tiles = i64(args, UP.width), i64(args, UP.tiles)
    quads = (width + 16 * AT_ONCE - 1) // (16 * AT_ONCE)
    begin, end = share(i64(tiles, 0) * quads, thread, n_threads)
    y, y_bytes, h, h_bytes = i64(args, UP.y), 4 * i64(args, UP.y_stride), i64(args, UP.h), 4 * i64(args, UP.ranks)
    for item in range(begin, end):
        rows, first = i32_ptr(i64(tiles, 1) + 4 * TILE_WORDS * (item // quads)), item % quads * AT_ONCE
        entry = i64(args, UP.table) + 8 * FIELDS * rows[0]
        if _has(entry):
            if rows[2] < 0:
                sums_of_row(entry, h + rows[1] * h_bytes, y + rows[1] * y_bytes, first, width)
            else:
                sums_of_rows(entry, rows, h, h_bytes, y, y_bytes, first, width)


@kernel
def adapter_rows(args, thread, n_threads):
    """h[t] = row tokens[t] of A, or zeros if the row is on another device. Items: rows."""
    header, ranks = i64(args, LOOK_UP.header), i64(args, LOOK_UP.ranks)
    first, table_rows = i64(args, LOOK_UP.first), i64(args, LOOK_UP.table_rows)
    tokens, adapters = i32_ptr(i64(header, TOKENS)), i32_ptr(i64(header, i64(args, LOOK_UP.adapters)))
    begin, end = share(i64(header, i64(args, LOOK_UP.rows)), thread, n_threads)
    for t in range(begin, end):
        if adapters[t] >= 0:
            entry = i64(args, LOOK_UP.table) + 8 * FIELDS * adapters[t]
            rank, h = i64(entry, RANK), f32_ptr(i64(args, LOOK_UP.h) + 4 * t * ranks)
            row = tokens[t] - first
            if 0 <= row < table_rows:
                a = f32_ptr(i64(entry, A) + 4 * row * rank)
                for k in range(rank):
                    h[k] = a[k]
            else:
                for k in range(rank):
                    h[k] = 0.0


@kernel
def routed_down(args, thread, n_threads):
    """h[row] = A x, with A of the row's adapter and expert. Items: tiles of rows times 4 ranks."""
    quads, columns = i64(args, ROUTED_DOWN.ranks) // AT_ONCE, i64(args, ROUTED_DOWN.columns)
    tiles = _tiles(args, thread)
    begin, end = share(_group(args, thread) * quads, thread, n_threads)
    x_bytes, h_bytes = 4 * i64(args, ROUTED_DOWN.x_stride), 4 * i64(args, ROUTED_DOWN.ranks)
    shared, x = i64(args, ROUTED_DOWN.shared), i64(args, ROUTED_DOWN.x)
    for item in range(begin, end):
        rows, rank = i32_ptr(tiles + 4 * TILE_WORDS * (item // quads)), item % quads * AT_ONCE
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
    """y[row] = scale y[row] + B h + bias. Items: tiles of rows times 64 columns."""
    width, tiles = i64(args, ROUTED_UP.width), _tiles(args, thread)
    quads = (width + 16 * AT_ONCE - 1) // (16 * AT_ONCE)
    begin, end = share(_group(args, thread) * quads, thread, n_threads)
    y, h = i64(args, ROUTED_UP.y), i64(args, ROUTED_UP.h)
    y_bytes, h_bytes = 4 * i64(args, ROUTED_UP.y_stride), 4 * i64(args, ROUTED_UP.ranks)
    for item in range(begin, end):
        rows, first = i32_ptr(tiles + 4 * TILE_WORDS * (item // quads)), item % quads * AT_ONCE
        entry = i64(args, ROUTED_UP.table) + 8 * FIELDS * rows[0]
        if _has(entry):
            if rows[2] < 0:
                sums_of_row(entry, h + rows[1] * h_bytes, y + rows[1] * y_bytes, first, width)
            else:
                sums_of_rows(entry, rows, h, h_bytes, y, y_bytes, first, width)


@inline
def _tiles(args, thread):
    """Address of a thread's tiles of rows, as of tables.row_tiles, by entry instead of adapter.

    Only slots that both routed kernels share are read here and below.
    """
    memory = i64(args, ROUTED_UP.groups) + 4 * thread * i64(args, ROUTED_UP.group_words)
    return memory + 4 * (i64(args, ROUTED_UP.entries) + i64(args, ROUTED_UP.max_rows))


@inline
def _group(args, thread):
    """Group the rows of a batch by the entry of their adapter and expert; returns the number of tiles."""
    rows = i64(i64(args, ROUTED_UP.header), i64(args, ROUTED_UP.rows))
    memory = i64(args, ROUTED_UP.groups) + 4 * thread * i64(args, ROUTED_UP.group_words)
    heads, following = i32_ptr(memory), i32_ptr(memory + 4 * i64(args, ROUTED_UP.entries))
    # Linked lists of the rows of each entry. Only entries of rows in the batch are accessed.
    for row in range(rows):
        entry = _entry(args, row)
        if entry >= 0:
            heads[entry] = -1
    for row in range(rows - 1, -1, -1):
        entry = _entry(args, row)
        if entry >= 0:
            following[row], heads[entry] = heads[entry], row
    # Cut each list into tiles of four rows.
    tiles, count = i32_ptr(_tiles(args, thread)), 0
    for row in range(rows):
        entry = _entry(args, row)
        if entry >= 0 and heads[entry] == row:
            left = row
            while left >= 0:
                tile = TILE_WORDS * count
                tiles[tile] = entry
                for i in range(1, TILE_WORDS):
                    tiles[tile + i] = left
                    if left >= 0:
                        left = following[left]
                count += 1
    return count


@inline
def _has(entry):
    """True if an entry has matrices or vectors."""
    return i64(entry, RANK) or i64(entry, BIAS) or i64(entry, SCALE)


@inline
def _entry(args, row):
    """Index of the entry of a row's adapter and expert; -1 if there is none."""
    header, token = i64(args, ROUTED_UP.header), row // i64(args, ROUTED_UP.routes)
    adapter = i32_ptr(i64(header, i64(args, ROUTED_UP.adapters)))[token]
    route = row % i64(args, ROUTED_UP.routes)
    entry = -1
    if adapter >= 0:
        expert = i32_ptr(i64(args, ROUTED_UP.ids) + 4 * token * i64(args, ROUTED_UP.ids_stride))[route]
        expert -= i64(args, ROUTED_UP.first)
        if 0 <= expert < i64(args, ROUTED_UP.experts):
            entry = adapter * i64(args, ROUTED_UP.experts) + expert
    return entry
