"""Kernels of what devices do together (exchange.py)."""

import numba

from numflow.cpu.memory.buffers import LINE
from numflow.cpu.runtime.access import i64, i64_ptr, share
from numflow.cpu.runtime.atomic import cpu_yield, load_acquire, pause, store_release
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.float32 import load_part, store_part
from numflow.cpu.simd.vector import inline

# Arguments of all four kernels; X, Y: address (0 if there is none), stride.
HEADER, ROWS, WIDTH, X, X_STRIDE, Y, Y_STRIDE, ABORT, PATIENCE, MY_LINE, SLOTS, SLOT_BYTES = range(12)
LINES, N_LINES, MEMBERS, ME, TABLE, COUNT = range(12, 18)  # of the group kernels
THEIR_LINE, THEIR_COUNT, RING = range(12, 15)              # of send and receive


@numba.njit
def _wait(args, lines, count, rounds):
    """Until all of `count` lines have come to `rounds`; False if the run is broken off.

    A waiting thread yields its core after a while: the one it waits for may need it.
    """
    abort, patience = i64(args, ABORT), i64(args, PATIENCE)
    for line in range(count):
        spins = 0
        while load_acquire(lines + LINE * line) < rounds:
            if spins < patience:
                spins += 1
                pause()
            elif load_acquire(abort) != 0:
                return False
            else:
                cpu_yield()
    return load_acquire(abort) == 0


@inline
def _copy(source, source_stride, target, target_stride, width, rows, thread, n_threads):
    """A thread's share of rows of `width` elements of 4 bytes; strides in elements."""
    vectors = (width + 15) // 16
    begin, end = share(rows * vectors, thread, n_threads)
    for item in range(begin, end):
        t, column = item // vectors, item % vectors * 16
        value = load_part(source + 4 * (t * source_stride + column), width - column)
        store_part(target + 4 * (t * target_stride + column), value, width - column)


@inline
def _row_elements(args):
    """From one row of a slot to the next."""
    return (i64(args, WIDTH) + 15) // 16 * 16


@kernel
def nothing(args, thread, n_threads):
    """Stands for a step that Python does, between two walks over the table."""
    return


@kernel
def send(args, thread, n_threads):
    line, stride, ring = i64(args, MY_LINE) + LINE * thread, _row_elements(args), i64(args, RING)
    rows, room, done = i64(i64(args, HEADER), i64(args, ROWS)), i64(args, SLOT_BYTES) // (4 * stride), i64(line, 0)
    for first in range(0, rows, room):
        if not _wait(args, i64(args, THEIR_LINE), i64(args, THEIR_COUNT), done - ring + 1):
            return
        slot = i64(args, SLOTS) + done % ring * i64(args, SLOT_BYTES)
        _copy(i64(args, X) + 4 * first * i64(args, X_STRIDE), i64(args, X_STRIDE), slot, stride, i64(args, WIDTH),
              min(room, rows - first), thread, n_threads)
        done += 1
        store_release(line, done)


@kernel
def receive(args, thread, n_threads):
    line, stride, ring = i64(args, MY_LINE) + LINE * thread, _row_elements(args), i64(args, RING)
    rows, room, done = i64(i64(args, HEADER), i64(args, ROWS)), i64(args, SLOT_BYTES) // (4 * stride), i64(line, 0)
    for first in range(0, rows, room):
        if not _wait(args, i64(args, THEIR_LINE), i64(args, THEIR_COUNT), done + 1):
            return
        slot = i64(args, SLOTS) + done % ring * i64(args, SLOT_BYTES)
        _copy(slot, stride, i64(args, Y) + 4 * first * i64(args, Y_STRIDE), i64(args, Y_STRIDE), i64(args, WIDTH),
              min(room, rows - first), thread, n_threads)
        done += 1
        store_release(line, done)


@inline
def _slot(args, done, member):
    """A member's slot of a round."""
    return i64(args, SLOTS) + (done % 2 * i64(args, MEMBERS) + member) * i64(args, SLOT_BYTES)


@kernel
def all_reduce(args, thread, n_threads):
    line, stride, width = i64(args, MY_LINE) + LINE * thread, _row_elements(args), i64(args, WIDTH)
    rows, room, done = i64(i64(args, HEADER), i64(args, ROWS)), i64(args, SLOT_BYTES) // (4 * stride), i64(line, 0)
    adds, n_adds = i64_ptr(i64(args, TABLE)), i64(args, COUNT)
    for first in range(0, rows, room):
        count = min(room, rows - first)
        if i64(args, X) != 0:
            _copy(i64(args, X) + 4 * first * i64(args, X_STRIDE), i64(args, X_STRIDE), _slot(args, done, i64(args, ME)),
                  stride, width, count, thread, n_threads)
        store_release(line, done + 1)
        if not _wait(args, i64(args, LINES), i64(args, N_LINES), done + 1):
            return
        vectors = stride // 16
        begin, end = share(count * vectors, thread, n_threads)
        for item in range(begin, end):
            t, column = item // vectors, item % vectors * 16
            at = 4 * (t * stride + column)
            total = load_part(_slot(args, done, adds[0]) + at, width - column)
            for i in range(1, n_adds):
                total = total + load_part(_slot(args, done, adds[i]) + at, width - column)
            store_part(i64(args, Y) + 4 * ((first + t) * i64(args, Y_STRIDE) + column), total, width - column)
        done += 1


@kernel
def all_gather(args, thread, n_threads):
    line, stride, spans = i64(args, MY_LINE) + LINE * thread, _row_elements(args), i64_ptr(i64(args, TABLE))
    rows, room, done = i64(i64(args, HEADER), i64(args, ROWS)), i64(args, SLOT_BYTES) // (4 * stride), i64(line, 0)
    me = i64(args, ME)
    for first in range(0, rows, room):
        count = min(room, rows - first)
        if i64(args, X) != 0:
            _copy(i64(args, X) + 4 * first * i64(args, X_STRIDE), i64(args, X_STRIDE), _slot(args, done, me), stride,
                  spans[2 * me + 1] - spans[2 * me], count, thread, n_threads)
        store_release(line, done + 1)
        if not _wait(args, i64(args, LINES), i64(args, N_LINES), done + 1):
            return
        for member in range(i64(args, COUNT)):
            begin = spans[2 * member]
            _copy(_slot(args, done, member), stride, i64(args, Y) + 4 * (first * i64(args, Y_STRIDE) + begin),
                  i64(args, Y_STRIDE), spans[2 * member + 1] - begin, count, thread, n_threads)
        done += 1
