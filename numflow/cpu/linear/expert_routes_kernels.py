"""Kernels that group routes (token, chosen expert) by expert: an expert's weights are then read once for all its rows.

groups, i32 arrays:
    order [R]           route indices, sorted by expert, then by index
    first [X + 1]       position in `order` of an expert's first route
    first_row [X + 1]   operand row of an expert's first route: the rows of each expert are cut into token tiles of
                        their own (activations.py), and the last tile may have rows without a route
"""

import numpy as np

from numflow.cpu.linear.activations import BF16, CHUNK, F32, INT8, INT16, TOKEN_TILE
from numflow.cpu.linear.activations_kernels import fill_tile, rows_of_token, tile_tokens
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.vector import inline, merged

# Arguments of group_routes: header, rows field (of ids), ids, their stride, S, id of the first expert. Of the operand
# kernels: rows of x, their stride, routes per row, K, x, aux. Both continue with X, the most routes, and groups.
HEADER, ROWS_FIELD, IDS, IDS_STRIDE, CHOSEN, FIRST = range(6)
SOURCE, STRIDE, DIVISOR, COLUMNS, X, AUX = range(6)
EXPERTS, CAPACITY, GROUPS = range(6, 9)


@inline
def parts(groups, capacity, experts):
    """Pointers to order, first and first_row of `groups`."""
    return i32_ptr(groups), i32_ptr(groups + 4 * capacity), i32_ptr(groups + 4 * (capacity + experts + 1))


@inline
def rows_of_matrix(groups, capacity, matrices, tokens, x):
    """(rows, first operand row, address of the route indices, 0) of expert x; without groups, (tokens, first operand
    row, 0, x) of head x."""
    _, first, first_row = parts(groups, capacity, matrices)
    if groups == 0:
        return tokens, x * ((tokens + TOKEN_TILE - 1) // TOKEN_TILE * TOKEN_TILE), 0, x
    return np.int64(first[x + 1] - first[x]), np.int64(first_row[x]), groups + 4 * np.int64(first[x]), 0


@kernel
def group_routes(args, thread, n_threads):
    """ids i32 [T, S] -> groups: a counting sort, by one thread. Routes to experts of other devices are in no group."""
    if thread != 0:
        return
    tokens, chosen, experts = i64(i64(args, HEADER), i64(args, ROWS_FIELD)), i64(args, CHOSEN), i64(args, EXPERTS)
    lowest = i64(args, FIRST)
    order, first, first_row = parts(i64(args, GROUPS), i64(args, CAPACITY), experts)
    for x in range(experts + 1):
        first[x] = 0
    for t in range(tokens):
        ids = i32_ptr(i64(args, IDS) + 4 * t * i64(args, IDS_STRIDE))
        for s in range(chosen):
            if 0 <= ids[s] - lowest < experts:
                first[ids[s] - lowest + 1] += 1
    first_row[0] = 0
    for x in range(experts):
        count = first[x + 1]
        whole = count // TOKEN_TILE * TOKEN_TILE
        first_row[x + 1] = first_row[x] + whole + (tile_tokens(count - whole) if count > whole else 0)
        first[x + 1] += first[x]
    # Filling moves first[x] to the end of expert x, which is the start of expert x + 1: shift back afterwards.
    for t in range(tokens):
        ids = i32_ptr(i64(args, IDS) + 4 * t * i64(args, IDS_STRIDE))
        for s in range(chosen):
            x = ids[s] - lowest
            if 0 <= x < experts:
                order[first[x]] = t * chosen + s
                first[x] += 1
    for x in range(experts, 0, -1):
        first[x] = first[x - 1]
    first[0] = 0


@kernel
def zero_remote_routes(args, thread, n_threads):
    """Zero the rows of y f32 [T * S, N] whose routes go to experts of other devices.

    args: as group_routes up to FIRST, then X, y, its stride, N.
    """
    tokens, chosen, lowest = i64(i64(args, HEADER), i64(args, ROWS_FIELD)), i64(args, CHOSEN), i64(args, FIRST)
    begin, end = share(tokens * chosen, thread, n_threads)
    for route in range(begin, end):
        t, s = route // chosen, route % chosen
        x = i32_ptr(i64(args, IDS) + 4 * t * i64(args, IDS_STRIDE))[s] - lowest
        if not 0 <= x < i64(args, 6):
            y = f32_ptr(i64(args, 7) + 4 * route * i64(args, 8))
            for i in range(i64(args, 9)):
                y[i] = 0.0


@kernel
def routes_to_int8(args, thread, n_threads):
    _operand(args, thread, n_threads, INT8)


@kernel
def routes_to_int16(args, thread, n_threads):
    _operand(args, thread, n_threads, INT16)


@kernel
def routes_to_f32(args, thread, n_threads):
    _operand(args, thread, n_threads, F32)


@kernel
def routes_to_bf16(args, thread, n_threads):
    _operand(args, thread, n_threads, BF16)


@merged
def _operand(args, thread, n_threads, kind):
    """Threads take the chunks of all token tiles in turn."""
    rows_per_token = rows_of_token(kind)
    tile = TOKEN_TILE // rows_per_token
    experts, columns = i64(args, EXPERTS), i64(args, COLUMNS)
    _, first, first_row = parts(i64(args, GROUPS), i64(args, CAPACITY), experts)
    item = 0
    for x in range(experts):
        for t in range(0, first[x + 1] - first[x], tile):
            for begin in range(0, columns, CHUNK):
                if item % n_threads == thread:
                    routes = i64(args, GROUPS) + 4 * (first[x] + t)
                    count = min(tile, first[x + 1] - first[x] - t)
                    fill_tile(i64(args, SOURCE), 4 * i64(args, STRIDE), routes, i64(args, DIVISOR),
                              count, columns, begin, i64(args, X), i64(args, AUX),
                              (first_row[x] + t) * rows_per_token, kind)
                item += 1
