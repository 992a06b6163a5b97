"""The kernel of `gated_recurrence` (fading.py).

    h = a h + sqrt(1 - a^2) sigmoid(input_gate + input_bias) x
    log a = rate * sigmoid(recurrence_gate + recurrence_bias), rate = -8 softplus(weight); a = 0 at position 0
"""

import numpy as np

from numflow.cpu.attention.fading import SLOTS
from numflow.cpu.runtime.access import i32_ptr, i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, POSITIONS, STARTS, kernel
from numflow.cpu.simd.float32 import fma, load_part, sqrt, store_part
from numflow.cpu.simd.functions import exp, sigmoid
from numflow.cpu.simd.vector import inline
from numflow.cpu.state.state_access import slot_of

_ONE, _TWO = np.float32(1), np.float32(2)


CHANNELS = 64  # channels per item: a few cache lines of each row, since every row is in another memory page


@kernel
def gated_recurrence(args, thread, n_threads):
    """Items: 64 channels of a sequence, whose tokens are processed in order. The state is updated in its slot."""
    header, width = i64(args, SLOTS.header), i64(args, SLOTS.width)
    starts, positions = i32_ptr(i64(header, STARTS)), i32_ptr(i64(header, POSITIONS))
    sequences = i64(header, N_SEQUENCES)
    begin, end = share((width + CHANNELS - 1) // CHANNELS * sequences, thread, n_threads)
    for item in range(begin, end):
        sequence, first = item % sequences, item // sequences * CHANNELS
        memory = slot_of(header, sequence, i64(args, SLOTS.state), i64(args, SLOTS.state_stride))
        for t in range(starts[sequence], starts[sequence + 1]):
            for channel in range(first, min(first + CHANNELS, width), 16):
                _token(args, memory + 4 * channel, t, channel, width - channel, positions[t] == 0)


@inline
def _token(args, state, t, channel, left, new):
    """One token of 16 channels, or of `left` if fewer are left."""
    offset = 4 * channel
    input_gate = load_part(i64(args, SLOTS.input_gate) + 4 * t * i64(args, SLOTS.input_gate_stride) + offset, left)
    x = load_part(i64(args, SLOTS.x) + 4 * t * i64(args, SLOTS.x_stride) + offset, left)
    h = sigmoid(input_gate + load_part(i64(args, SLOTS.input_bias) + offset, left)) * x
    if not new:
        gate = load_part(i64(args, SLOTS.recurrence_gate) + 4 * t * i64(args, SLOTS.recurrence_gate_stride) + offset,
                         left)
        log_a = sigmoid(gate + load_part(i64(args, SLOTS.recurrence_bias) + offset, left)) * load_part(
            i64(args, SLOTS.rate) + offset, left)
        norm = sqrt(_ONE + -exp(log_a * _TWO))
        h = fma(exp(log_a), load_part(state, left), norm * h)
    store_part(i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + offset, h, left)
    store_part(state, h, left)
