"""The kernel of `ngram_ids` (ngrams.py)."""

import numpy as np

from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, TOKENS, kernel
from numflow.cpu.simd.vector import inline
from numflow.cpu.state.ngrams import SLOTS
from numflow.cpu.state.state_access import begins, first_row, slot_of


@kernel
def ngram_ids(args, thread, n_threads):
    """Items: sequences."""
    header, before = i64(args, SLOTS.header), i64(args, SLOTS.before)
    begin, end = share(i64(header, N_SEQUENCES), thread, n_threads)
    for sequence in range(begin, end):
        first, last = first_row(header, sequence), first_row(header, sequence + 1)
        if first < last:
            state = slot_of(header, sequence, i64(args, SLOTS.state), i64(args, SLOTS.state_stride))
            if begins(header, first):
                for i in range(before):
                    f32_ptr(state)[i] = np.float32(0)
            for t in range(first, last):
                _hash(args, state, first, t)
            for i in range(before):  # a token of the state is read before it is overwritten
                f32_ptr(state)[i] = np.float32(_token(args, state, first, last - before + i))


@inline
def _token(args, state, first, t):
    """The token of row t, plus 1; rows before `first` are in the state."""
    if t >= first:
        return np.int64(i32_ptr(i64(i64(args, SLOTS.header), TOKENS))[t]) + 1
    return np.int64(f32_ptr(state)[i64(args, SLOTS.before) + t - first])


@inline
def _hash(args, state, first, t):
    """Write the rows of the n-grams that end at row t."""
    y = i32_ptr(i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride))
    multipliers, before, separator = i64(args, SLOTS.multipliers), i64(args, SLOTS.before), i64(args, SLOTS.separator)
    each = i64(args, SLOTS.parts) // before
    mixed, reached = (_token(args, state, first, t) - 1) * i64(multipliers, 0), True
    for back in range(1, before + 1):
        token = _token(args, state, first, t - back) - 1
        reached = reached and token >= 0 and token != separator
        mixed ^= (token if reached else separator) * i64(multipliers, back)
        for part in range((back - 1) * each, back * each):
            y[part] = np.int32(mixed % i64(i64(args, SLOTS.sizes), part) + i64(i64(args, SLOTS.starts), part))
