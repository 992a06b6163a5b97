"""The kernel of `wkv` (wkv.py)."""

import numpy as np

from numflow.cpu.attention.fading import WKV_SLOTS as SLOTS
from numflow.cpu.runtime.access import i32_ptr, i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, POSITIONS, STARTS, kernel
from numflow.cpu.simd.float32 import fma, larger, load_part, splat, store_part
from numflow.cpu.simd.functions import exp
from numflow.cpu.simd.vector import inline
from numflow.cpu.state.state_access import slot_of

_ONE = np.float32(1)
WIDE = 64  # channels of an item: a few lines of each row, which lies in a page of memory of its own


@kernel
def wkv(args, thread, n_threads):
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
                _token(args, memory + 4 * channel, 4 * width, t, channel, width - channel, positions[t] == 0)


@inline
def _token(args, state, row, t, channel, left, new):
    """16 channels, or `left` where those are fewer. row: bytes from one number of a channel's state to the next."""
    at = 4 * channel
    k = load_part(i64(args, SLOTS.k) + 4 * t * i64(args, SLOTS.k_stride) + at, left)
    v = load_part(i64(args, SLOTS.v) + 4 * t * i64(args, SLOTS.v_stride) + at, left)
    y, above, below, most = v, v, splat(_ONE), k
    if not new:
        above, below, most = load_part(state, left), load_part(state + row, left), load_part(state + 2 * row, left)
        # What the present token finds, to which it counts with a weight of its own
        now = k + load_part(i64(args, SLOTS.first) + at, left)
        q = larger(most, now)
        old, own = exp(most + -q), exp(now + -q)
        y = fma(old, above, own * v) / fma(old, below, own)
        # What the next one finds of it
        faded = most + load_part(i64(args, SLOTS.decay) + at, left)
        most = larger(faded, k)
        old, own = exp(faded + -most), exp(k + -most)
        above, below = fma(old, above, own * v), fma(old, below, own)
    store_part(i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + at, y, left)
    store_part(state, above, left)
    store_part(state + row, below, left)
    store_part(state + 2 * row, most, left)
