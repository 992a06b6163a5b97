"""How `linear` goes over a matrix: threads share its row tiles evenly, a tile of rows meets all tokens while its codes
are in the cache, and tokens come in blocks whose operand stays in the cache while all row tiles pass."""

from numflow.cpu.activations import AUX_BYTES, TOKEN_TILE
from numflow.cpu.kernel import i64, share
from numflow.cpu.linear_tile import row_tile, x_bytes
from numflow.cpu.simd import inline
from numflow.cpu.simd_tile import store_tile, zeros_1, zeros_2, zeros_4, zeros_8

# Arguments of a linear kernel after header and rows field.
X, AUX, CODES, HEADS, CODE_BYTES, HEAD_BYTES, BIAS, Y, STRIDE, ROWS, COLUMNS, TOKEN_BLOCK = range(2, 14)

_widest = zeros_8 if TOKEN_TILE == 8 else zeros_4


@inline
def linear(args, thread, n_threads, kind):
    """y [T, ROWS] = x [T, COLUMNS] @ matrix.T + bias; `kind` as from linear_tile.scheme."""
    tokens = i64(i64(args, 0), i64(args, 1))
    rows, block = i64(args, ROWS), i64(args, TOKEN_BLOCK)
    begin, end = share((rows + 15) // 16, thread, n_threads)
    for first in range(0, tokens, block):
        for tile in range(begin, end):
            bias = i64(args, BIAS)
            _tokens(args, tile, bias + 64 * tile if bias else 0, first, min(first + block, tokens), kind)


@inline
def _tokens(args, tile, bias, first, last, kind):
    """Rows of one tile for tokens first .. last, in token tiles as activations.py cuts them."""
    columns, stride = i64(args, COLUMNS), 4 * i64(args, STRIDE)
    codes = i64(args, CODES) + tile * i64(args, CODE_BYTES)
    heads = i64(args, HEADS) + tile * i64(args, HEAD_BYTES)
    lanes = i64(args, ROWS) - 16 * tile
    t = first
    while t < last:
        left = last - t
        x, aux = i64(args, X) + x_bytes(t * columns, kind), i64(args, AUX) + t * (columns >> 5) * AUX_BYTES
        y = i64(args, Y) + t * stride + 64 * tile
        if left > 4:
            store_tile(row_tile(_widest(), x, aux, codes, heads, columns, kind), y, stride, left, lanes, bias)
        elif left > 2:
            store_tile(row_tile(zeros_4(), x, aux, codes, heads, columns, kind), y, stride, left, lanes, bias)
        elif left == 2:
            store_tile(row_tile(zeros_2(), x, aux, codes, heads, columns, kind), y, stride, left, lanes, bias)
        else:
            store_tile(row_tile(zeros_1(), x, aux, codes, heads, columns, kind), y, stride, left, lanes, bias)
        t += TOKEN_TILE
