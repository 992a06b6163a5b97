"""Kernels that copy or look up rows (select.py)."""

from numflow.cpu.elementwise.select import CONCAT
from numflow.cpu.runtime.access import i32_ptr, i64, share
from numflow.cpu.runtime.kernel import LOGIT_ROWS, kernel
from numflow.cpu.simd.float32 import load_part, store_part
from numflow.cpu.simd.vector import inline

HEADER, ROWS, WIDTH, Y, Y_STRIDE, X, X_STRIDE, INDEX, TABLE, OFFSET = range(10)


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
    """y = x + table[index[t] + offset]. INDEX: header field of the array of indices."""
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
