"""Lab 11: find the race.

The threads of a block share memory (`SharedArray`). A thread may read what another thread has written only after a
barrier. i.sync_block() is a barrier: no thread continues before all threads of the block have reached it, and all of
them must reach it. Without the barrier a kernel has a data race: the result depends on the order in which the threads
run, and it may be right a thousand times before it is wrong.

Each of these four kernels has one fault in its barriers. The arithmetic is correct. Find and fix the faults:

    scan         y[t] = x[0] + ... + x[t] for 64 threads, by steps of 1, 2, 4, ... 32
    transpose    y = the transpose of a matrix of 8 x 8
    reduction    y[0] = the sum of 64 elements, by halves
    product      y = a b for matrices of 16 x 16, through shared tiles of 8 x 8

The checker runs each kernel in eight orders of threads and records the accesses to shared memory. It reports two
threads that access the same element without a barrier between, even if the result is right.

    numflow learn check 11       numflow learn hint 11       numflow learn bench 11
"""

from numflow.cuda.lang import intrinsics as i
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.scalar import f32

LAB = {
    "number": 11, "title": "Find the race", "minutes": 45,
    "functions": ["scan", "transpose", "reduction", "product"], "grader": "races", "start": "fault", "needs": [10],
    "hints": [
        "For each kernel draw the shared array, and beside it the order of events: which threads write, barrier, which "
        "threads read, barrier, which threads write again.",
        "Barriers are needed in two cases: between a write and the reads of other threads, and between reads and the "
        "next write of other threads. Loops need both. A barrier inside an `if` is not reached by some threads.",
        "scan: between reading the neighbour and writing. transpose: after the matrix is written. reduction: outside "
        "of the if. product: at the end of each round, before the tiles are overwritten."],
}
VALUES = SharedArray(f32, 64)
LEFT = SharedArray(f32, 64)
RIGHT = SharedArray(f32, 64)


def scan(y, x):
    """y f32 [64], x f32 [64]; 64 threads."""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    i.sync_block()
    for step in (1, 2, 4, 8, 16, 32):
        before = part[t - step] if t >= step else f32(0)
        i.sync_block()
        part[t] = part[t] + before
        i.sync_block()
    y[t] = part[t]


def transpose(y, x):
    """y f32 [8, 8], x f32 [8, 8]; 64 threads."""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    i.sync_block()
    y[t] = part[t % 8 * 8 + t // 8]


def reduction(y, x):
    """y f32 [1], x f32 [64]; 64 threads."""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    i.sync_block()
    for half in (32, 16, 8, 4, 2, 1):
        if t < half:
            part[t] = part[t] + part[t + half]
        i.sync_block()
    if t == 0:
        y[0] = part[0]


def product(y, a, b):
    """y, a, b f32 [16, 16]; a block of 64 threads for each of the four tiles of y."""
    t, left, right = i.thread_index(), LEFT(), RIGHT()
    row, column = i.block_x() // 2 * 8 + t // 8, i.block_x() % 2 * 8 + t % 8
    total = f32(0)
    for first in (0, 8):
        left[t] = a[row * 16 + first + t % 8]
        right[t] = b[(first + t // 8) * 16 + column]
        i.sync_block()
        for k in range(8):
            total += left[t // 8 * 8 + k] * right[k * 8 + t % 8]
        i.sync_block()
    y[row * 16 + column] = total


def scan__fault(y, x):
    """an element that is overwritten before another thread has read it"""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    i.sync_block()
    for step in (1, 2, 4, 8, 16, 32):
        before = part[t - step] if t >= step else f32(0)
        part[t] = part[t] + before
        i.sync_block()
    y[t] = part[t]


def transpose__fault(y, x):
    """elements that are read before other threads have written them"""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    y[t] = part[t % 8 * 8 + t // 8]


def reduction__fault(y, x):
    """a barrier inside an if, which some threads do not reach"""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    i.sync_block()
    for half in (32, 16, 8, 4, 2, 1):
        if t < half:
            part[t] = part[t] + part[t + half]
            i.sync_block()
    if t == 0:
        y[0] = part[0]


def product__fault(y, a, b):
    """tiles that are overwritten for the next round while other threads still read them"""
    t, left, right = i.thread_index(), LEFT(), RIGHT()
    row, column = i.block_x() // 2 * 8 + t // 8, i.block_x() % 2 * 8 + t % 8
    total = f32(0)
    for first in (0, 8):
        left[t] = a[row * 16 + first + t % 8]
        right[t] = b[(first + t // 8) * 16 + column]
        i.sync_block()
        for k in range(8):
            total += left[t // 8 * 8 + k] * right[k * 8 + t % 8]
    y[row * 16 + column] = total


def scan__one_barrier(y, x):
    """elements that are read before they are written: the barrier after the write is missing"""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    i.sync_block()
    for step in (1, 2, 4, 8, 16, 32):
        before = part[t - step] if t >= step else f32(0)
        i.sync_block()
        part[t] = part[t] + before
    y[t] = part[t]


def scan__warp(y, x):
    """a barrier of the warp (sync_warp) for threads of two warps: sync_block is the barrier of the block"""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    i.sync_warp()
    for step in (1, 2, 4, 8, 16, 32):
        before = part[t - step] if t >= step else f32(0)
        i.sync_warp()
        part[t] = part[t] + before
        i.sync_warp()
    y[t] = part[t]


def reduction__none(y, x):
    """elements that are added before they are complete: the barrier in the loop is missing"""
    t, part = i.thread_index(), VALUES()
    part[t] = x[t]
    i.sync_block()
    for half in (32, 16, 8, 4, 2, 1):
        if t < half:
            part[t] = part[t] + part[t + half]
    if t == 0:
        y[0] = part[0]


def product__late(y, a, b):
    """a product of tiles that are not written yet: the barrier before the loop over k is missing"""
    t, left, right = i.thread_index(), LEFT(), RIGHT()
    row, column = i.block_x() // 2 * 8 + t // 8, i.block_x() % 2 * 8 + t % 8
    total = f32(0)
    for first in (0, 8):
        left[t] = a[row * 16 + first + t % 8]
        right[t] = b[(first + t // 8) * 16 + column]
        for k in range(8):
            total += left[t // 8 * 8 + k] * right[k * 8 + t % 8]
        i.sync_block()
    y[row * 16 + column] = total


def bench(functions):
    """Barriers per thread of your kernels and of the solution's."""
    from numflow.learn.graders.races import barriers

    own = {"scan": scan, "transpose": transpose, "reduction": reduction, "product": product}
    bars = [(f"{name}, {label}", count) for name in own
            for label, count in (("yours", barriers(name, functions[name])), ("solution", barriers(name, own[name])))]
    return {"what": "barriers of a block", "unit": "", "bars": bars}
