"""Phases of the chunked linear attention kernel: up to 16 tokens of a head as matrices (linear_attention.py).

`first` is the index in the chunk of the first of `count` new tokens. Each phase is specialised for a Variant. A block
barrier separates the phases.
"""

from typing import NamedTuple

from numflow.cuda.lang.arithmetic import exp, fabs, fmax
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import lane_index, load4, sync_block, thread_index
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.reduce import warp_max, warp_sum
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.state.matrix_state import reader, write_q8, writer
from numflow.quant.state import SMALLEST, STATE_BLOCK

THREADS = 128
_WARPS = THREADS // 32
_STAGE = 64  # key columns that are in shared memory at a time, or state rows whose absolute maxima are


class StateShape(NamedTuple):
    """Value heads, key heads that they share, columns of a key head and of a value head."""

    heads: u32
    key_heads: u32
    k_dim: u32
    v_dim: u32


class Variant(NamedTuple):
    """Variants of the kernel.

    steps: step sizes scale the decay rates. skip: y gets skip * v. delta: the delta rule (beta). scaled: values are
    multiplied by the step size. tiled: head h uses key head h % key_heads instead of h // group. column_steps,
    column_rates: one for each key column instead of one for each head.
    """

    steps: bool
    skip: bool
    delta: bool
    scaled: bool
    tiled: bool
    column_steps: bool
    column_rates: bool

    @property
    def by_column(self) -> bool:
        """Whether each key column has a decay of its own."""
        return self.column_steps or self.column_rates

    @property
    def tile(self) -> int:
        """Most tokens that are computed together."""
        return 1 if self.by_column else STATE_BLOCK


