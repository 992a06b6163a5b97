"""Kernels of linear attention (linear_attention.py)."""

import numpy as np

from numflow.cpu.attention.blocks import (
    by_column,
    close_block,
    key_head,
    multiply_state,
    prefetch_block,
    solve_row,
    store_keys,
    store_keys_by_column,
    tail_keys,
)
from numflow.cpu.attention.linear_attention import LANES, SLOTS
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, POSITIONS, STARTS, kernel
from numflow.cpu.simd.float32 import fma, load_part, splat, store_part
from numflow.cpu.simd.functions import exp
from numflow.cpu.simd.vector import inline, load_f32, merged, store_f32, zero_f32
from numflow.cpu.state.state_access import slot_of
from numflow.quant.state import STATE_BLOCK


@kernel
def linear_attention(args, thread, n_threads):
    """Threads share the heads of a sequence; shares rotate from sequence to sequence. Tokens run block by block."""
    header = i64(args, SLOTS.header)
    starts, positions = i32_ptr(i64(header, STARTS)), i32_ptr(i64(header, POSITIONS))
    scratch = i64(args, SLOTS.scratch) + thread * i64(args, SLOTS.scratch_bytes)
    for sequence in range(i64(header, N_SEQUENCES)):
        begin, end = share(i64(args, SLOTS.heads), (thread + sequence) % n_threads, n_threads)
        slot = slot_of(header, sequence, i64(args, SLOTS.state), i64(args, SLOTS.state_stride))
        t = np.int64(starts[sequence])  # else helpers are compiled for int32 too, and not used
        while t < starts[sequence + 1]:
            first = positions[t] % STATE_BLOCK
            count, keys = min(STATE_BLOCK - first, starts[sequence + 1] - t), -1
            for head in range(begin, end):
                if count == STATE_BLOCK and head + 1 < end:
                    prefetch_block(args, t, head + 1)
                _block(args, scratch, slot, head, t, first, count, positions[t], key_head(args, head) == keys)
                keys = key_head(args, head)
            t += count


@merged
def _block(args, scratch, slot, head, t, first, count, position, same_keys):
    """Process rows t .. t + count - 1 of the batch, all of one block.

    position: of row t. same_keys: whether the previous head had the same key head.
    """
    float_state, state, has_state = 0, slot + head * i64(args, SLOTS.head), position >= STATE_BLOCK
    keys = tail_keys(args, slot, state, head, position == 0, first == 0 and count < STATE_BLOCK)
    if by_column(args):
        store_keys_by_column(args, scratch, state, keys, t, head, first, count)
    elif not same_keys or (count < STATE_BLOCK and not i64(args, SLOTS.shared)):
        store_keys(args, scratch, keys, t, head, first, count)
    if has_state:
        float_state = multiply_state(args, scratch, state, t, head, count)
    for r in range(count):
        solve_row(args, scratch, state, t + r, head, first + r, r, has_state)
    if first + count == STATE_BLOCK:
        close_block(args, scratch, state, keys, float_state, count)


@kernel
def scan(args, thread, n_threads):
    """Linear attention of heads with one value column that share keys. Lanes are heads: no sum crosses lanes.

    Items: 64 heads of a sequence, so that whole cache lines of each row are read. A state is [dk][16 heads].
    """
    header = i64(args, SLOTS.header)
    starts, positions = i32_ptr(i64(header, STARTS)), i32_ptr(i64(header, POSITIONS))
    sequences, heads = i64(header, N_SEQUENCES), i64(args, SLOTS.heads)
    groups = (heads + LANES - 1) // LANES
    begin, end = share((groups + 3) // 4 * sequences, thread, n_threads)
    for item in range(begin, end):
        sequence, first = item % sequences, item // sequences * 4
        slot = slot_of(header, sequence, i64(args, SLOTS.state), i64(args, SLOTS.state_stride))
        for t in range(starts[sequence], starts[sequence + 1]):
            for group in range(first, min(first + 4, groups)):
                _lanes(args, slot + 64 * group * i64(args, SLOTS.k_dim), group, t, positions[t] == 0)


@inline
def _lanes(args, state, group, t, new):
    """One token of 16 heads."""
    k_dim, offset, left = i64(args, SLOTS.k_dim), 64 * group, i64(args, SLOTS.heads) - LANES * group
    rates, skip = i64(args, SLOTS.rates) + offset, load_part(i64(args, SLOTS.skip) + offset, left)
    rate_step = 0
    if i64(args, SLOTS.column_rates):
        rates, rate_step = i64(args, SLOTS.rates) + offset * k_dim, 64
    q = f32_ptr(i64(args, SLOTS.q) + 4 * t * i64(args, SLOTS.q_stride))
    k = f32_ptr(i64(args, SLOTS.k) + 4 * t * i64(args, SLOTS.k_stride))
    v, step = load_part(i64(args, SLOTS.v) + 4 * t * i64(args, SLOTS.v_stride) + offset, left), splat(1.0)
    if i64(args, SLOTS.steps):
        step = load_part(i64(args, SLOTS.steps) + 4 * t * i64(args, SLOTS.steps_stride) + offset, left)
    u, y = v * step if i64(args, SLOTS.scaled) else v, v * skip
    for n in range(k_dim):
        decayed = zero_f32() if new else load_f32(state + 64 * n) * exp(load_f32(rates + rate_step * n) * step)
        s = fma(k[n], u, decayed)
        y = fma(q[n], s, y)
        store_f32(state + 64 * n, s)
    store_part(i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + offset, y, left)
