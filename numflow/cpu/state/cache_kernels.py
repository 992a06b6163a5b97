"""The kernels of `cache_write` (cache.py)."""

import numpy as np

from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import POSITIONS, SEQUENCE_OF, kernel
from numflow.cpu.simd.bfloat16 import put_odds, put_pair, put_pairs, put_pairs_apart
from numflow.cpu.simd.float32 import load_part, store_as_f16, store_part
from numflow.cpu.simd.vector import inline, load_f32, merged, zero_f32
from numflow.cpu.state import kv_code as code
from numflow.cpu.state import kv_rows as rows
from numflow.cpu.state.cache import ENTRIES, GROUP, SLOTS
from numflow.quant.kv import BLOCK as CODED_BLOCK

# What slots have of keys, the next one of the same name has of values: `which` is 0 or 1.


@kernel
def cache_write(args, thread, n_threads):
    _write(args, thread, n_threads, None)


@kernel
def cache_write_coded(args, thread, n_threads):
    _write(args, thread, n_threads, True)


@kernel
def cache_write_entries(args, thread, n_threads):
    """Rows of tokens that end a window. Items: rows."""
    header, every, width = i64(args, ENTRIES.header), i64(args, ENTRIES.every), i64(args, ENTRIES.width)
    positions, sequence_of = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, SEQUENCE_OF))
    table, stride = i32_ptr(i64(header, i64(args, ENTRIES.table))), i64(header, i64(args, ENTRIES.table_stride))
    tokens = i64(args, ENTRIES.tokens)
    places = (tokens + every - 1) // every
    begin, end = share(i64(header, i64(args, ENTRIES.rows)), thread, n_threads)
    for t in range(begin, end):
        position = np.int64(positions[t])
        if (position + 1) % every == 0:
            block = np.int64(table[sequence_of[t] * stride + position // tokens])
            place = block * places + position % tokens // every
            y = i64(i64(args, ENTRIES.cache), 0) + place * i64(args, ENTRIES.size)
            x = i64(args, ENTRIES.k) + 4 * t * i64(args, ENTRIES.k_stride)
            for i in range(0, width, 16):
                store_part(y + 4 * i, load_part(x + 4 * i, width - i), width - i)


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
            beside = 1 if which and (coded is None or kind <= rows.BF16) else GROUP
            row, lane = place // beside * beside, place % beside
            y = i64(i64(args, SLOTS.cache), which) + (at + row) * i64(args, SLOTS.k_size + which)
            if kind == rows.BF16 and which:
                first, last = _ends(args, t)
                _store_values(x, y - place % 2 * i64(args, SLOTS.v_size), columns, 4 * i64(args, SLOTS.v_stride),
                              place % 2, first, last)
            elif kind == rows.BF16:
                _store_keys(x, y, columns, lane)
            elif coded is None or kind < rows.BF16:
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
def _ends(args, t):
    """Of a row, whether it is the first and the last one of its sequence in the batch."""
    header = i64(args, SLOTS.header)
    sequence_of, rows_here = i32_ptr(i64(header, SEQUENCE_OF)), i64(header, i64(args, SLOTS.rows))
    return t == 0 or sequence_of[t - 1] != sequence_of[t], \
        t + 1 == rows_here or sequence_of[t + 1] != sequence_of[t]


@inline
def _store_keys(x, y, count, lane):
    """`count` columns of a key at x as pairs of bfloat16, 64 bytes apart; an odd one is paired with zero."""
    for i in range(0, count, 16):
        if count - i >= 16:
            put_pairs_apart(y + 32 * i + 4 * lane, load_f32(x + 4 * i))
        else:
            for j in range(i, count, 2):
                odd = f32_ptr(x)[j + 1] if j + 1 < count else np.float32(0)
                put_pair(y + 32 * j + 4 * lane, f32_ptr(x)[j], odd)


@inline
def _store_values(x, pair, count, stride, odd, first, last):
    """`count` columns of a value as bfloat16 to the pairs at `pair`, an even token's together with the next one's,
    `stride` bytes behind it; zeros where the batch has no next one."""
    if odd and not first:
        return
    for i in range(0, count, 16):
        value = load_part(x + 4 * i, count - i)
        if odd:
            put_odds(pair + 4 * i, value)
        else:
            following = zero_f32() if last else load_part(x + stride + 4 * i, count - i)
            put_pairs(pair + 4 * i, value, following)


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
