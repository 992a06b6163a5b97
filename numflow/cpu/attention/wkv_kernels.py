"""The kernel of `wkv` (fading.py).

    y = (a + w v) / (b + w), w = e^(first + k);  then a = e^decay a + e^k v, b = e^decay b + e^k

The state of a channel is a and b, divided by e^m, and m, the largest exponent so far.
"""

import numpy as np

from numflow.cpu.attention.fading import WKV_SLOTS as SLOTS
from numflow.cpu.runtime.access import i32_ptr, i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, POSITIONS, STARTS, kernel
from numflow.cpu.simd.float32 import fma, load_part, maximum, splat, store_part
from numflow.cpu.simd.functions import exp
from numflow.cpu.simd.vector import inline
from numflow.cpu.state.state_access import slot_of

_ONE = np.float32(1)
CHANNELS = 64  # channels per item: a few cache lines of each row, since every row is in another memory page


@kernel
def wkv(args, thread, n_threads):
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
                _token(args, memory + 4 * channel, 4 * width, t, channel, width - channel, positions[t] == 0)


@inline
def _token(args, state, row, t, channel, left, new):
    """One token of 16 channels, or of `left` if fewer are left. row: bytes between a, b and m in the state."""
    offset = 4 * channel
    k = load_part(i64(args, SLOTS.k) + 4 * t * i64(args, SLOTS.k_stride) + offset, left)
    v = load_part(i64(args, SLOTS.v) + 4 * t * i64(args, SLOTS.v_stride) + offset, left)
    y, a, b, m = v, v, splat(_ONE), k
    if not new:
        a, b, m = load_part(state, left), load_part(state + row, left), load_part(state + 2 * row, left)
        # y: the current token has the exponent first + k.
        exponent = k + load_part(i64(args, SLOTS.first) + offset, left)
        q = maximum(m, exponent)
        old, new_weight = exp(m + -q), exp(exponent + -q)
        y = fma(old, a, new_weight * v) / fma(old, b, new_weight)
        # The state: the current token has the exponent k.
        decayed = m + load_part(i64(args, SLOTS.decay) + offset, left)
        m = maximum(decayed, k)
        old, new_weight = exp(decayed + -m), exp(k + -m)
        a, b = fma(old, a, new_weight * v), fma(old, b, new_weight)
    store_part(i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + offset, y, left)
    store_part(state, a, left)
    store_part(state + row, b, left)
    store_part(state + 2 * row, m, left)
