"""The kernel of `gated_recurrence` (gated_recurrence.py)."""

import numpy as np

from numflow.cpu.attention.gated_recurrence import SLOTS
from numflow.cpu.runtime.access import i32_ptr, i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, POSITIONS, STARTS, kernel
from numflow.cpu.simd.float32 import fma, load_part, sqrt, store_part
from numflow.cpu.simd.functions import exp, sigmoid
from numflow.cpu.state.state_access import slot_of

_ONE, _TWO = np.float32(1), np.float32(2)


@kernel
def gated_recurrence(args, thread, n_threads):
    """Items: 16 channels times sequences, all tokens one after the other."""
    header, width = i64(args, SLOTS.header), i64(args, SLOTS.width)
    starts, positions = i32_ptr(i64(header, STARTS)), i32_ptr(i64(header, POSITIONS))
    sequences = i64(header, N_SEQUENCES)
    begin, end = share((width + 15) // 16 * sequences, thread, n_threads)
    for item in range(begin, end):
        sequence, first = item % sequences, item // sequences * 16
        at, left = 4 * first, width - first
        if starts[sequence] < starts[sequence + 1]:
            memory = slot_of(header, sequence, i64(args, SLOTS.state), i64(args, SLOTS.state_stride)) + at
            rate = load_part(i64(args, SLOTS.rate) + at, left)
            entry_bias = load_part(i64(args, SLOTS.entry_bias) + at, left)
            fade_bias = load_part(i64(args, SLOTS.fade_bias) + at, left)
            h = load_part(memory, left)
            for t in range(starts[sequence], starts[sequence + 1]):
                entry = load_part(i64(args, SLOTS.entry) + 4 * t * i64(args, SLOTS.entry_stride) + at, left)
                x = load_part(i64(args, SLOTS.x) + 4 * t * i64(args, SLOTS.x_stride) + at, left)
                x = sigmoid(entry + entry_bias) * x
                if positions[t] == 0:
                    h = x
                else:
                    fade = load_part(i64(args, SLOTS.fade) + 4 * t * i64(args, SLOTS.fade_stride) + at, left)
                    log_a = sigmoid(fade + fade_bias) * rate
                    kept = sqrt(_ONE + -exp(log_a * _TWO))
                    h = fma(exp(log_a), h, kept * x)
                store_part(i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + at, h, left)
            store_part(memory, h, left)
