"""Linear attention: a state [dk, dv] of each head that every token fades and adds to (op `linear_attention`).

Tokens go in blocks of 16 that begin at fixed positions (state/matrix_state.py). With S the state at a block's border, D
what is left of it at a token, and L, A the products of keys with keys and of queries with keys, each times what is left
of the older token at the younger one, a block of threads takes the tokens of a block that are there together:

    U = beta (V - D K S - L U)        Y = D Q S + A U        S = D S + (left K)^T U     at the block's end

A thread has value columns of a head, which do not meet. Every sum has one order, so one token at a time and a prompt in
pieces give the same bits; S is read once for the tokens of a block. With decays for each column of keys the keys of the
tail fade as they stand, so that tokens come one by one there.

Heads of one column that share their keys have no matrices: scan.py. The plain twin is `numflow/learn/twins/chunked.py`.
"""

import functools

from numflow.cuda.attention.linear_block import (
    THREADS,
    StateShape,
    Ways,
    ask_state,
    close_block,
    fade_columns,
    fade_head,
    put_keys,
    put_products,
    solve,
)
from numflow.cuda.attention.scan import scan
from numflow.cuda.device.call import N_SEQUENCES, Call, per_row
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import block_x, block_y, sync_block, thread_index
from numflow.cuda.lang.kernel import Kernel, kernel
from numflow.cuda.lang.parameters import Rows, Slots, Texts
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.state.matrix_state import MatrixLayout, matrix_layout
from numflow.network.states import is_scan
from numflow.ops import Step, param
from numflow.quant.state import STATE_BLOCK


def linear_attention(step: Step, ctx) -> list[Call]:
    """q, k f32 [T, G*dk], v, y f32 [T, H*dv], steps f32 [T, H] or [T, H*dk], beta f32 [T, H]; rate f32 [H] or [H*dk],
    skip f32 [H]."""
    if is_scan(step):
        return scan(step, ctx)
    q, k, v, *others = step.inputs
    steps, beta = [*others, None, None][:2]
    heads, key_heads = param(step, "heads"), param(step, "key_heads")
    shape = StateShape(heads, key_heads, q.width // key_heads, v.width // heads)
    rate, state = step.weights["rate"], ctx.states[param(step, "state")]
    ways = Ways(steps is not None, "skip" in step.weights, beta is not None, param(step, "scaled"),
                param(step, "tiled"), steps is not None and steps.width > heads,
                ctx.network.weights[rate].shape[0] > heads)
    rates = ctx.vector(rate)
    return [per_row(step, matrix_kernel(ways, state.shape.dtype), N_SEQUENCES, heads, ctx.view(step.outputs[0]),
                    ctx.view(q), ctx.view(k), ctx.view(v), ctx.view(steps or v), ctx.view(beta or v), rates,
                    ctx.vector(step.weights["skip"]) if ways.skip else rates, ctx.batch.texts, state.slots, shape,
                    matrix_layout(state.shape))]


@functools.cache
def matrix_kernel(ways: Ways, dtype: str) -> Kernel:
    """The kernel of these ways, with states of a type."""
    tiled, has_skip, by_column, tile = ways.tiled, ways.skip, ways.by_column, ways.tile
    kind = "".join(str(int(way)) for way in ways)
    products, fades = SharedArray(f32, 2 * tile * STATE_BLOCK), SharedArray(f32, STATE_BLOCK)
    put, fade_all, fade_one = put_products(ways), fade_columns(ways), fade_head(ways)
    ask, solved, close = ask_state(ways, dtype), solve(ways), close_block(ways, dtype)

    @kernel(f"linear_attention_{dtype}_{kind}", THREADS)
    def _linear_attention(y: Rows, q: Rows, k: Rows, v: Rows, steps: Rows, beta: Rows, rates: f32.ptr, skip: f32.ptr,
                          texts: Texts, state: Slots, shape: StateShape, layout: MatrixLayout):
        # Place in the grid: a sequence, a head; where the head's state begins.
        sequence, head = block_x(), u32(block_y())
        if sequence >= texts.counts[N_SEQUENCES]:
            return
        size, columns = u32(shape.k_dim), u32(shape.v_dim)
        key_head = u32(head % shape.key_heads) if tiled else u32(head // (shape.heads // shape.key_heads))
        own = state.data + (u32(texts.slots[sequence]) * state.stride + head * layout.head)
        keys, rows = own + layout.keys, own + layout.rows
        left, fade = own + layout.left, own + layout.fade
        scores, faded = products(), fades()
        t, last = u32(texts.starts[sequence]), u32(texts.starts[sequence + 1])
        while t < last:
            # Tokens of a block: `count` from place `first` on.
            position = u32(texts.positions[t])
            first, asked = u32(position % STATE_BLOCK), position >= STATE_BLOCK
            count = u32(STATE_BLOCK - first)
            count = count if count < last - t else u32(last - t)
            count = count if count < tile else u32(tile)
            query, key = q.data + (t * q.stride + key_head * size), k.data + (t * k.stride + key_head * size)
            # Their keys into the tail; products with all keys there; what is left of older ones.
            if by_column:
                fade_all(keys, fade, key, first, size, steps.data + t * steps.stride, rates, head)
            else:
                put_keys(keys, key, k.stride, first, count, size)
            sync_block()
            put(scores, keys, key, k.stride, query, q.stride, first, count, size)
            sync_block()
            if not by_column:
                fade_one(scores, left, fade, faded, steps.data + (t * steps.stride + head), steps.stride, rates, head,
                         first, count)
                sync_block()
            # Columns of the state: what it says of keys and queries, then u and y.
            begin = u32(0)
            while begin < columns:
                column = u32(begin + thread_index())
                at, to_u = u32(head * columns + column), rows + column
                to_y = y.data + (t * y.stride + at)
                if asked:
                    ask(to_u + first * columns, columns, to_y, y.stride, own, layout.row, fade, key, k.stride, query,
                        q.stride, column, count, size)
                if column < columns:
                    solved(to_u, columns, to_y, y.stride, v.data + (t * v.stride + at), v.stride,
                           beta.data + (t * beta.stride + head), beta.stride, steps.data + (t * steps.stride + head),
                           steps.stride, skip[head] if has_skip else f32(0), scores, faded, asked, first, count)
                begin = u32(begin + THREADS)
            # Barrier: columns that threads have solved, before the end of a block, and before the tail changes.
            sync_block()
            if first + count == STATE_BLOCK:
                close(own, layout.row, keys, rows, left, fade, asked, columns, size)
                sync_block()
            t = u32(t + count)

    return _linear_attention
