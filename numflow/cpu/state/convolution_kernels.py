"""The kernel of `causal_conv` (convolution.py)."""

from numflow.cpu.elementwise.act import SILU
from numflow.cpu.elementwise.act_kernels import activated
from numflow.cpu.runtime.access import i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, kernel
from numflow.cpu.simd.float32 import fma, load_part, store_part
from numflow.cpu.simd.vector import inline, zero_f32
from numflow.cpu.state.convolution import KINDS, SLOTS
from numflow.cpu.state.state_access import begins, first_row, slot_of

GROUP = 64  # channels per item: whole cache lines of a row
_SILU = KINDS["silu"]


@kernel
def causal_conv(args, thread, n_threads):
    """Items: sequences times groups of channels."""
    header, width = i64(args, SLOTS.header), i64(args, SLOTS.width)
    groups = (width + GROUP - 1) // GROUP
    begin, end = share(i64(header, N_SEQUENCES) * groups, thread, n_threads)
    for item in range(begin, end):
        sequence, channel = item // groups, item % groups * GROUP
        first, last = first_row(header, sequence), first_row(header, sequence + 1)
        if first < last:
            tail = slot_of(header, sequence, i64(args, SLOTS.state), i64(args, SLOTS.state_stride)) + 4 * channel
            for start in range(0, min(GROUP, width - channel), 16):
                left = width - channel - start
                if begins(header, first):
                    _clear(args, tail + 4 * start, left)
                _convolve(args, first, last - first, channel + start, tail + 4 * start, left)
                _shift(args, first, last - first, channel + start, tail + 4 * start, left)


@inline
def _clear(args, tail, left):
    for i in range(i64(args, SLOTS.taps) - 1):
        store_part(tail + 4 * i * i64(args, SLOTS.width), zero_f32(), left)


@inline
def _input_row(args, first, index, channel, tail, left):
    """Row `index` of the tail followed by the rows of x from `first` on."""
    tail_rows = i64(args, SLOTS.taps) - 1
    if index < tail_rows:
        return load_part(tail + 4 * index * i64(args, SLOTS.width), left)
    return load_part(i64(args, SLOTS.x) + 4 * ((first + index - tail_rows) * i64(args, SLOTS.x_stride) + channel), left)


@inline
def _convolve(args, first, count, channel, tail, left):
    """Convolve 16 channels of all rows. Sums run from the oldest row to the newest, however a text is cut."""
    weight, bias, taps, width = i64(args, SLOTS.weight), i64(args, SLOTS.bias), i64(args, SLOTS.taps), \
        i64(args, SLOTS.width)
    for t in range(count):
        y = load_part(bias + 4 * channel, left) if bias != 0 else zero_f32()
        for j in range(taps):
            y = fma(load_part(weight + 4 * (j * width + channel), left),
                    _input_row(args, first, t + j, channel, tail, left), y)
        if i64(args, SLOTS.kind) == _SILU:
            y = activated(SILU, y)
        store_part(i64(args, SLOTS.y) + 4 * ((first + t) * i64(args, SLOTS.y_stride) + channel), y, left)


@inline
def _shift(args, first, count, channel, tail, left):
    """Store the last rows as the tail; a row of the tail is read before it is overwritten."""
    for i in range(i64(args, SLOTS.taps) - 1):
        value = _input_row(args, first, count + i, channel, tail, left)
        store_part(tail + 4 * i * i64(args, SLOTS.width), value, left)
