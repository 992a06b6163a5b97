"""The kernel of `gated_recurrence` (gated_recurrence.py)."""

import numpy as np

from numflow.cpu.attention.fading import SLOTS
from numflow.cpu.runtime.access import i32_ptr, i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, POSITIONS, STARTS, kernel
from numflow.cpu.simd.float32 import fma, load_part, sqrt, store_part
from numflow.cpu.simd.functions import exp, sigmoid
from numflow.cpu.simd.vector import inline
from numflow.cpu.state.state_access import slot_of

_ONE, _TWO = np.float32(1), np.float32(2)


WIDE = 64  # channels of an item: a few lines of each row, which lies in a page of memory of its own


@kernel
def gated_recurrence(args, thread, n_threads):
    """Items: 64 channels times sequences, all tokens one after the other. The state stands in its slot."""
    header, width = i64(args, SLOTS.header), i64(args, SLOTS.width)
    starts, positions = i32_ptr(i64(header, STARTS)), i32_ptr(i64(header, POSITIONS))
    sequences = i64(header, N_SEQUENCES)
    begin, end = share((width + WIDE - 1) // WIDE * sequences, thread, n_threads)
    for item in range(begin, end):
        sequence, first = item % sequences, item // sequences * WIDE
        memory = slot_of(header, sequence, i64(args, SLOTS.state), i64(args, SLOTS.state_stride))
        for t in range(starts[sequence], starts[sequence + 1]):
            for channel in range(first, min(first + WIDE, width), 16):
                _token(args, memory + 4 * channel, t, channel, width - channel, positions[t] == 0)


@inline
def _token(args, state, t, channel, left, new):
    """16 channels, or `left` where those are fewer."""
    at = 4 * channel
    entry = load_part(i64(args, SLOTS.entry) + 4 * t * i64(args, SLOTS.entry_stride) + at, left)
    x = load_part(i64(args, SLOTS.x) + 4 * t * i64(args, SLOTS.x_stride) + at, left)
    h = sigmoid(entry + load_part(i64(args, SLOTS.entry_bias) + at, left)) * x
    if not new:
        fade = load_part(i64(args, SLOTS.fade) + 4 * t * i64(args, SLOTS.fade_stride) + at, left)
        log_a = sigmoid(fade + load_part(i64(args, SLOTS.fade_bias) + at, left)) * load_part(
            i64(args, SLOTS.rate) + at, left)
        kept = sqrt(_ONE + -exp(log_a * _TWO))
        h = fma(exp(log_a), load_part(state, left), kept * h)
    store_part(i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + at, h, left)
    store_part(state, h, left)
