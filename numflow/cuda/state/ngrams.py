"""Rows of hashed n-grams (op `ngram_ids`).

The state holds the last N - 1 tokens of each sequence, plus 1; 0 stands for a token that n-grams do not reach.

    ngram_ids         one thread for each row of the table, H for each token
    keep_last_tokens  one thread for each sequence: the new last tokens
"""

import numpy as np

from numflow.cuda.device.call import N_SEQUENCES, N_TOKENS, Call, ceil, per_row
from numflow.cuda.device.device import Ref
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import device, kernel
from numflow.cuda.lang.parameters import IntRows, Slots, Texts
from numflow.cuda.lang.scalar import f32, i32, u32, u64
from numflow.ops import Step, param

THREADS = 32


def ngram_ids(step: Step, ctx) -> list[Call]:
    """y i32 [T, H]."""
    (y,), texts, tokens = step.outputs, ctx.batch.texts, ctx.batch.ref("tokens")
    state, before = ctx.states[param(step, "state")].slots, len(param(step, "multipliers")) - 1
    return [per_row(step, _ids, N_TOKENS, ceil(y.width, THREADS), IntRows(*ctx.view(y)), tokens,
                    ctx.batch.ref("sequence_of"), texts, state, _numbers(step, ctx), before, y.width,
                    param(step, "separator")),
            per_row(step, _keep_last_tokens, N_SEQUENCES, 1, tokens, texts, state, before)]


def _numbers(step: Step, ctx) -> Ref:
    """u32 [2 * N + 2 * H]: low and high words of the multipliers, then size and first row of each part."""
    sizes = param(step, "sizes")
    numbers = np.concatenate([np.array(param(step, "multipliers"), np.uint64).view(np.uint32),
                              np.array([sizes, np.cumsum([0, *sizes[:-1]])], np.uint32).reshape(-1)])
    room = ctx.scratch(f"numbers of {step.label}", numbers.nbytes)
    ctx.device.upload(room, numbers)
    return room


@kernel("ngram_ids", THREADS)
def _ids(y: IntRows, tokens: i32.ptr, sequence_of: i32.ptr, texts: Texts, state: Slots, numbers: u32.ptr, before: u32,
         parts: u32, separator: u32):
    """Grid (rows, parts / 32)."""
    t, part = block_x(), u32(block_y() * 32 + thread_index())
    if t >= texts.counts[N_TOKENS] or part >= parts:
        return
    sequence = sequence_of[t]
    first, slot = u32(texts.starts[sequence]), u32(u32(texts.slots[sequence]) * state.stride)
    back, reached, last = u32(1), True, u32(part // u32(parts // before) + 1)
    mixed = u64(u64(tokens[t]) * _wide(numbers, u32(0)))
    while back <= last:
        token = _token_before(tokens, texts.positions, state.data, slot, first, u32(t - first), back, before)
        reached = reached and token != u32(0) and token != u32(separator + 1)
        token = u32(token - 1) if reached else separator
        mixed = u64(mixed ^ u64(u64(token) * _wide(numbers, back)))
        back = u32(back + 1)
    sizes = numbers + u32(2 * u32(before + 1))
    y.data[t * y.stride + part] = i32(u32(u64(mixed % u64(sizes[part]))) + sizes[parts + part])


@device
def _wide(numbers, index):
    """Number `index` of 64 bits."""
    return u64(u64(u64(numbers[2 * index + 1]) << u64(32)) | u64(numbers[2 * index]))


@device
def _token_before(tokens, positions, state, slot, first, row, back, before):
    """The token `back` tokens before row `row` of a sequence, plus 1; 0 for none. The row may be the sequence's end."""
    if back <= row:
        return u32(tokens[first + row - back] + 1)
    return u32(state[slot + before + row - back]) if positions[first] > 0 else u32(0)


@kernel("keep_last_tokens", THREADS)
def _keep_last_tokens(tokens: i32.ptr, texts: Texts, state: Slots, kept: u32):
    """Grid (sequences). Rising order: a token of the state is read before it is overwritten."""
    sequence, i = block_x(), u32(0)
    if sequence >= texts.counts[N_SEQUENCES] or thread_index() > 0:
        return
    first, last = u32(texts.starts[sequence]), u32(texts.starts[sequence + 1])
    slot = u32(u32(texts.slots[sequence]) * state.stride)
    while first < last and i < kept:
        state.data[slot + i] = f32(_token_before(tokens, texts.positions, state.data, slot, first, u32(last - first),
                                                 u32(kept - i), kept))
        i = u32(i + 1)
