"""Linear attention (op `linear_attention`): each head has a state matrix [dk, dv] that every token decays and updates.

The chunked form. Chunks of 16 tokens begin at multiples of 16 (state/matrix_state.py). S is the state at a chunk's
beginning, D the decay from there to a token. L holds the products of keys with keys, A of queries with keys, each times
the decay from the older token to the younger one. One block of the grid has a sequence and a head, and computes the new
tokens of a chunk together:

    U = beta (V - D K S - L U)        Y = D Q S + A U        S = D S + (decay K)^T U    at the end of the chunk

Each thread has some value columns of the head; value columns are independent. The tail is the tokens of the unfinished
chunk: their keys, their u and their decays are kept in the state's slot. Every sum has one fixed order, so decoding
token by token and a prompt in pieces give the same bits. S is read once for the new tokens of a chunk. If every key
column has a decay of its own, the keys of the tail are decayed in place, and tokens are computed one at a time.

Heads of one value column that share their keys have no matrices: scan.py. A plain version of this algorithm is
`numflow/learn/twins/chunked.py`.
"""

import functools

from numflow.cuda.attention.linear_block import (
    THREADS,
    StateShape,
    Variant,
    append_keys,
    decay_columns,
    decay_head,
    fold_chunk,
    solve,
    state_products,
    tail_products,
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
    q, k, v, *rest = step.inputs
    steps, beta = [*rest, None, None][:2]
    heads, key_heads = param(step, "heads"), param(step, "key_heads")
    shape = StateShape(heads, key_heads, q.width // key_heads, v.width // heads)
    rate, state = step.weights["rate"], ctx.states[param(step, "state")]
    variant = Variant(steps is not None, "skip" in step.weights, beta is not None, param(step, "scaled"),
                param(step, "tiled"), steps is not None and steps.width > heads,
                ctx.network.weights[rate].shape[0] > heads)
    rates = ctx.vector(rate)
    return [per_row(step, matrix_kernel(variant, state.shape.dtype), N_SEQUENCES, heads, ctx.view(step.outputs[0]),
                    ctx.view(q), ctx.view(k), ctx.view(v), ctx.view(steps or v), ctx.view(beta or v), rates,
                    ctx.vector(step.weights["skip"]) if variant.skip else rates, ctx.batch.texts, state.slots, shape,
                    matrix_layout(state.shape))]


@functools.cache
def matrix_kernel(variant: Variant, dtype: str) -> Kernel:
    """The kernel for a variant and a data type of the states. Grid (sequences, heads)."""
    tiled, has_skip, by_column, tile = variant.tiled, variant.skip, variant.by_column, variant.tile
    kind = "".join(str(int(flag)) for flag in variant)
    products, decays = SharedArray(f32, 2 * tile * STATE_BLOCK), SharedArray(f32, STATE_BLOCK)
    write_products, decay_keys, decay_tail = tail_products(variant), decay_columns(variant), decay_head(variant)
    multiply_state, solve_column, fold = state_products(variant, dtype), solve(variant), fold_chunk(variant, dtype)

    @kernel(f"linear_attention_{dtype}_{kind}", THREADS)
    def _linear_attention(y: Rows, q: Rows, k: Rows, v: Rows, steps: Rows, beta: Rows, rates: f32.ptr, skip: f32.ptr,
                          texts: Texts, state: Slots, shape: StateShape, layout: MatrixLayout):
        # Block indices: a sequence and a head. Then the address of the head's state.
        sequence, head = block_x(), u32(block_y())
        if sequence >= texts.counts[N_SEQUENCES]:
            return
        size, columns = u32(shape.k_dim), u32(shape.v_dim)
        key_head = u32(head % shape.key_heads) if tiled else u32(head // (shape.heads // shape.key_heads))
        slot = state.data + (u32(texts.slots[sequence]) * state.stride + head * layout.head)
        keys, rows = slot + layout.keys, slot + layout.rows
        tail_decay, state_decay = slot + layout.tail_decay, slot + layout.state_decay
        scores, token_decay = products(), decays()
        t, last = u32(texts.starts[sequence]), u32(texts.starts[sequence + 1])
        while t < last:
            # The next `count` tokens of one chunk, from index `first` of the chunk on.
            position = u32(texts.positions[t])
            first, has_state = u32(position % STATE_BLOCK), position >= STATE_BLOCK
            count = u32(STATE_BLOCK - first)
            count = count if count < last - t else u32(last - t)
            count = count if count < tile else u32(tile)
            query, key = q.data + (t * q.stride + key_head * size), k.data + (t * k.stride + key_head * size)
            # Append their keys to the tail; multiply keys and queries with all keys of the tail; compute the decays.
            if by_column:
                decay_keys(keys, state_decay, key, first, size, steps.data + t * steps.stride, rates, head)
            else:
                append_keys(keys, key, k.stride, first, count, size)
            sync_block()
            write_products(scores, keys, key, k.stride, query, q.stride, first, count, size)
            sync_block()
            if not by_column:
                decay_tail(scores, tail_decay, state_decay, token_decay, steps.data + (t * steps.stride + head),
                           steps.stride, rates, head, first, count)
                sync_block()
            # For each value column: products of the keys and queries with the state, then u and y.
            begin = u32(0)
            while begin < columns:
                column = u32(begin + thread_index())
                y_column, u_out = u32(head * columns + column), rows + column
                y_out = y.data + (t * y.stride + y_column)
                if has_state:
                    multiply_state(u_out + first * columns, columns, y_out, y.stride, slot, layout.row, state_decay,
                                   key, k.stride, query, q.stride, column, count, size)
                if column < columns:
                    solve_column(u_out, columns, y_out, y.stride, v.data + (t * v.stride + y_column), v.stride,
                           beta.data + (t * beta.stride + head), beta.stride, steps.data + (t * steps.stride + head),
                           steps.stride, skip[head] if has_skip else f32(0), scores, token_decay, has_state, first,
                           count)
                begin = u32(begin + THREADS)
            # Barrier: u of all columns is written before the chunk is folded into the state or the tail changes.
            sync_block()
            if first + count == STATE_BLOCK:
                fold(slot, layout.row, keys, rows, tail_decay, state_decay, has_state, columns, size)
                sync_block()
            t = u32(t + count)

    return _linear_attention
