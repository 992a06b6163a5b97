"""Choosing tokens on the device, so that ids come back and not rows of logits."""

from numflow.cuda.call import N_LOGIT_ROWS, Call, per_row
from numflow.cuda.device import Ref
from numflow.cuda.intrinsic import SharedArray
from numflow.cuda.intrinsics import block_y, lane_index, shuffle_xor, sync_block, thread_index
from numflow.cuda.kernel import device, kernel
from numflow.cuda.scalar import f32, i32, u32
from numflow.ops import View

THREADS = 256
LOWEST = -3.4e38
_values, _places = SharedArray(f32, 8), SharedArray(i32, 8)


def argmax(ctx, logits: View, ids: Ref) -> Call:
    """logits f32 [R, V] -> ids i32 [R]: the largest of each row, the first of equals; 0 for a row of NaN."""
    return per_row(None, _argmax, N_LOGIT_ROWS, 1, ids, *ctx.view(logits), ctx.batch.counts, logits.width)


@device
def better_of_warp(value, index):
    """The largest value of the warp and the lowest index that has it, in every lane."""
    for i in range(5):
        mask = 1 << i
        other, place = shuffle_xor(value, mask), shuffle_xor(index, mask)
        if other > value or (other == value and place < index):
            value, index = other, place
    return value, index


@kernel("argmax", THREADS)
def _argmax(ids: i32.ptr, logits: f32.ptr, stride: u32, counts: i32.ptr, width: u32):
    row, thread = block_y(), u32(thread_index())
    if row >= counts[N_LOGIT_ROWS]:
        return
    source, values, places = logits + row * stride, _values(), _places()
    value, index = f32(LOWEST), i32(0x7FFFFFFF)
    i = thread
    while i < width:
        here = source[i]
        if here > value:
            value, index = here, i32(i)
        i = u32(i + 256)
    value, index = better_of_warp(value, index)
    if lane_index() == 0:
        values[thread >> u32(5)], places[thread >> u32(5)] = value, index
    sync_block()
    if thread == 0:
        for warp in range(1, 8):
            if values[warp] > value or (values[warp] == value and places[warp] < index):
                value, index = values[warp], places[warp]
        ids[row] = index if index < width else i32(0)
