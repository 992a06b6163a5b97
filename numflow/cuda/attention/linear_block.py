"""Phases of a block of linear attention: up to 16 tokens of a head, as matrices (linear_attention.py).

`first` is the place in the block of the first of `count` new tokens. Each phase is made for the ways of a step; a
barrier stands between them.
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
_STAGE = 64  # columns of keys that stand in shared memory at a time, or rows of a state whose largest numbers do


class StateShape(NamedTuple):
    """Heads of a state, key heads that they share, columns of a key and of a value head."""

    heads: u32
    key_heads: u32
    k_dim: u32
    v_dim: u32


class Ways(NamedTuple):
    """Differences between kernels: steps, skips and the delta rule are there or not; values are scaled by steps; key
    heads are tiled; steps and rates are of a head or of each of its key columns."""

    steps: bool
    skip: bool
    delta: bool
    scaled: bool
    tiled: bool
    column_steps: bool
    column_rates: bool

    @property
    def by_column(self) -> bool:
        """Whether decays are for each column of keys."""
        return self.column_steps or self.column_rates

    @property
    def tile(self) -> int:
        """Tokens that go together at most."""
        return 1 if self.by_column else STATE_BLOCK


@device
def put_keys(keys, key, stride, first, count, size):
    """New keys into the tail, [dk][16]."""
    i = u32(thread_index())
    while i < count * size:
        r, n = u32(i // size), u32(i % size)
        keys[n * STATE_BLOCK + first + r] = key[r * stride + n]
        i = u32(i + THREADS)


def fade_columns(ways: Ways) -> DeviceFunction:
    """fade(keys, fade, key, place, size, steps, rates, head): a token's key into the tail, whose keys fade first."""
    column_steps, column_rates, has_steps = ways.column_steps, ways.column_rates, ways.steps

    @device
    def put(keys, fade, key, place, size, steps, rates, head):
        n = u32(thread_index())
        while n < size:
            length, rate = f32(1), rates[head * size + n] if column_rates else rates[head]
            if has_steps:
                length = steps[head * size + n] if column_steps else steps[head]
            decay, j = exp(length * rate), u32(0)
            while j < place:
                keys[n * STATE_BLOCK + j] = keys[n * STATE_BLOCK + j] * decay
                j = u32(j + 1)
            keys[n * STATE_BLOCK + place] = key[n]
            fade[n] = fade[n] * decay if place > 0 else decay
            n = u32(n + THREADS)

    return put


