"""One block of linear attention: up to 16 tokens of a head, as matrices (linear_attention.py).

`state` is where the head's part of a slot begins, `first` the place in the block of the first new token, `count` how
many are new, from row t of the batch on. With decays for each column of keys (`by_column`) the keys of the tail fade as
they stand, so that tokens come one by one there; one decay of a head multiplies products of keys instead.
"""

import numba
import numpy as np
from numba import types

from numflow.cpu.attention.linear_attention import SLOTS
from numflow.cpu.attention.products import add_products
from numflow.cpu.attention.slots import COLUMNS, HEIGHTS
from numflow.cpu.runtime.access import f32_ptr, i64
from numflow.cpu.simd.float32 import fma, lane_numbers, load_part, splat, store_part, where_less
from numflow.cpu.simd.functions import exp
from numflow.cpu.simd.value import load, prefetch, save, staged, turned
from numflow.cpu.simd.vector import NO_WRAPPERS, inline, load_f32, store_f32, zero_f32
from numflow.cpu.state.matrix_state import F32
from numflow.cpu.state.state_rows import read_row, write_row
from numflow.quant.state import STATE_BLOCK

_i64 = types.int64
_ROWS = 4 * STATE_BLOCK  # bytes of a row of the tail's keys, and of scores
_SECOND = STATE_BLOCK * _ROWS  # from the scores of keys to those of queries


@numba.njit(error_model="numpy", **NO_WRAPPERS)
def _add_products(rows, columns, n, total, total_row, x, x_row, v, v_step, ahead):
    """total[r] += sum over i < n, in this order, of x[r][i] * v[i], rows of 16 * columns float32, in any tiles. What
    lies `ahead` bytes behind v is fetched into the cache meanwhile."""
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
    """Products of the rows of keys, where they are asked for, and of queries; `second` behind those of keys."""
    k, q = _key_row(args, t, head), _query_row(args, t, head)
    k_row, q_row = 4 * i64(args, SLOTS.k_stride), 4 * i64(args, SLOTS.q_stride)
    if not i64(args, SLOTS.beta):
        _add_products(count, columns, n, total + second, total_row, q, q_row, v, v_step, ahead)
    elif count == 1:  # both at once
        _add_products(2, columns, n, total, second, k, q - k, v, v_step, ahead)
    else:
        _add_products(count, columns, n, total, total_row, k, k_row, v, v_step, ahead)
        _add_products(count, columns, n, total + second, total_row, q, q_row, v, v_step, ahead)


@staged(types.void, _i64, _i64, _i64)
def _turn_rows(source, stride, y):
    """16 columns of 16 rows, `stride` bytes apart, as rows of 16 numbers at y."""
    for column, vector in enumerate(turned([load(source + stride * row, "f32", 16) for row in range(16)])):
        save(y + 64 * column, vector)


@staged(types.void, _i64, _i64)
def _ask(address, stride):
    """A line of each of 16 rows, `stride` bytes apart, towards the second cache."""
    for row in range(STATE_BLOCK):
        prefetch(address + stride * row, 2)


@inline
def ask_ahead(args, t, head):
    """Values and results of a whole block of a head: lines of rows far apart, which no prefetcher of the processor
    foresees."""
    at, v_row, y_row = 4 * head * i64(args, SLOTS.v_dim), 4 * i64(args, SLOTS.v_stride), 4 * i64(args, SLOTS.y_stride)
    v, y = i64(args, SLOTS.v) + t * v_row, i64(args, SLOTS.y) + t * y_row
    for line in range(at, at + 4 * i64(args, SLOTS.v_dim), 64):
        _ask(v + line, v_row)
        _ask(y + line, y_row)


@inline
def tail_of_keys(args, slot, state, head, new, begins):
    """Address of the keys of a head's tail. new: a text's first token; begins: a tail, in turn with the one before."""
    keys, tail = slot + i64(args, SLOTS.keys), i64(args, SLOTS.tail)
    if not i64(args, SLOTS.shared):
        return keys + head * tail
    turn = f32_ptr(state + i64(args, SLOTS.turn))
    if new:  # whatever was there
        turn[0] = np.float32(0)
    if begins:
        turn[0] = np.float32(0) if turn[0] == 1 else np.float32(1)
    return keys + (2 * key_head(args, head) + (1 if turn[0] == 1 else 0)) * tail


