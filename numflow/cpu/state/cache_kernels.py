"""The kernels of `cache_write` (cache.py)."""

from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import POSITIONS, SEQUENCE_OF, kernel
from numflow.cpu.simd.float32 import load_part, store_as_f16
from numflow.cpu.simd.vector import inline, merged
from numflow.cpu.state import kv_code as code
from numflow.cpu.state import kv_rows as rows
from numflow.cpu.state.cache import GROUP, SLOTS
from numflow.quant.kv import BLOCK as CODED_BLOCK

# What slots have of keys, the next one of the same name has of values: `which` is 0 or 1.


@kernel
def cache_write(args, thread, n_threads):
    _write(args, thread, n_threads, None)


@kernel
def cache_write_coded(args, thread, n_threads):
    _write(args, thread, n_threads, True)


@merged
def _write(args, thread, n_threads, coded):
    """Items: rows times heads. `coded` is None where no type is one of few bits."""
    header, heads, block_size = i64(args, SLOTS.header), i64(args, SLOTS.kv_heads), i64(args, SLOTS.block_size)
    positions, sequence_of = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, SEQUENCE_OF))
    table, stride = i32_ptr(i64(header, i64(args, SLOTS.table))), i64(header, i64(args, SLOTS.table_stride))
    begin, end = share(i64(header, i64(args, SLOTS.rows)) * heads, thread, n_threads)
    for item in range(begin, end):
        t, head = item // heads, item % heads
        place = positions[t] % block_size
        at = (table[sequence_of[t] * stride + positions[t] // block_size] * heads + head) * block_size
        for which in range(2):
            columns, kind = i64(args, SLOTS.k_dim + which), i64(args, SLOTS.k_kind + which)
            x = i64(args, SLOTS.k + 2 * which) + 4 * (t * i64(args, SLOTS.k_stride + 2 * which) + head * columns)
            # Rows that lie side by side: 16, but for values as plain numbers.
            beside = 1 if which and (coded is None or kind <= rows.F16) else GROUP
            row, lane = place // beside * beside, place % beside
            y = i64(i64(args, SLOTS.cache), which) + (at + row) * i64(args, SLOTS.k_size + which)
            if coded is None or kind <= rows.F16:
                _store(f32_ptr(x), y, columns, beside, lane, kind)
            else:
                blocks = i64(args, SLOTS.k_width + which) // CODED_BLOCK
                for b in range(blocks):
                    left, first = columns - b * CODED_BLOCK, x + 4 * b * CODED_BLOCK
                    _encode(kind, load_part(first, left), load_part(first + 64, left - 16),
                            y + b * (beside * i64(args, SLOTS.k_size + which) // blocks), lane, which)


@inline
def _store(x, y, count, step, lane, kind):
    """`count` float32 to every `step`-th element at y, from `lane` on."""
    if kind == rows.F16:
        for i in range(count):
            store_as_f16(y + 2 * (step * i + lane), x[i])
    else:
        for i in range(count):
            f32_ptr(y)[step * i + lane] = x[i]


@inline
def _encode(kind, low, high, block, token, values):
    if kind == rows.Q8:
        code.encode_q8(low, high, block, token, values)
    elif kind == rows.Q6:
        code.encode_q6(low, high, block, token, values)
    elif kind == rows.Q5:
        code.encode_q5(low, high, block, token, values)
    elif kind == rows.Q4:
        code.encode_q4(low, high, block, token, values)
    elif kind == rows.Q3H:
        code.encode_q3h(low, high, block, token, values)
    elif kind == rows.Q3:
        code.encode_q3(low, high, block, token, values)
    else:
        code.encode_q2(low, high, block, token, values)
