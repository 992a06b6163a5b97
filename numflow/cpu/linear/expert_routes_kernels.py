"""Kernels that group routes (token, chosen expert) by expert, so that an expert's weights meet all its rows at once.

groups i32: order [R], the routes sorted by expert, and then by number; first [X + 1], where an expert's begin in it;
place [X + 1], the row of the operand where they begin: an expert's rows are cut into token tiles of their own
(activations.py), of which the last may have rows without a route.
"""

import numpy as np

from numflow.cpu.linear.activations import BF16, CHUNK, F32, INT8, INT16, TOKEN_TILE
from numflow.cpu.linear.activations_kernels import fill_tile, rows_of_token, tile_tokens
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.vector import inline, merged

# Arguments: of group_routes header, rows field (of ids), ids, their stride, S, number of the first expert; of the
# operand kernels rows of x, their stride, how many routes share a row, K, x, aux; of both then X, how many routes there
# is room for, and groups.
HEADER, ROWS_FIELD, IDS, IDS_STRIDE, CHOSEN, FIRST = range(6)
SOURCE, STRIDE, DIVISOR, COLUMNS, X, AUX = range(6)
EXPERTS, CAPACITY, GROUPS = range(6, 9)


@inline
def parts(groups, capacity, experts):
    """order, first and place of `groups`."""
    return i32_ptr(groups), i32_ptr(groups + 4 * capacity), i32_ptr(groups + 4 * (capacity + experts + 1))


@inline
def rows_of_matrix(groups, capacity, matrices, tokens, x):
    """Of the matrix of expert x: how many routes it has, where they begin in the operand, the address of their numbers,
    and 0. Without groups, of head x: the tokens, where they begin in the operand, 0 and x."""
    _, first, place = parts(groups, capacity, matrices)
    if groups == 0:
        return tokens, x * ((tokens + TOKEN_TILE - 1) // TOKEN_TILE * TOKEN_TILE), 0, x
    return np.int64(first[x + 1] - first[x]), np.int64(place[x]), groups + 4 * np.int64(first[x]), 0


@kernel
def group_routes(args, thread, n_threads):
    """ids i32 [T, S] -> groups, by one thread: a counting sort. Routes to experts that are not here are in no group."""
    if thread != 0:
        return
    tokens, chosen, experts = i64(i64(args, HEADER), i64(args, ROWS_FIELD)), i64(args, CHOSEN), i64(args, EXPERTS)
    lowest = i64(args, FIRST)
    order, first, place = parts(i64(args, GROUPS), i64(args, CAPACITY), experts)
    for x in range(experts + 1):
        first[x] = 0
    for t in range(tokens):
        ids = i32_ptr(i64(args, IDS) + 4 * t * i64(args, IDS_STRIDE))
        for s in range(chosen):
            if 0 <= ids[s] - lowest < experts:
                first[ids[s] - lowest + 1] += 1
    place[0] = 0
    for x in range(experts):
        count = first[x + 1]
        whole = count // TOKEN_TILE * TOKEN_TILE
        place[x + 1] = place[x] + whole + (tile_tokens(count - whole) if count > whole else 0)
        first[x + 1] += first[x]
    # Filling moves first[x] to the end of expert x, which is where x + 1 begins: shift back afterwards.
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
def zero_others(args, thread, n_threads):
    """Rows of y f32 [T * S, N] of routes to experts that are not here: zeros. Args: as group_routes up to FIRST, then
    how many experts there are, y, its stride, N."""
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
    """Items: chunks of token tiles, dealt out in turn."""
    each = rows_of_token(kind)
    tile = TOKEN_TILE // each
    experts, columns = i64(args, EXPERTS), i64(args, COLUMNS)
    _, first, place = parts(i64(args, GROUPS), i64(args, CAPACITY), experts)
    item = 0
    for x in range(experts):
        for t in range(0, first[x + 1] - first[x], tile):
            for begin in range(0, columns, CHUNK):
                if item % n_threads == thread:
                    routes = i64(args, GROUPS) + 4 * (first[x] + t)
                    count = min(tile, first[x + 1] - first[x] - t)
                    fill_tile(i64(args, SOURCE), 4 * i64(args, STRIDE), routes, i64(args, DIVISOR),
                              count, columns, begin, i64(args, X), i64(args, AUX),
                              (place[x] + t) * each, kind)
                item += 1