@inline
def put_keys(args, scratch, tail, t, head, first, count):
    """New keys into the tail, of a whole block into scratch memory; products of keys and queries with all there.

    Both are the same for all heads that share a key head.
    """
    k_dim, keys, raw = i64(args, SLOTS.k_dim), _keys(args, scratch, tail, count), scratch + i64(args, SLOTS.raw)
    k, stride, rest = _key_row(args, t, head), 4 * i64(args, SLOTS.k_stride), 0
    if count == STATE_BLOCK:
        rest = k_dim // 16 * 16
        for n in range(0, rest, 16):
            _turn_rows(k + 4 * n, stride, keys + _ROWS * n)
    for r in range(count):
        row = f32_ptr(k + r * stride)
        for n in range(rest, k_dim):
            f32_ptr(keys + _ROWS * n)[first + r] = row[n]
    _clear(raw, 2 * _SECOND)
    _add_both(args, count, 1, k_dim, raw, _SECOND, _ROWS, t, head, keys, _ROWS, 0)


@inline
def _keys(args, scratch, tail, count):
    """Address of the block's keys by column: those of a block that comes whole are not stored."""
    return scratch + i64(args, SLOTS.whole) if count == STATE_BLOCK else tail


@inline
def put_keys_by_column(args, scratch, state, keys, t, head, first, count):
    """The same, token by token: keys of the tail fade first. Also rows of keys and queries times what S has faded."""
    k_dim, fade = i64(args, SLOTS.k_dim), state + i64(args, SLOTS.fade)
    decay, size = scratch + i64(args, SLOTS.decay), 4 * ((k_dim + 15) // 16 * 16)
    for r in range(count):
        k, q = _key_row(args, t + r, head), _query_row(args, t + r, head)
        faded = scratch + i64(args, SLOTS.faded) + r * size
        for n in range(0, k_dim, 16):
            left = _decay(args, t + r, head, n)
            store_f32(decay + 4 * n, left)
            if first + r > 0:
                left = left * load_f32(fade + 4 * n)
            store_f32(fade + 4 * n, left)
            store_f32(faded + 4 * n, load_part(k + 4 * n, k_dim - n) * left)
            store_f32(faded + 16 * size + 4 * n, load_part(q + 4 * n, k_dim - n) * left)
        older, scores = splat(float(first + r)), scratch + i64(args, SLOTS.scores) + _ROWS * r
        of_keys, of_queries, odd_keys, odd_queries = zero_f32(), zero_f32(), zero_f32(), zero_f32()
        for n in range(0, k_dim - 1, 2):  # columns by twos, so that sums need not wait for one another
            of_keys, of_queries = _keep(keys, decay, k, q, n, older, of_keys, of_queries)
            odd_keys, odd_queries = _keep(keys, decay, k, q, n + 1, older, odd_keys, odd_queries)
        if k_dim % 2:
            of_keys, of_queries = _keep(keys, decay, k, q, k_dim - 1, older, of_keys, of_queries)
        store_f32(scores, of_keys + odd_keys)
        store_f32(scores + _SECOND, of_queries + odd_queries)


@inline
def _keep(keys, decay, k, q, n, older, of_keys, of_queries):
    """Column n of the tail's keys: those before lane `older` fade, and it has the new one. Adds to the scores."""
    key = f32_ptr(k)[n]
    kept = where_less(lane_numbers(), older, load_f32(keys + _ROWS * n) * f32_ptr(decay)[n], splat(key))
    store_f32(keys + _ROWS * n, kept)
    return fma(key, kept, of_keys), fma(f32_ptr(q)[n], kept, of_queries)


@inline
def ask_state(args, scratch, state, t, head, count):
    """Products of keys and queries with S. Returns where S is in float32; 0 where the text's first block is."""
    k_dim, columns, plain, ahead = i64(args, SLOTS.k_dim), _columns(args), state, i64(args, SLOTS.head)
    _clear(scratch, 128 * STATE_BLOCK * columns)
    if i64(args, SLOTS.kind) != F32:
        plain, ahead = scratch + i64(args, SLOTS.plain), 0
        for n in range(k_dim):
            read_row(i64(args, SLOTS.kind), state + n * i64(args, SLOTS.row), columns, plain + 64 * columns * n)
    second = 64 * STATE_BLOCK * columns
    if by_column(args):
        size, rows = 4 * ((k_dim + 15) // 16 * 16), scratch + i64(args, SLOTS.faded)
        for half in range(0 if i64(args, SLOTS.beta) else 1, 2):
            _add_products(count, columns, k_dim, scratch + half * second, 64 * columns, rows + 16 * size * half, size,
                          plain, 64 * columns, ahead)
    else:
        _add_both(args, count, columns, k_dim, scratch, second, 64 * columns, t, head, plain, 64 * columns, ahead)
    return plain


@inline
def solve_row(args, scratch, state, t, head, place, r, asked):
    """Solve for the u of token t, into the tail, and find its y. r: its row in scratch memory. asked: whether S was."""
    columns, v_dim, rows = _columns(args), i64(args, SLOTS.v_dim), state + i64(args, SLOTS.rows)
    own, scores = rows + 64 * columns * place, scratch + i64(args, SLOTS.scores) + _ROWS * r
    said, found = scratch + 64 * columns * r, scratch + 64 * columns * (STATE_BLOCK + r)
    fade = _leave(args, state, scores, t, head, place)
    at = 4 * head * v_dim
    v = i64(args, SLOTS.v) + 4 * t * i64(args, SLOTS.v_stride) + at
    y = i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + at
    for c in range(columns):
        u = load_part(v + 64 * c, v_dim - 16 * c)
        if asked and i64(args, SLOTS.beta):
            u = fma(-fade, load_f32(said + 64 * c), u)
        store_f32(own + 64 * c, u)
        store_f32(found + 64 * c, load_f32(found + 64 * c) * fade if asked else zero_f32())
    if i64(args, SLOTS.beta):
        store_f32(scores, -load_f32(scores))
        if place > 0:
            _add_products(1, columns, place, own, 0, scores, 0, rows, 64 * columns, 0)
        _multiply(own, columns, f32_ptr(i64(args, SLOTS.beta) + 4 * t * i64(args, SLOTS.beta_stride))[head])
    if i64(args, SLOTS.scaled):
        _multiply(own, columns, _step(args, t, head))
    _add_products(1, columns, place + 1, found, 0, scores + _SECOND, 0, rows, 64 * columns, 0)
    skip = f32_ptr(i64(args, SLOTS.skip))[head]
    for c in range(columns):
        passed = load_part(v + 64 * c, v_dim - 16 * c) * skip
        store_part(y + 64 * c, load_f32(found + 64 * c) + passed, v_dim - 16 * c)


@inline
def _leave(args, state, scores, t, head, place):
    """With one decay of the head: what is left of the tail's tokens and of S at token t; scores, the products times the
    first.

    Returns the second, in every lane.
    """
    if by_column(args):
        return splat(1.0)
    left, fade = state + i64(args, SLOTS.left), state + i64(args, SLOTS.fade)
    decay = _decay(args, t, head, 0)
    older = where_less(lane_numbers(), splat(float(place)), load_f32(left) * decay, splat(1.0))
    if place > 0:
        decay = decay * load_f32(fade)
    store_f32(left, older)
    store_f32(fade, decay)
    raw = scores + i64(args, SLOTS.raw) - i64(args, SLOTS.scores)
    for half in range(2):
        store_f32(scores + half * _SECOND, load_f32(raw + half * _SECOND) * older)
    return decay


@inline
def close_block(args, scratch, state, tail, plain, count):
    """Work the tail into S at the block's end. plain: S in float32, 0 for zeros. count: of the last tokens."""
    k_dim, columns, keys = i64(args, SLOTS.k_dim), _columns(args), tail
    to = state if i64(args, SLOTS.kind) == F32 else scratch + i64(args, SLOTS.plain)
    fade, one = f32_ptr(state + i64(args, SLOTS.fade)), not by_column(args)
    for n in range(k_dim):
        left = fade[0 if one else n]
        for at in range(to + 64 * columns * n, to + 64 * columns * (n + 1), 64):
            store_f32(at, load_f32(at) * left if plain else zero_f32())
    if one:
        keys = _keys(args, scratch, tail, count)
        leaving, left = scratch + i64(args, SLOTS.leaving), load_f32(state + i64(args, SLOTS.left))
        for n in range(k_dim):
            store_f32(leaving + _ROWS * n, load_f32(keys + _ROWS * n) * left)
        keys = leaving
    _add_products(k_dim, columns, STATE_BLOCK, to, 64 * columns, keys, _ROWS, state + i64(args, SLOTS.rows),
                  64 * columns, 0)
    if i64(args, SLOTS.kind) != F32:
        for n in range(k_dim):
            write_row(i64(args, SLOTS.kind), to + 64 * columns * n, columns, state + n * i64(args, SLOTS.row))


@inline
def by_column(args):
    """1 where decays are for each column of keys."""
    return i64(args, SLOTS.column_rates) or i64(args, SLOTS.column_steps)


@inline
def _columns(args):
    """Vectors of a row of S."""
    return (i64(args, SLOTS.v_dim) + 15) // 16


@inline
def _clear(address, nbytes):
    for at in range(address, address + nbytes, 64):
        store_f32(at, zero_f32())


@inline
def _multiply(row, columns, factor):
    for at in range(row, row + 64 * columns, 64):
        store_f32(at, load_f32(at) * factor)


@inline
def key_head(args, head):
    """The key head that a head uses: neighbours share one, or (tiled) every key_heads-th does."""
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
    """exp(step * rate) of 16 key columns; a step or a rate is one for all columns of a head or one for each."""
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
