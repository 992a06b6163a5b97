"""Reductions over the threads of a warp or a block: sums and maxima, in a fixed order."""

from numflow.cuda.lang.arithmetic import fmax
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import lane_index, shuffle_xor, sync_block, thread_index
from numflow.cuda.lang.kernel import device
from numflow.cuda.lang.scalar import f32, u32

_parts = SharedArray(f32, 32)


@device
def warp_sum(value):
    """Sum over the lanes of a warp, in every lane."""
    value += shuffle_xor(value, 16)
    value += shuffle_xor(value, 8)
    value += shuffle_xor(value, 4)
    value += shuffle_xor(value, 2)
    return value + shuffle_xor(value, 1)


@device
def warp_max(value):
    """Maximum over the lanes of a warp, in every lane."""
    value = fmax(value, shuffle_xor(value, 16))
    value = fmax(value, shuffle_xor(value, 8))
    value = fmax(value, shuffle_xor(value, 4))
    value = fmax(value, shuffle_xor(value, 2))
    return fmax(value, shuffle_xor(value, 1))


@device
def block_sum(value, warps):
    """Sum over a block of `warps` warps, in every thread. All threads must call it. It may be called repeatedly."""
    parts = _parts()
    value = warp_sum(value)
    sync_block()
    if lane_index() == 0:
        parts[thread_index() >> u32(5)] = value
    sync_block()
    total = f32(0)
    for warp in range(warps):
        total += parts[warp]
    return total


@device
def block_max(value, warps):
    """Maximum over a block of `warps` warps, in every thread. All threads must call it."""
    parts = _parts()
    value = warp_max(value)
    sync_block()
    if lane_index() == 0:
        parts[thread_index() >> u32(5)] = value
    sync_block()
    largest = parts[0]
    for warp in range(1, warps):
        largest = fmax(largest, parts[warp])
    return largest


@device
def better_of_warp(value, index):
    """The maximum over the lanes of a warp, and the lowest index that has it, in every lane."""
    for i in range(5):
        mask = 1 << i
        other, place = shuffle_xor(value, mask), shuffle_xor(index, mask)
        if other > value or (other == value and place < index):
            value, index = other, place
    return value, index
