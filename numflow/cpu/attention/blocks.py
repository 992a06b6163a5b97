"""One block of linear attention: up to 16 tokens of a head, as matrices (linear_attention.py).

state  address of the head's part of a slot
first  index in the block of the first new token
count  number of new tokens, from row t of the batch on

With one decay per key column (`by_column`) the stored keys of the tail are decayed in place, token by token. With one
decay per head, products of keys are multiplied with it instead.
"""

import numba
import numpy as np
from numba import types

from numflow.cpu.attention.linear_attention import SLOTS
from numflow.cpu.attention.products import add_products
from numflow.cpu.attention.slots import COLUMNS, HEIGHTS
from numflow.cpu.runtime.access import f32_ptr, i64
from numflow.cpu.simd.float32 import fma, lane_indices, load_part, splat, store_part, where_less
from numflow.cpu.simd.functions import exp
from numflow.cpu.simd.value import load, prefetch, save, staged, transpose
from numflow.cpu.simd.vector import NO_WRAPPERS, inline, load_f32, store_f32, zero_f32
from numflow.cpu.state.matrix_state import F32
from numflow.cpu.state.state_rows import read_row, write_row
from numflow.quant.state import STATE_BLOCK

_i64 = types.int64
_ROWS = 4 * STATE_BLOCK  # bytes of a row of the tail's keys, and of scores
_SECOND = STATE_BLOCK * _ROWS  # offset from the scores of keys to the scores of queries


@numba.njit(error_model="numpy", **NO_WRAPPERS)
def _add_products(rows, columns, n, total, total_row, x, x_row, v, v_step, ahead):
    """total[r] += sum over i < n, in this order, of x[r][i] * v[i], rows of 16 * columns float32.

    The data `ahead` bytes behind v is prefetched meanwhile.
    """
    r = 0
    while r < rows:
        height = 0
        for i in range(len(HEIGHTS)):
            if height == 0 and HEIGHTS[i] <= rows - r:
                height, wide = HEIGHTS[i], COLUMNS[i]
        c = 0
        while c < columns:
            width = wide if c + wide <= columns else 1
            add_products(height, width, n, total + r * total_row + 64 * c, total_row, x + r * x_row, x_row, v + 64 * c,
                         64, v_step, v + 64 * c + ahead)
            c += width
        r += height


@inline
def _add_both(args, count, columns, n, total, second, total_row, t, head, v, v_step, ahead):
    """Add the products of keys (only with beta) and of queries; the results of queries are `second` bytes behind."""
    k, q = _key_row(args, t, head), _query_row(args, t, head)
    k_row, q_row = 4 * i64(args, SLOTS.k_stride), 4 * i64(args, SLOTS.q_stride)
    if not i64(args, SLOTS.beta):
        _add_products(count, columns, n, total + second, total_row, q, q_row, v, v_step, ahead)
    elif count == 1:  # key and query as two rows of one product
        _add_products(2, columns, n, total, second, k, q - k, v, v_step, ahead)
    else:
        _add_products(count, columns, n, total, total_row, k, k_row, v, v_step, ahead)
        _add_products(count, columns, n, total + second, total_row, q, q_row, v, v_step, ahead)


@staged(types.void, _i64, _i64, _i64)
def _transpose_rows(source, stride, y):
    """Transpose 16 columns of 16 rows, `stride` bytes apart, to rows of 16 float32 at y."""
    for column, vector in enumerate(transpose([load(source + stride * row, "f32", 16) for row in range(16)])):
        save(y + 64 * column, vector)


@staged(types.void, _i64, _i64)
def _prefetch_rows(address, stride):
    """Prefetch a cache line of each of 16 rows, `stride` bytes apart, into the L2 cache."""
    for row in range(STATE_BLOCK):
        prefetch(address + stride * row, 2)


@inline
def prefetch_block(args, t, head):
    """Prefetch values and results of a whole block of a head: the hardware prefetcher does not follow rows so far
    apart."""
    v_row, y_row = 4 * i64(args, SLOTS.v_stride), 4 * i64(args, SLOTS.y_stride)
    first = 4 * head * i64(args, SLOTS.v_dim)
    v, y = i64(args, SLOTS.v) + t * v_row, i64(args, SLOTS.y) + t * y_row
    for line in range(first, first + 4 * i64(args, SLOTS.v_dim), 64):
        _prefetch_rows(v + line, v_row)
        _prefetch_rows(y + line, y_row)