@device
def append_keys(keys, key, stride, first, count, size):
    """Append new keys to the tail, [dk][16]."""
    i = u32(thread_index())
    while i < count * size:
        r, n = u32(i // size), u32(i % size)
        keys[n * STATE_BLOCK + first + r] = key[r * stride + n]
        i = u32(i + THREADS)


def decay_columns(variant: Variant) -> DeviceFunction:
    """decay_keys(keys, state_decay, key, index, size, steps, rates, head): decay the keys of the tail, append a key."""
    column_steps, column_rates, has_steps = variant.column_steps, variant.column_rates, variant.steps

    @device
    def decay_keys(keys, state_decay, key, index, size, steps, rates, head):
        n = u32(thread_index())
        while n < size:
            length, rate = f32(1), rates[head * size + n] if column_rates else rates[head]
            if has_steps:
                length = steps[head * size + n] if column_steps else steps[head]
            decay, j = exp(length * rate), u32(0)
            while j < index:
                keys[n * STATE_BLOCK + j] = keys[n * STATE_BLOCK + j] * decay
                j = u32(j + 1)
            keys[n * STATE_BLOCK + index] = key[n]
            state_decay[n] = state_decay[n] * decay if index > 0 else decay
            n = u32(n + THREADS)

    return decay_keys


def tail_products(variant: Variant) -> DeviceFunction:
    """multiply(scores, keys, key, k_stride, query, q_stride, first, count, size): products of new keys and queries with
    the tail's keys up to their own token. One warp computes one pair of tokens. `scores` has the products of keys,
    then the products of queries."""
    delta, query_offset = variant.delta, variant.tile * STATE_BLOCK

    @device
    def multiply(scores, keys, key, k_stride, query, q_stride, first, count, size):
        lane, pair = u32(lane_index()), u32(thread_index() >> u32(5))
        while pair < count * STATE_BLOCK:
            r, j = u32(pair // STATE_BLOCK), u32(pair % STATE_BLOCK)
            if j <= first + r:
                of_keys, of_queries, n = f32(0), f32(0), lane
                while n < size:
                    tail_key = keys[n * STATE_BLOCK + j]
                    if delta:
                        of_keys += key[r * k_stride + n] * tail_key
                    of_queries += query[r * q_stride + n] * tail_key
                    n = u32(n + 32)
                if delta:
                    of_keys = warp_sum(of_keys)
                of_queries = warp_sum(of_queries)
                if lane == 0:
                    scores[pair], scores[query_offset + pair] = of_keys, of_queries
            pair = u32(pair + _WARPS)

    return multiply


def decay_head(variant: Variant) -> DeviceFunction:
    """decay_tail(scores, tail_decay, state_decay, token_decay, steps, stride, rates, head, first, count): multiply the
    scores by the decay from each tail token to each new token; write the state's decay at each new token to
    `token_decay`. One thread for each token of the tail, and one for the state."""
    has_steps, query_offset = variant.steps, variant.tile * STATE_BLOCK

    @device
    def decay_tail(scores, tail_decay, state_decay, token_decay, steps, stride, rates, head, first, count):
        j = u32(thread_index())
        if j > STATE_BLOCK:
            return
        product, r = f32(1), u32(0)
        if first > 0:
            product = state_decay[0] if j == STATE_BLOCK else tail_decay[j]
        while r < count:
            index, decay = u32(first + r), exp((steps[r * stride] if has_steps else f32(1)) * rates[head])
            if j == STATE_BLOCK:
                product = product * decay if index > 0 else decay
                token_decay[r] = product
            else:
                product = product * decay if j < index else f32(1)
                if j <= index:
                    pair = u32(r * STATE_BLOCK + j)
                    scores[pair], scores[query_offset + pair] = (scores[pair] * product,
                                                                 scores[query_offset + pair] * product)
            r = u32(r + 1)
        if j == STATE_BLOCK:
            state_decay[0] = product
        else:
            tail_decay[j] = product

    return decay_tail


def state_products(variant: Variant, dtype: str) -> DeviceFunction:
    """multiply_state(u_out, columns, y_out, y_stride, state, row, state_decay, key, k_stride, query, q_stride, column,
    count, size): products of the new keys and queries with one column of the state, which is read once. The products
    are stored where u and y will be. All threads call it together: 64 columns of the keys and queries at a time are in
    shared memory, [64][tokens]."""
    delta, by_column, tile, read = variant.delta, variant.by_column, variant.tile, reader(dtype)
    keys_memory, queries_memory = SharedArray(f32, _STAGE * tile), SharedArray(f32, _STAGE * tile)
    key_sums_of, query_sums_of, together = LocalArray(f32, tile), LocalArray(f32, tile), min(tile, 4)

    @device
    def stage(to, rows, stride, state_decay, begin, count, size):
        i = u32(thread_index())
        while i < _STAGE * tile:
            r, n = u32(i // _STAGE), u32(begin + i % _STAGE)
            value = f32(0)
            if r < count and n < size:
                value = rows[r * stride + n]
                if by_column:
                    value = value * state_decay[n]
            to[(i % _STAGE) * tile + r] = value
            i = u32(i + THREADS)

    @device
    def load_four(values, n, g):
        if tile == 1:
            return values[n], f32(0), f32(0), f32(0)
        return load4(values, u32(n * tile + 4 * g))

    @device
    def multiply_state(u_out, columns, y_out, y_stride, state, row, state_decay, key, k_stride, query, q_stride, column,
                       count, size):
        keys, queries, begin = keys_memory(), queries_memory(), u32(0)
        key_sums, query_sums = key_sums_of(), query_sums_of()
        for r in range(tile):
            key_sums[r], query_sums[r] = f32(0), f32(0)
        while begin < size:
            if delta:
                stage(keys, key, k_stride, state_decay, begin, count, size)
            stage(queries, query, q_stride, state_decay, begin, count, size)
            sync_block()
            end = u32(_STAGE) if begin + _STAGE < size else u32(size - begin)
            if column < columns:
                n = u32(0)
                while n < end:
                    element = read(state + (begin + n) * row, column, u32(row - 1))
                    for g in range(tile // together):
                        if 4 * g < count:
                            values = load_four(queries, n, g)
                            for i in range(together):
                                query_sums[4 * g + i] += element * values[i]
                            if delta:
                                values = load_four(keys, n, g)
                                for i in range(together):
                                    key_sums[4 * g + i] += element * values[i]
                    n = u32(n + 1)
            # Barrier: all threads have read the staged columns.
            sync_block()
            begin = u32(begin + _STAGE)
        for r in range(tile):
            if r < count and column < columns:
                y_out[r * y_stride] = query_sums[r]
                if delta:
                    u_out[r * columns] = key_sums[r]

    return multiply_state


def solve(variant: Variant) -> DeviceFunction:
    """solve_column(rows, columns, y, y_stride, v, v_stride, beta, beta_stride, steps, steps_stride, skip, scores,
    token_decay, has_state, first, count): forward substitution for one value column: u of the new tokens, written to
    the tail, and y. Pointers point to the column. has_state: whether u and y hold products with the state."""
    delta, scaled, has_skip, by_column = variant.delta, variant.scaled, variant.skip, variant.by_column
    query_offset = variant.tile * STATE_BLOCK

    @device
    def solve_column(rows, columns, y, y_stride, v, v_stride, beta, beta_stride, steps, steps_stride, skip, scores,
                     token_decay, has_state, first, count):
        r = u32(0)
        while r < count:
            index, score_row, value = u32(first + r), u32(r * STATE_BLOCK), v[r * v_stride]
            u, total, j = value, f32(0), u32(0)
            if has_state:
                decay = f32(1) if by_column else token_decay[r]
                total = decay * y[r * y_stride]
                if delta:
                    u = value - decay * rows[index * columns]
            while j < index:
                u_older = rows[j * columns]
                if delta:
                    u -= scores[score_row + j] * u_older
                total += scores[query_offset + score_row + j] * u_older
                j = u32(j + 1)
            if delta:
                u = u * beta[r * beta_stride]
            if scaled:
                u = u * steps[r * steps_stride]
            rows[index * columns] = u
            total += scores[query_offset + score_row + index] * u
            y[r * y_stride] = total + skip * value if has_skip else total
            r = u32(r + 1)

    return solve_column


def fold_chunk(variant: Variant, dtype: str) -> DeviceFunction:
    """fold(state, row, keys, rows, tail_decay, state_decay, has_state, columns, size): at the end of a chunk, add the
    tail to the state and round the state to its data type. has_state: whether there was a state before this chunk."""
    by_column, read, write = variant.by_column, reader(dtype), writer(dtype)
    written, largest = LocalArray(f32, STATE_BLOCK), SharedArray(f32, _WARPS * _STAGE)

    @device
    def load(u, rows, tail_decay, column, columns):
        """u of the tail's tokens in a column, times the decay from each token to the end of the chunk."""
        for j in range(STATE_BLOCK):
            u[j] = f32(0)
            if column < columns:
                u[j] = rows[j * columns + column]
                if not by_column:
                    u[j] = u[j] * tail_decay[j]

    @device
    def new_element(u, state, row, keys, state_decay, has_state, n, column):
        """The new state element of a row and column."""
        total = f32(0)
        if has_state:
            total = (state_decay[n] if by_column else state_decay[0]) * read(state + n * row, column, u32(row - 1))
        for g in range(STATE_BLOCK // 4):
            k0, k1, k2, k3 = load4(keys, u32(n * STATE_BLOCK + 4 * g))
            total += k0 * u[4 * g]
            total += k1 * u[4 * g + 1]
            total += k2 * u[4 * g + 2]
            total += k3 * u[4 * g + 3]
        return total

    @device
    def fold_floats(state, row, keys, rows, tail_decay, state_decay, has_state, columns, size):
        u, column = written(), u32(thread_index())
        while column < columns:
            load(u, rows, tail_decay, column, columns)
            n = u32(0)
            while n < size:
                write(state + n * row, column, new_element(u, state, row, keys, state_decay, has_state, n, column))
                n = u32(n + 1)
            column = u32(column + THREADS)

    @device
    def fold_codes(state, row, keys, rows, tail_decay, state_decay, has_state, columns, size):
        """64 rows at a time: first the absolute maximum of each row, then its int8 codes, then its scale."""
        u, most, lane, begin = written(), largest(), u32(lane_index()), u32(0)
        warp = u32(thread_index() >> u32(5))
        while begin < size:
            end = u32(_STAGE) if begin + _STAGE < size else u32(size - begin)
            column = u32(thread_index())
            while column - thread_index() < columns:
                load(u, rows, tail_decay, column, columns)
                n = u32(0)
                while n < end:
                    value = f32(0)
                    if column < columns:
                        value = fabs(new_element(u, state, row, keys, state_decay, has_state, u32(begin + n), column))
                    value = warp_max(value)
                    if lane == 0:
                        at = u32(warp * _STAGE + n)
                        most[at] = fmax(most[at], value) if column >= THREADS else value
                    n = u32(n + 1)
                column = u32(column + THREADS)
            sync_block()
            column = u32(thread_index())
            while column - thread_index() < columns:
                load(u, rows, tail_decay, column, columns)
                n = u32(0)
                while n < end:
                    maximum, value = _row_maximum(most, n), f32(0)
                    if column < columns:
                        value = new_element(u, state, row, keys, state_decay, has_state, u32(begin + n), column)
                    inverse = f32(127) / maximum if maximum > f32(SMALLEST) else f32(0)
                    write_q8(state + (begin + n) * row, column, columns, value, inverse)
                    n = u32(n + 1)
                column = u32(column + THREADS)
            # Barrier: all threads have read the old scales.
            sync_block()
            n = u32(thread_index())
            if n < end:
                maximum = _row_maximum(most, n)
                state[(begin + n) * row + row - 1] = maximum / f32(127) if maximum > f32(SMALLEST) else f32(0)
            sync_block()
            begin = u32(begin + _STAGE)

    return fold_codes if write is None else fold_floats


@device
def _row_maximum(most, n):
    """The absolute maximum of staged row n, over the maxima of the warps."""
    maximum = most[n]
    for warp in range(1, _WARPS):
        maximum = fmax(maximum, most[warp * _STAGE + n])
    return maximum
