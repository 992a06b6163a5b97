"""Kernels that move or look up rows (select.py)."""

import numpy as np

from numflow.cpu.elementwise.select import CONCAT, PICK
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import LENGTHS, LOGIT_ROWS, POSITIONS, SEQUENCE_OF, TOKENS, kernel
from numflow.cpu.simd.float32 import larger, load_part, max_lanes, splat, store_part, where_less
from numflow.cpu.simd.vector import inline, load_f32, zero_f32

HEADER, ROWS, WIDTH, Y, Y_STRIDE, X, X_STRIDE, INDEX, TABLE, OFFSET = range(10)
_CHUNK = 1024  # numbers whose largest is found before places are looked at
_ONE, _INFINITY, _LOWEST = np.float32(1), np.float32(np.inf), np.float32(-np.inf)


@inline
def _copy(x, y, count):
    for i in range(0, count, 16):
        store_part(y + 4 * i, load_part(x + 4 * i, count - i), count - i)


@kernel
def select_rows(args, thread, n_threads):
    rows = i32_ptr(i64(i64(args, HEADER), LOGIT_ROWS))
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for r in range(begin, end):
        x = i64(args, X) + 4 * rows[r] * i64(args, X_STRIDE)
        _copy(x, i64(args, Y) + 4 * r * i64(args, Y_STRIDE), i64(args, WIDTH))


@kernel
def add_table_row(args, thread, n_threads):
    """y = x + table[index of the row + offset]; which index is a field of the header."""
    width, index = i64(args, WIDTH), i32_ptr(i64(i64(args, HEADER), i64(args, INDEX)))
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for t in range(begin, end):
        x, y = i64(args, X) + 4 * t * i64(args, X_STRIDE), i64(args, Y) + 4 * t * i64(args, Y_STRIDE)
        table = i64(args, TABLE) + 4 * width * (index[t] + i64(args, OFFSET))
        for i in range(0, width, 16):
            store_part(y + 4 * i, load_part(x + 4 * i, width - i) + load_part(table + 4 * i, width - i), width - i)


@kernel
def head_concat(args, thread, n_threads):
    """Items: rows times heads."""
    heads, a_width, b_width = i64(args, CONCAT.heads), i64(args, CONCAT.a_width), i64(args, CONCAT.b_width)
    begin, end = share(i64(i64(args, CONCAT.header), i64(args, CONCAT.rows)) * heads, thread, n_threads)
    for item in range(begin, end):
        t, head = item // heads, item % heads
        y = i64(args, CONCAT.y) + 4 * (t * i64(args, CONCAT.y_stride) + head * (a_width + b_width))
        _copy(i64(args, CONCAT.a) + 4 * (t * i64(args, CONCAT.a_stride) + head * a_width), y, a_width)
        b = i64(args, CONCAT.b) + 4 * (t * i64(args, CONCAT.b_stride) + head * i64(args, CONCAT.b_step))
        _copy(b, y + 4 * a_width, b_width)


@inline
def _likeliest(x, width):
    """Place of the largest of `width` numbers, the first of equals; -1 where it is not finite, or one is NaN."""
    best, found, wrong = _LOWEST, 0, zero_f32()
    for chunk in range(0, width, _CHUNK):
        top, end = splat(_LOWEST), min(chunk + _CHUNK, width)
        for i in range(chunk, end - 15, 16):
            value = load_f32(x + 4 * i)
            top = larger(top, value)
            wrong = larger(wrong, where_less(value, splat(_INFINITY), zero_f32(), splat(_ONE)))
        most = max_lanes(top)
        for i in range(end - (end - chunk) % 16, end):
            value = f32_ptr(x)[i]
            most = max(most, value)
            if not value < _INFINITY:
                wrong = splat(_ONE)
        if most > best:
            best, found = most, chunk
    if max_lanes(wrong) > 0 or best == _LOWEST:
        return -1
    while f32_ptr(x)[found] != best:
        found += 1
    return found


@kernel
def pick_tokens(args, thread, n_threads):
    """y = the likeliest token of each row. Items: rows. GOES_ON: it is the next token of the row's sequence."""
    header, goes_on = i64(args, PICK.header), i64(args, PICK.goes_on)
    begin, end = share(i64(header, i64(args, PICK.rows)), thread, n_threads)
    for r in range(begin, end):
        token = _likeliest(i64(args, PICK.x) + 4 * r * i64(args, PICK.x_stride), i64(args, PICK.width))
        i32_ptr(i64(args, PICK.y))[r] = token
        if goes_on:
            t = i32_ptr(i64(header, LOGIT_ROWS))[r]
            i32_ptr(i64(header, TOKENS))[t] = max(token, 0)
            i32_ptr(i64(header, POSITIONS))[t] += 1
            i32_ptr(i64(header, LENGTHS))[i32_ptr(i64(header, SEQUENCE_OF))[t]] += 1