@inline
def tail_keys(args, slot, state, head, new, begins):
    """Address of the keys of a head's tail.

    new: whether a sequence begins. begins: whether a tail begins; it takes the place of the tail before the last.
    """
    keys, tail = slot + i64(args, SLOTS.keys), i64(args, SLOTS.tail)
    if not i64(args, SLOTS.shared):
        return keys + head * tail
    active = f32_ptr(state + i64(args, SLOTS.active_tail))
    if new:  # the slot is not cleared
        active[0] = np.float32(0)
    if begins:
        active[0] = np.float32(0) if active[0] == 1 else np.float32(1)
    return keys + (2 * key_head(args, head) + (1 if active[0] == 1 else 0)) * tail


@inline
def store_keys(args, scratch, tail, t, head, first, count):
    """Store new keys in the tail, or in scratch memory for a whole block, and multiply new keys and queries with all
    keys of the block.

    Keys and products are the same for all heads that share a key head.
    """
    k_dim, keys, raw = i64(args, SLOTS.k_dim), _keys(args, scratch, tail, count), scratch + i64(args, SLOTS.raw)
    k, stride, stored = _key_row(args, t, head), 4 * i64(args, SLOTS.k_stride), 0
    if count == STATE_BLOCK:
        stored = k_dim // 16 * 16
        for n in range(0, stored, 16):
            _transpose_rows(k + 4 * n, stride, keys + _ROWS * n)
    for r in range(count):
        row = f32_ptr(k + r * stride)
        for n in range(stored, k_dim):
            f32_ptr(keys + _ROWS * n)[first + r] = row[n]
    _clear(raw, 2 * _SECOND)
    _add_both(args, count, 1, k_dim, raw, _SECOND, _ROWS, t, head, keys, _ROWS, 0)


@inline
def _keys(args, scratch, tail, count):
    """Address of the block's keys by column: scratch memory for a block that is whole in the batch, else the tail."""
    return scratch + i64(args, SLOTS.block_keys) if count == STATE_BLOCK else tail