def put_products(ways: Ways) -> DeviceFunction:
    """put(scores, keys, key, k_stride, query, q_stride, first, count, size): products of new keys and queries with all
    keys of the tail up to their own, a warp for each pair of tokens; those of queries behind those of keys."""
    delta, behind = ways.delta, ways.tile * STATE_BLOCK

    @device
    def put(scores, keys, key, k_stride, query, q_stride, first, count, size):
        lane, pair = u32(lane_index()), u32(thread_index() >> u32(5))
        while pair < count * STATE_BLOCK:
            r, j = u32(pair // STATE_BLOCK), u32(pair % STATE_BLOCK)
            if j <= first + r:
                of_keys, of_queries, n = f32(0), f32(0), lane
                while n < size:
                    other = keys[n * STATE_BLOCK + j]
                    if delta:
                        of_keys += key[r * k_stride + n] * other
                    of_queries += query[r * q_stride + n] * other
                    n = u32(n + 32)
                if delta:
                    of_keys = warp_sum(of_keys)
                of_queries = warp_sum(of_queries)
                if lane == 0:
                    scores[pair], scores[behind + pair] = of_keys, of_queries
            pair = u32(pair + _WARPS)

    return put


def fade_head(ways: Ways) -> DeviceFunction:
    """fade(scores, left, fade, faded, steps, stride, rates, head, first, count): what is left at each new token of the
    tail's tokens, times which scores are taken, and of the state (faded). A thread for each token of the tail, and one
    for the state."""
    has_steps, behind = ways.steps, ways.tile * STATE_BLOCK

    @device
    def fade_tail(scores, left, fade, faded, steps, stride, rates, head, first, count):
        j = u32(thread_index())
        if j > STATE_BLOCK:
            return
        own, r = f32(1), u32(0)
        if first > 0:
            own = fade[0] if j == STATE_BLOCK else left[j]
        while r < count:
            place, decay = u32(first + r), exp((steps[r * stride] if has_steps else f32(1)) * rates[head])
            if j == STATE_BLOCK:
                own = own * decay if place > 0 else decay
                faded[r] = own
            else:
                own = own * decay if j < place else f32(1)
                if j <= place:
                    at = u32(r * STATE_BLOCK + j)
                    scores[at], scores[behind + at] = scores[at] * own, scores[behind + at] * own
            r = u32(r + 1)
        if j == STATE_BLOCK:
            fade[0] = own
        else:
            left[j] = own

    return fade_tail


def ask_state(ways: Ways, dtype: str) -> DeviceFunction:
    """ask(to_u, columns, to_y, y_stride, state, row, fade, key, k_stride, query, q_stride, column, count, size):
    products of new keys and queries with a column of the state, which is read once; they wait where u and y will be.
    All threads call it: 64 columns of keys and queries at a time stand in shared memory, [64][tokens]."""
    delta, by_column, tile, read = ways.delta, ways.by_column, ways.tile, reader(dtype)
    own_keys, own_queries = SharedArray(f32, _STAGE * tile), SharedArray(f32, _STAGE * tile)
    said_of, found_of, together = LocalArray(f32, tile), LocalArray(f32, tile), min(tile, 4)

    @device
    def stage(to, rows, stride, fade, begin, count, size):
        i = u32(thread_index())
        while i < _STAGE * tile:
            r, n = u32(i // _STAGE), u32(begin + i % _STAGE)
            value = f32(0)
            if r < count and n < size:
                value = rows[r * stride + n]
                if by_column:
                    value = value * fade[n]
            to[(i % _STAGE) * tile + r] = value
            i = u32(i + THREADS)

    @device
    def four(values, n, g):
        if tile == 1:
            return values[n], f32(0), f32(0), f32(0)
        return load4(values, u32(n * tile + 4 * g))

    @device
    def ask(to_u, columns, to_y, y_stride, state, row, fade, key, k_stride, query, q_stride, column, count, size):
        keys, queries, said, found, begin = own_keys(), own_queries(), said_of(), found_of(), u32(0)
        for r in range(tile):
            said[r], found[r] = f32(0), f32(0)
        while begin < size:
            if delta:
                stage(keys, key, k_stride, fade, begin, count, size)
            stage(queries, query, q_stride, fade, begin, count, size)
            sync_block()
            end = u32(_STAGE) if begin + _STAGE < size else u32(size - begin)
            if column < columns:
                n = u32(0)
                while n < end:
                    number = read(state + (begin + n) * row, column, u32(row - 1))
                    for g in range(tile // together):
                        if 4 * g < count:
                            values = four(queries, n, g)
                            for i in range(together):
                                found[4 * g + i] += number * values[i]
                            if delta:
                                values = four(keys, n, g)
                                for i in range(together):
                                    said[4 * g + i] += number * values[i]
                    n = u32(n + 1)
            # Barrier: all threads have read the columns that stand there.
            sync_block()
            begin = u32(begin + _STAGE)
        for r in range(tile):
            if r < count and column < columns:
                to_y[r * y_stride] = found[r]
                if delta:
                    to_u[r * columns] = said[r]

    return ask


def solve(ways: Ways) -> DeviceFunction:
    """solve(rows, columns, y, y_stride, v, v_stride, beta, beta_stride, steps, steps_stride, skip, scores, faded,
    asked, first, count): u of the new tokens, into the tail, and their y, of one value column; pointers are to it.
    asked: whether what the state says stands there."""
    delta, scaled, has_skip, by_column = ways.delta, ways.scaled, ways.skip, ways.by_column
    behind = ways.tile * STATE_BLOCK

    @device
    def solved(rows, columns, y, y_stride, v, v_stride, beta, beta_stride, steps, steps_stride, skip, scores, faded,
               asked, first, count):
        r = u32(0)
        while r < count:
            place, at, value = u32(first + r), u32(r * STATE_BLOCK), v[r * v_stride]
            u, total, j = value, f32(0), u32(0)
            if asked:
                fade = f32(1) if by_column else faded[r]
                total = fade * y[r * y_stride]
                if delta:
                    u = value - fade * rows[place * columns]
            while j < place:
                known = rows[j * columns]
                if delta:
                    u -= scores[at + j] * known
                total += scores[behind + at + j] * known
                j = u32(j + 1)
            if delta:
                u = u * beta[r * beta_stride]
            if scaled:
                u = u * steps[r * steps_stride]
            rows[place * columns] = u
            total += scores[behind + at + place] * u
            y[r * y_stride] = total + skip * value if has_skip else total
            r = u32(r + 1)

    return solved


def close_block(ways: Ways, dtype: str) -> DeviceFunction:
    """close(state, row, keys, rows, left, fade, asked, columns, size): the tail worked into the state at the block's
    end, which is then rounded to its type. asked: whether there was a state."""
    by_column, read, write = ways.by_column, reader(dtype), writer(dtype)
    written, largest = LocalArray(f32, STATE_BLOCK), SharedArray(f32, _WARPS * _STAGE)

    @device
    def load(u, rows, left, column, columns):
        """Numbers that the tokens of the tail have written to a column, times what is left of them."""
        for j in range(STATE_BLOCK):
            u[j] = f32(0)
            if column < columns:
                u[j] = rows[j * columns + column]
                if not by_column:
                    u[j] = u[j] * left[j]

    @device
    def number_of(u, state, row, keys, fade, asked, n, column):
        """The new number of a row and column."""
        total = f32(0)
        if asked:
            total = (fade[n] if by_column else fade[0]) * read(state + n * row, column, u32(row - 1))
        for g in range(STATE_BLOCK // 4):
            k0, k1, k2, k3 = load4(keys, u32(n * STATE_BLOCK + 4 * g))
            total += k0 * u[4 * g]
            total += k1 * u[4 * g + 1]
            total += k2 * u[4 * g + 2]
            total += k3 * u[4 * g + 3]
        return total

    @device
    def close_numbers(state, row, keys, rows, left, fade, asked, columns, size):
        u, column = written(), u32(thread_index())
        while column < columns:
            load(u, rows, left, column, columns)
            n = u32(0)
            while n < size:
                write(state + n * row, column, number_of(u, state, row, keys, fade, asked, n, column))
                n = u32(n + 1)
            column = u32(column + THREADS)

    @device
    def close_codes(state, row, keys, rows, left, fade, asked, columns, size):
        """Rows by 64: the largest number of each, then its codes, then its scale."""
        u, most, lane, begin = written(), largest(), u32(lane_index()), u32(0)
        warp = u32(thread_index() >> u32(5))
        while begin < size:
            end = u32(_STAGE) if begin + _STAGE < size else u32(size - begin)
            column = u32(thread_index())
            while column - thread_index() < columns:
                load(u, rows, left, column, columns)
                n = u32(0)
                while n < end:
                    value = f32(0)
                    if column < columns:
                        value = fabs(number_of(u, state, row, keys, fade, asked, u32(begin + n), column))
                    value = warp_max(value)
                    if lane == 0:
                        at = u32(warp * _STAGE + n)
                        most[at] = fmax(most[at], value) if column >= THREADS else value
                    n = u32(n + 1)
                column = u32(column + THREADS)
            sync_block()
            column = u32(thread_index())
            while column - thread_index() < columns:
                load(u, rows, left, column, columns)
                n = u32(0)
                while n < end:
                    top, value = _of_warps(most, n), f32(0)
                    if column < columns:
                        value = number_of(u, state, row, keys, fade, asked, u32(begin + n), column)
                    inverse = f32(127) / top if top > f32(SMALLEST) else f32(0)
                    write_q8(state + (begin + n) * row, column, columns, value, inverse)
                    n = u32(n + 1)
                column = u32(column + THREADS)
            # Barrier: all threads have read the scales that were there.
            sync_block()
            n = u32(thread_index())
            if n < end:
                top = _of_warps(most, n)
                state[(begin + n) * row + row - 1] = top / f32(127) if top > f32(SMALLEST) else f32(0)
            sync_block()
            begin = u32(begin + _STAGE)

    return close_codes if write is None else close_numbers


@device
def _of_warps(most, n):
    """The largest number of row n of those that stand there."""
    top = most[n]
    for warp in range(1, _WARPS):
        top = fmax(top, most[warp * _STAGE + n])
    return top
