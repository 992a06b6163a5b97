"""Loops of `linear` and `expert_linear` over row tiles and token tiles.

Threads share the row tiles evenly. A row tile is multiplied with all tokens of a block while its codes are in the
cache; the operand of a block of tokens stays in the cache while all row tiles pass.
"""

import numpy as np

from numflow.cpu.linear.activations import TOKEN_TILE
from numflow.cpu.linear.expert_routes_kernels import rows_of_matrix
from numflow.cpu.linear.kinds import has_panel, x_bytes
from numflow.cpu.linear.slots import EXPERT_LINEAR as EXPERTS
from numflow.cpu.linear.slots import LINEAR
from numflow.cpu.linear.tile import fill_panel, panel_tile, row_tile
from numflow.cpu.runtime.access import f64, i64, share
from numflow.cpu.simd.tile import store_tile, sums_of_pairs, zeros_1, zeros_2, zeros_4, zeros_8
from numflow.cpu.simd.vector import inline, merged
from numflow.cpu.weights.layout import AUX_BYTES, PANEL_ROWS

_widest = zeros_8 if TOKEN_TILE == 8 else zeros_4


@merged
def linear(args, thread, n_threads, kind):
    """y [T, ROWS] = x [T, COLUMNS] @ matrix.T + bias; `kind` as from kinds.scheme.

    With an addend [T, ROWS], y = addend + factor * (x @ matrix.T + bias).
    """
    addend, stride = i64(args, LINEAR.addend), 4 * i64(args, LINEAR.addend_stride)
    factor = np.float32(f64(args, LINEAR.factor))
    rows = i64(i64(args, LINEAR.header), i64(args, LINEAR.rows_field)) << i64(args, LINEAR.pairs)
    block, bias = i64(args, LINEAR.token_block), i64(args, LINEAR.bias)
    begin, end = share((i64(args, LINEAR.rows) + 15) // 16, thread, n_threads)
    panel = i64(args, LINEAR.panel) + thread * i64(args, LINEAR.panel_bytes)
    for first in range(0, rows, block):
        for tile in range(begin, end):
            rows_of_tile(args, tile, tile, 0, bias, first, min(first + block, rows), first, 0,
                         addend + 64 * tile if addend else 0, stride, factor, panel, n_threads, kind)


@merged
def rows_of_tile(args, tile, matrix_tile, column, bias, first, last, operand_row, routes, addend, addend_stride, factor,
                 panel, threads, kind):
    """Multiply one row tile with operand rows first .. last - 1, in token tiles as activations.py cuts them.

    tile:        index of the tile in the output, whose columns begin at `column`.
    matrix_tile: index in the matrix; differs from `tile` for experts and heads.
    operand_row: row of the operand that holds row `first`.
    routes:      address of row indices of y, or 0. Row t is token t, or token t / 2 of pairs, and is stored to row t of
                 y, or to row routes[t - first].
    bias:        address of [matrix tiles][16], or 0.
    addend:      address of the tile's columns of token 0 (store_tile), or 0.
    panel:       memory for a panel (weights/panel.py), which is filled if enough rows use it.
    threads:     number of threads that share the row tiles.
    Only slots that `linear` and `expert_linear` share are read.
    """
    pairs = i64(args, LINEAR.pairs)
    columns, stride = i64(args, LINEAR.columns), 4 * i64(args, LINEAR.y_stride)
    codes = i64(args, LINEAR.codes) + matrix_tile * i64(args, LINEAR.code_bytes)
    headers = i64(args, LINEAR.headers) + matrix_tile * i64(args, LINEAR.header_bytes)
    bias = bias + 64 * matrix_tile if bias else 0
    lanes, y = i64(args, LINEAR.rows) - 16 * tile, i64(args, LINEAR.y) + 4 * column + 64 * tile
    use_panel = has_panel(kind) and last - first >= PANEL_ROWS
    if use_panel:
        fill_panel(panel, codes, headers, columns, kind)
    for t in range(first, last, TOKEN_TILE):
        left, row = last - t, operand_row + t - first
        x = i64(args, LINEAR.x) + x_bytes(row * columns, kind)
        aux = i64(args, LINEAR.aux) + row * (columns >> 5) * AUX_BYTES
        out, index = (y, routes + 4 * (t - first >> pairs)) if routes else (y + (t >> pairs) * stride, 0)
        added = addend + (t >> pairs) * addend_stride if addend else 0
        if use_panel and left > TOKEN_TILE // 2:
            _store(panel_tile(_widest(), x, aux, panel, columns, kind), out, stride, index, left, lanes, bias, added,
                   addend_stride, factor, pairs)
        elif left > TOKEN_TILE // 2:
            _store(row_tile(_widest(), x, aux, codes, headers, columns, threads, kind), out, stride, index, left,
                   lanes, bias, added, addend_stride, factor, pairs)
        elif TOKEN_TILE == 8 and left > 2:
            _store(row_tile(zeros_4(), x, aux, codes, headers, columns, threads, kind), out, stride, index, left,
                   lanes, bias, added, addend_stride, factor, pairs)
        elif left == 2:
            _store(row_tile(zeros_2(), x, aux, codes, headers, columns, threads, kind), out, stride, index, left,
                   lanes, bias, added, addend_stride, factor, pairs)
        else:
            store_tile(row_tile(zeros_1(), x, aux, codes, headers, columns, threads, kind), out, stride, index, left,
                       lanes, bias, added, addend_stride, factor)


@inline
def _store(tile, out, stride, index, rows, lanes, bias, addend, addend_stride, factor, pairs):
    """Store a tile with `store_tile`; for pairs, the sums of their two rows."""
    if pairs:
        store_tile(sums_of_pairs(tile), out, stride, index, rows >> 1, lanes, bias, addend, addend_stride, factor)
    else:
        store_tile(tile, out, stride, index, rows, lanes, bias, addend, addend_stride, factor)


@merged
def expert_linear(args, thread, n_threads, kind):
    """For every route r: row r of y [ROWS] = matrix of the route's expert @ its row of x + bias of the expert.

    For `head_linear`, without routes: columns h * ROWS .. of y = matrix of head h @ the operand's rows of head h.
    """
    matrices, tiles, bias = i64(args, EXPERTS.experts), (i64(args, EXPERTS.rows) + 15) // 16, i64(args, EXPERTS.bias)
    groups, capacity = i64(args, EXPERTS.groups), i64(args, EXPERTS.capacity)
    tokens = i64(i64(args, EXPERTS.header), i64(args, EXPERTS.rows_field))
    begin, end = share(tiles if groups else tiles * matrices, thread, n_threads)
    panel = i64(args, EXPERTS.panel) + thread * i64(args, EXPERTS.panel_bytes)
    for x in range(matrices):
        count, first_row, routes, head = rows_of_matrix(groups, capacity, matrices, tokens, x)
        low, high = (begin, end) if groups else (max(begin - x * tiles, 0), min(end - x * tiles, tiles))
        for tile in range(low, high if count > 0 else low):
            rows_of_tile(args, tile, x * tiles + tile, head * i64(args, EXPERTS.rows), bias, 0,
                         count << i64(args, EXPERTS.pairs), first_row << i64(args, EXPERTS.pairs), routes, 0, 0,
                         np.float32(0), panel, n_threads, kind)