@inline
def store_keys_by_column(args, scratch, state, keys, t, head, first, count):
    """The same, token by token, for decays by column: the keys of the tail are decayed first. Also computes new keys
    and queries times the decay of S."""
    k_dim, state_decay = i64(args, SLOTS.k_dim), state + i64(args, SLOTS.state_decay)
    decay, size = scratch + i64(args, SLOTS.decay), 4 * ((k_dim + 15) // 16 * 16)
    for r in range(count):
        k, q = _key_row(args, t + r, head), _query_row(args, t + r, head)
        decayed_rows = scratch + i64(args, SLOTS.decayed_rows) + r * size
        for n in range(0, k_dim, 16):
            cumulative = _decay(args, t + r, head, n)
            store_f32(decay + 4 * n, cumulative)
            if first + r > 0:
                cumulative = cumulative * load_f32(state_decay + 4 * n)
            store_f32(state_decay + 4 * n, cumulative)
            store_f32(decayed_rows + 4 * n, load_part(k + 4 * n, k_dim - n) * cumulative)
            store_f32(decayed_rows + 16 * size + 4 * n, load_part(q + 4 * n, k_dim - n) * cumulative)
        older, scores = splat(float(first + r)), scratch + i64(args, SLOTS.scores) + _ROWS * r
        key_scores, query_scores, odd_key_scores, odd_query_scores = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        for n in range(0, k_dim - 1, 2):  # two columns at a time, as independent dependency chains
            key_scores, query_scores = _update_column(keys, decay, k, q, n, older, key_scores, query_scores)
            odd_key_scores, odd_query_scores = _update_column(keys, decay, k, q, n + 1, older, odd_key_scores,
                                                              odd_query_scores)
        if k_dim % 2:
            key_scores, query_scores = _update_column(keys, decay, k, q, k_dim - 1, older, key_scores, query_scores)
        store_f32(scores, key_scores + odd_key_scores)
        store_f32(scores + _SECOND, query_scores + odd_query_scores)


@inline
def _update_column(keys, decay, k, q, n, older, key_scores, query_scores):
    """Update column n of the tail's keys: decay the lanes before `older`, store the new key in the others.

    Returns the scores of keys and of queries with the column's products added.
    """
    key = f32_ptr(k)[n]
    column = where_less(lane_indices(), older, load_f32(keys + _ROWS * n) * f32_ptr(decay)[n], splat(key))
    store_f32(keys + _ROWS * n, column)
    return fma(key, column, key_scores), fma(f32_ptr(q)[n], column, query_scores)


@inline
def multiply_state(args, scratch, state, t, head, count):
    """Multiply keys and queries with S. Returns the address of S as float32."""
    k_dim, columns, float_state, ahead = i64(args, SLOTS.k_dim), _columns(args), state, i64(args, SLOTS.head)
    _clear(scratch, 128 * STATE_BLOCK * columns)
    if i64(args, SLOTS.kind) != F32:
        float_state, ahead = scratch + i64(args, SLOTS.float_state), 0
        for n in range(k_dim):
            read_row(i64(args, SLOTS.kind), state + n * i64(args, SLOTS.row), columns, float_state + 64 * columns * n)
    second = 64 * STATE_BLOCK * columns
    if by_column(args):
        size, rows = 4 * ((k_dim + 15) // 16 * 16), scratch + i64(args, SLOTS.decayed_rows)
        for half in range(0 if i64(args, SLOTS.beta) else 1, 2):
            _add_products(count, columns, k_dim, scratch + half * second, 64 * columns, rows + 16 * size * half, size,
                          float_state, 64 * columns, ahead)
    else:
        _add_both(args, count, columns, k_dim, scratch, second, 64 * columns, t, head, float_state, 64 * columns, ahead)
    return float_state


@inline
def solve_row(args, scratch, state, t, head, index, r, has_state):
    """Solve for u of token t, store it in the tail, and compute y.

    index: of the token in the block. r: its row in scratch memory. has_state: whether multiply_state was called; else
    S is zero.
    """
    columns, v_dim, rows = _columns(args), i64(args, SLOTS.v_dim), state + i64(args, SLOTS.rows)
    u_row, scores = rows + 64 * columns * index, scratch + i64(args, SLOTS.scores) + _ROWS * r
    key_state, query_state = scratch + 64 * columns * r, scratch + 64 * columns * (STATE_BLOCK + r)
    state_decay = _apply_decay(args, state, scores, t, head, index)
    offset = 4 * head * v_dim
    v = i64(args, SLOTS.v) + 4 * t * i64(args, SLOTS.v_stride) + offset
    y = i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + offset
    for c in range(columns):
        u = load_part(v + 64 * c, v_dim - 16 * c)
        if has_state and i64(args, SLOTS.beta):
            u = fma(-state_decay, load_f32(key_state + 64 * c), u)
        store_f32(u_row + 64 * c, u)
        store_f32(query_state + 64 * c, load_f32(query_state + 64 * c) * state_decay if has_state else zero_f32())
    if i64(args, SLOTS.beta):
        store_f32(scores, -load_f32(scores))
        if index > 0:
            _add_products(1, columns, index, u_row, 0, scores, 0, rows, 64 * columns, 0)
        _multiply(u_row, columns, f32_ptr(i64(args, SLOTS.beta) + 4 * t * i64(args, SLOTS.beta_stride))[head])
    if i64(args, SLOTS.scaled):
        _multiply(u_row, columns, _step(args, t, head))
    _add_products(1, columns, index + 1, query_state, 0, scores + _SECOND, 0, rows, 64 * columns, 0)
    skip = f32_ptr(i64(args, SLOTS.skip))[head]
    for c in range(columns):
        skipped = load_part(v + 64 * c, v_dim - 16 * c) * skip
        store_part(y + 64 * c, load_f32(query_state + 64 * c) + skipped, v_dim - 16 * c)


@inline
def _apply_decay(args, state, scores, t, head, index):
    """With one decay per head: update the cumulative decays of the tail's tokens and of S to token t, and compute the
    scores, the raw products times the decays of the tail.

    Returns the decay of S in every lane.
    """
    if by_column(args):
        return splat(1.0)
    tail_decay, state_decay = state + i64(args, SLOTS.tail_decay), state + i64(args, SLOTS.state_decay)
    decay = _decay(args, t, head, 0)
    decays = where_less(lane_indices(), splat(float(index)), load_f32(tail_decay) * decay, splat(1.0))
    if index > 0:
        decay = decay * load_f32(state_decay)
    store_f32(tail_decay, decays)
    store_f32(state_decay, decay)
    raw = scores + i64(args, SLOTS.raw) - i64(args, SLOTS.scores)
    for half in range(2):
        store_f32(scores + half * _SECOND, load_f32(raw + half * _SECOND) * decays)
    return decay


@inline
def close_block(args, scratch, state, tail, float_state, count):
    """Add the tail to S at the block's end. float_state: address of S as float32, 0 for zeros. count: new tokens."""
    k_dim, columns, keys = i64(args, SLOTS.k_dim), _columns(args), tail
    target = state if i64(args, SLOTS.kind) == F32 else scratch + i64(args, SLOTS.float_state)
    state_decay, one = f32_ptr(state + i64(args, SLOTS.state_decay)), not by_column(args)
    for n in range(k_dim):
        decay = state_decay[0 if one else n]
        for address in range(target + 64 * columns * n, target + 64 * columns * (n + 1), 64):
            store_f32(address, load_f32(address) * decay if float_state else zero_f32())
    if one:
        keys = _keys(args, scratch, tail, count)
        decayed_keys = scratch + i64(args, SLOTS.decayed_keys)
        tail_decay = load_f32(state + i64(args, SLOTS.tail_decay))
        for n in range(k_dim):
            store_f32(decayed_keys + _ROWS * n, load_f32(keys + _ROWS * n) * tail_decay)
        keys = decayed_keys
    _add_products(k_dim, columns, STATE_BLOCK, target, 64 * columns, keys, _ROWS, state + i64(args, SLOTS.rows),
                  64 * columns, 0)
    if i64(args, SLOTS.kind) != F32:
        for n in range(k_dim):
            write_row(i64(args, SLOTS.kind), target + 64 * columns * n, columns, state + n * i64(args, SLOTS.row))


@inline
def by_column(args):
    """1 if each key column has a decay of its own."""
    return i64(args, SLOTS.column_rates) or i64(args, SLOTS.column_steps)


@inline
def _columns(args):
    """Vectors per row of S."""
    return (i64(args, SLOTS.v_dim) + 15) // 16


@inline
def _clear(address, nbytes):
    for line in range(address, address + nbytes, 64):
        store_f32(line, zero_f32())


@inline
def _multiply(row, columns, factor):
    for address in range(row, row + 64 * columns, 64):
        store_f32(address, load_f32(address) * factor)


@inline
def key_head(args, head):
    """The key head of a head: neighbouring heads share one, or (tiled) every key_heads-th head."""
    key_heads = i64(args, SLOTS.key_heads)
    return head % key_heads if i64(args, SLOTS.tiled) else head // (i64(args, SLOTS.heads) // key_heads)


@inline
def _key_row(args, t, head):
    """Address of a token's key."""
    return i64(args, SLOTS.k) + 4 * (t * i64(args, SLOTS.k_stride) + key_head(args, head) * i64(args, SLOTS.k_dim))


@inline
def _query_row(args, t, head):
    """Address of a token's query."""
    return i64(args, SLOTS.q) + 4 * (t * i64(args, SLOTS.q_stride) + key_head(args, head) * i64(args, SLOTS.k_dim))


@inline
def _step(args, t, head):
    """The step of a token and head."""
    return f32_ptr(i64(args, SLOTS.steps) + 4 * t * i64(args, SLOTS.steps_stride))[head]


@inline
def _decay(args, t, head, n):
    """exp(step * rate) of 16 key columns; steps and rates are by head or by key column."""
    k_dim, rates = i64(args, SLOTS.k_dim), i64(args, SLOTS.rates)
    if i64(args, SLOTS.column_rates):
        rate = load_part(rates + 4 * (head * k_dim + n), k_dim - n)
    else:
        rate = splat(f32_ptr(rates)[head])
    if not i64(args, SLOTS.steps):
        return exp(rate)
    if i64(args, SLOTS.column_steps):
        steps = i64(args, SLOTS.steps) + 4 * (t * i64(args, SLOTS.steps_stride) + head * k_dim + n)
        return exp(load_part(steps, k_dim - n) * rate)
    return exp(rate * _step(args, t, head))
