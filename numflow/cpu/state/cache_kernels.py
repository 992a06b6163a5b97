"""The kernels of `cache_write` (cache.py)."""

import numpy as np

from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import POSITIONS, SEQUENCE_OF, kernel
from numflow.cpu.simd.bfloat16 import store_odd_halves, store_pair, store_pairs, store_pairs_strided
from numflow.cpu.simd.float32 import load_part, store_as_f16, store_part
from numflow.cpu.simd.vector import inline, load_f32, merged, zero_f32
from numflow.cpu.state import kv_code as code
from numflow.cpu.state import kv_rows as rows
from numflow.cpu.state.cache import ENTRIES, GROUP, SLOTS
from numflow.quant.kv import BLOCK as CODED_BLOCK

# Each slot of keys is followed by the same slot of values: `which` is 0 for keys, 1 for values.


@kernel
def cache_write(args, thread, n_threads):
    _write(args, thread, n_threads, None)


@kernel
def cache_write_coded(args, thread, n_threads):
    _write(args, thread, n_threads, True)


@kernel
def cache_write_entries(args, thread, n_threads):
    """Store the rows of tokens that complete an entry. Items: rows."""
    header, every, width = i64(args, ENTRIES.header), i64(args, ENTRIES.every), i64(args, ENTRIES.width)
    positions, sequence_of = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, SEQUENCE_OF))
    table, stride = i32_ptr(i64(header, i64(args, ENTRIES.table))), i64(header, i64(args, ENTRIES.table_stride))
    tokens = i64(args, ENTRIES.tokens)
    block_entries = (tokens + every - 1) // every
    begin, end = share(i64(header, i64(args, ENTRIES.rows)), thread, n_threads)
    for t in range(begin, end):
        position = np.int64(positions[t])
        if (position + 1) % every == 0:
            block = np.int64(table[sequence_of[t] * stride + position // tokens])
            entry = block * block_entries + position % tokens // every
            y = i64(i64(args, ENTRIES.cache), 0) + entry * i64(args, ENTRIES.size)
            x = i64(args, ENTRIES.k) + 4 * t * i64(args, ENTRIES.k_stride)
            for i in range(0, width, 16):
                store_part(y + 4 * i, load_part(x + 4 * i, width - i), width - i)


@merged
def _write(args, thread, n_threads, coded):
    """Store keys and values. Items: rows times heads. coded: None if neither K nor V is quantised."""
    header, heads, block_size = i64(args, SLOTS.header), i64(args, SLOTS.kv_heads), i64(args, SLOTS.block_size)
    positions, sequence_of = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, SEQUENCE_OF))
    table, stride = i32_ptr(i64(header, i64(args, SLOTS.table))), i64(header, i64(args, SLOTS.table_stride))
    begin, end = share(i64(header, i64(args, SLOTS.rows)) * heads, thread, n_threads)
    for item in range(begin, end):
        t, head = item // heads, item % heads
        index = positions[t] % block_size
        first_row = (table[sequence_of[t] * stride + positions[t] // block_size] * heads + head) * block_size
        for which in range(2):
            columns, kind = i64(args, SLOTS.k_dim + which), i64(args, SLOTS.k_kind + which)
            x = i64(args, SLOTS.k + 2 * which) + 4 * (t * i64(args, SLOTS.k_stride + 2 * which) + head * columns)
            # Interleaved rows: 16, except for values that are not quantised.
            interleaved = 1 if which and (coded is None or kind <= rows.BF16) else GROUP
            row, lane = index // interleaved * interleaved, index % interleaved
            y = i64(i64(args, SLOTS.cache), which) + (first_row + row) * i64(args, SLOTS.k_size + which)
            if kind == rows.BF16 and which:
                first, last = _ends(args, t)
                _store_values(x, y - index % 2 * i64(args, SLOTS.v_size), columns, 4 * i64(args, SLOTS.v_stride),
                              index % 2, first, last)
            elif kind == rows.BF16:
                _store_keys(x, y, columns, lane)
            elif coded is None or kind < rows.BF16:
                _store(f32_ptr(x), y, columns, interleaved, lane, kind)
            else:
                blocks = i64(args, SLOTS.k_width + which) // CODED_BLOCK
                for b in range(blocks):
                    left, first = columns - b * CODED_BLOCK, x + 4 * b * CODED_BLOCK
                    _encode(kind, load_part(first, left), load_part(first + 64, left - 16),
                            y + b * (interleaved * i64(args, SLOTS.k_size + which) // blocks), lane, which)


@inline
def _store(x, y, count, step, lane, kind):
    """Store `count` float32 to every `step`-th element at y, from element `lane` on."""
    if kind == rows.F16:
        for i in range(count):
            store_as_f16(y + 2 * (step * i + lane), x[i])
    else:
        for i in range(count):
            f32_ptr(y)[step * i + lane] = x[i]


@inline
def _ends(args, t):
    """Flags: row t is the first of its sequence in the batch, and the last."""
    header = i64(args, SLOTS.header)
    sequence_of, n_rows = i32_ptr(i64(header, SEQUENCE_OF)), i64(header, i64(args, SLOTS.rows))
    return t == 0 or sequence_of[t - 1] != sequence_of[t], \
        t + 1 == n_rows or sequence_of[t + 1] != sequence_of[t]


@inline
def _store_keys(x, y, count, lane):
    """Store `count` columns of a key at x as pairs of bfloat16, 64 bytes apart; an odd last column is paired with 0."""
    for i in range(0, count, 16):
        if count - i >= 16:
            store_pairs_strided(y + 32 * i + 4 * lane, load_f32(x + 4 * i))
        else:
            for j in range(i, count, 2):
                odd = f32_ptr(x)[j + 1] if j + 1 < count else np.float32(0)
                store_pair(y + 32 * j + 4 * lane, f32_ptr(x)[j], odd)


@inline
def _store_values(x, pair, count, stride, odd, first, last):
    """Store `count` columns of a value as bfloat16 to the pairs at `pair`.

    The value of an even token is stored together with the next token's value, `stride` bytes behind it in the batch, or
    with zeros if the batch has no next token of the sequence.
    """
    if odd and not first:
        return
    for i in range(0, count, 16):
        value = load_part(x + 4 * i, count - i)
        if odd:
            store_odd_halves(pair + 4 * i, value)
        else:
            following = zero_f32() if last else load_part(x + stride + 4 * i, count - i)
            store_pairs(pair + 4 * i, value, following)


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
