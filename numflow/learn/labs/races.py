"""Lab 11: find the race.

Threads of a block share memory (`SharedArray`). What one thread writes another may read only after a barrier:
i.sync_block() lets no thread go on before all threads of the block have come to it, and all must come to it. Without
the barrier a kernel has a race: its result depends on who is quicker, and may be right a thousand times.

Each of these four kernels has one fault that is about barriers. Their arithmetic is right. Find the faults and mend
them:

    scan         y[t] = x[0] + ... + x[t] for 64 threads, by steps of 1, 2, 4, ... 32
    transpose    a square of 8 x 8 numbers, mirrored
    reduction    y[0] = the sum of 64 numbers, by halves
    product      y = a b for squares of 16 x 16, through shared squares of 8 x 8

The checker runs each kernel in eight orders of threads, and watches shared memory: it says which two threads touch the
same element with no barrier between, even if the numbers came out right.

    numflow learn check 11       numflow learn hint 11       numflow learn bench 11
"""

from numflow.cuda.lang import intrinsics as i
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.scalar import f32

LAB = {
    "number": 11, "title": "Find the race", "minutes": 45,
    "functions": ["scan", "transpose", "reduction", "product"], "grader": "races", "start": "fault", "needs": [10],
    "hints": [
        "For each kernel draw the shared array, and beside it a list in time: who writes, barrier, who reads, barrier, "
        "who writes again.",
        "A barrier separates two directions: what is written before others read it, and what is read before others "
        "overwrite it. Loops need both. A barrier inside an `if` is one that some threads never reach.",
        "scan: between reading the neighbour and writing. transpose: after the square is written. reduction: out of "
        "the if. product: at the end of each round, before the squares are overwritten."],
}
NUMBERS = SharedArray(f32, 64)
LEFT = SharedArray(f32, 64)
RIGHT = SharedArray(f32, 64)


def scan(y, x):
    """y f32 [64], x f32 [64]; 64 threads."""
    t, part = i.thread_index(), NUMBERS()
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
    t, part = i.thread_index(), NUMBERS()
    part[t] = x[t]
    i.sync_block()
    y[t] = part[t % 8 * 8 + t // 8]


def reduction(y, x):
    """y f32 [1], x f32 [64]; 64 threads."""
    t, part = i.thread_index(), NUMBERS()
    part[t] = x[t]
    i.sync_block()
    for half in (32, 16, 8, 4, 2, 1):
        if t < half:
            part[t] = part[t] + part[t + half]
        i.sync_block()
    if t == 0:
        y[0] = part[0]


def product(y, a, b):
    """y, a, b f32 [16, 16]; a block of 64 threads for each of the four squares of y."""
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
    """a number that is overwritten before its neighbour has read it"""
    t, part = i.thread_index(), NUMBERS()
    part[t] = x[t]
    i.sync_block()
    for step in (1, 2, 4, 8, 16, 32):
        before = part[t - step] if t >= step else f32(0)
        part[t] = part[t] + before
        i.sync_block()
    y[t] = part[t]


def transpose__fault(y, x):
    """numbers that are read before another thread has written them"""
    t, part = i.thread_index(), NUMBERS()
    part[t] = x[t]
    y[t] = part[t % 8 * 8 + t // 8]


def reduction__fault(y, x):
    """a barrier inside an if, which some threads never reach"""
    t, part = i.thread_index(), NUMBERS()
    part[t] = x[t]
    i.sync_block()
    for half in (32, 16, 8, 4, 2, 1):
        if t < half:
            part[t] = part[t] + part[t + half]
            i.sync_block()
    if t == 0:
        y[0] = part[0]


def product__fault(y, a, b):
    """squares of the next round that are written while others still read those of this one"""
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
    """a next step that reads what has not been written yet: the barrier after the writing is missing"""
    t, part = i.thread_index(), NUMBERS()
    part[t] = x[t]
    i.sync_block()
    for step in (1, 2, 4, 8, 16, 32):
        before = part[t - step] if t >= step else f32(0)
        i.sync_block()
        part[t] = part[t] + before
    y[t] = part[t]


def scan__warp(y, x):
    """a barrier of the warp where threads of two warps meet: sync_block is the one for all"""
    t, part = i.thread_index(), NUMBERS()
    part[t] = x[t]
    i.sync_warp()
    for step in (1, 2, 4, 8, 16, 32):
        before = part[t - step] if t >= step else f32(0)
        i.sync_warp()
        part[t] = part[t] + before
        i.sync_warp()
    y[t] = part[t]


def reduction__none(y, x):
    """halves that are added before the other half is done: the barrier in the loop is missing"""
    t, part = i.thread_index(), NUMBERS()
    part[t] = x[t]
    i.sync_block()
    for half in (32, 16, 8, 4, 2, 1):
        if t < half:
            part[t] = part[t] + part[t + half]
    if t == 0:
        y[0] = part[0]


def product__late(y, a, b):
    """a product of squares that are not there yet: the barrier before the loop is missing"""
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
    """Barriers that each thread of the kernels comes to, beside those of the solution."""
    from numflow.learn.graders.races import barriers

    own = {"scan": scan, "transpose": transpose, "reduction": reduction, "product": product}
    bars = [(f"{name}, {label}", count) for name in own
            for label, count in (("yours", barriers(name, functions[name])), ("solution", barriers(name, own[name])))]
    return {"what": "barriers of a block", "unit": "", "bars": bars}
