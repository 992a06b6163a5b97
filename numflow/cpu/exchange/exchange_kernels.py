"""Kernels of what devices do together (exchange.py)."""

import numba

from numflow.cpu.exchange.exchange import GROUP, PAIR
from numflow.cpu.exchange.world import CROWDED
from numflow.cpu.memory.buffers import LINE
from numflow.cpu.runtime.access import i64, i64_ptr, share
from numflow.cpu.runtime.atomic import give_way, load_acquire, nap, pause, store_release
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.float32 import load_part, store_part
from numflow.cpu.simd.vector import inline


@numba.njit
def _wait(args, lines, count, rounds):
    """Until all of `count` lines have come to `rounds`; False if the run is broken off.

    A waiting thread yields its core after a while: the one it waits for may need it. Where other programs want the core
    too, it takes naps instead, as it would wait for them.
    """
    abort, patience = i64(args, GROUP.abort), i64(args, GROUP.patience)
    for line in range(count):
        spins = 0
        while load_acquire(lines + LINE * line) < rounds:
            if spins < patience:
                spins += 1
                pause()
            elif load_acquire(abort) != 0:
                return False
            elif give_way(abort + CROWDED):
                nap()
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
    return (i64(args, GROUP.width) + 15) // 16 * 16


@kernel
def nothing(args, thread, n_threads):
    """Stands for a step that Python does, between two walks over the table."""
    return


@kernel
def send(args, thread, n_threads):
    line, stride, ring = i64(args, PAIR.my_line) + LINE * thread, _row_elements(args), i64(args, PAIR.ring)
    rows, room = i64(i64(args, PAIR.header), i64(args, PAIR.rows)), i64(args, PAIR.slot_bytes) // (4 * stride)
    done = i64(line, 0)
    for first in range(0, rows, room):
        if not _wait(args, i64(args, PAIR.their_line), i64(args, PAIR.their_count), done - ring + 1):
            return
        slot = i64(args, PAIR.slots) + done % ring * i64(args, PAIR.slot_bytes)
        _copy(i64(args, PAIR.x) + 4 * first * i64(args, PAIR.x_stride), i64(args, PAIR.x_stride), slot, stride,
              i64(args, PAIR.width), min(room, rows - first), thread, n_threads)
        done += 1
        store_release(line, done)


@kernel
def receive(args, thread, n_threads):
    line, stride, ring = i64(args, PAIR.my_line) + LINE * thread, _row_elements(args), i64(args, PAIR.ring)
    rows, room = i64(i64(args, PAIR.header), i64(args, PAIR.rows)), i64(args, PAIR.slot_bytes) // (4 * stride)
    done = i64(line, 0)
    for first in range(0, rows, room):
        if not _wait(args, i64(args, PAIR.their_line), i64(args, PAIR.their_count), done + 1):
            return
        slot = i64(args, PAIR.slots) + done % ring * i64(args, PAIR.slot_bytes)
        _copy(slot, stride, i64(args, PAIR.y) + 4 * first * i64(args, PAIR.y_stride), i64(args, PAIR.y_stride),
              i64(args, PAIR.width), min(room, rows - first), thread, n_threads)
        done += 1
        store_release(line, done)


@inline
def _slot(args, done, member):
    """A member's slot of a round."""
    return i64(args, GROUP.slots) + (done % 2 * i64(args, GROUP.members) + member) * i64(args, GROUP.slot_bytes)


@kernel
def all_reduce(args, thread, n_threads):
    line, stride, width = i64(args, GROUP.my_line) + LINE * thread, _row_elements(args), i64(args, GROUP.width)
    rows, room = i64(i64(args, GROUP.header), i64(args, GROUP.rows)), i64(args, GROUP.slot_bytes) // (4 * stride)
    done = i64(line, 0)
    adds, n_adds = i64_ptr(i64(args, GROUP.table)), i64(args, GROUP.count)
    for first in range(0, rows, room):
        count = min(room, rows - first)
        if i64(args, GROUP.x) != 0:
            _copy(i64(args, GROUP.x) + 4 * first * i64(args, GROUP.x_stride), i64(args, GROUP.x_stride),
                  _slot(args, done, i64(args, GROUP.me)), stride, width, count, thread, n_threads)
        store_release(line, done + 1)
        if not _wait(args, i64(args, GROUP.lines), i64(args, GROUP.n_lines), done + 1):
            return
        vectors = stride // 16
        begin, end = share(count * vectors, thread, n_threads)
        for item in range(begin, end):
            t, column = item // vectors, item % vectors * 16
            at = 4 * (t * stride + column)
            total = load_part(_slot(args, done, adds[0]) + at, width - column)
            for i in range(1, n_adds):
                total = total + load_part(_slot(args, done, adds[i]) + at, width - column)
            y = i64(args, GROUP.y) + 4 * ((first + t) * i64(args, GROUP.y_stride) + column)
            store_part(y, total, width - column)
        done += 1


@kernel
def all_gather(args, thread, n_threads):
    line, stride, spans = i64(args, GROUP.my_line) + LINE * thread, _row_elements(args), i64_ptr(i64(args, GROUP.table))
    rows, room = i64(i64(args, GROUP.header), i64(args, GROUP.rows)), i64(args, GROUP.slot_bytes) // (4 * stride)
    done = i64(line, 0)
    me = i64(args, GROUP.me)
    for first in range(0, rows, room):
        count = min(room, rows - first)
        if i64(args, GROUP.x) != 0:
            _copy(i64(args, GROUP.x) + 4 * first * i64(args, GROUP.x_stride), i64(args, GROUP.x_stride),
                  _slot(args, done, me), stride, spans[2 * me + 1] - spans[2 * me], count, thread, n_threads)
        store_release(line, done + 1)
        if not _wait(args, i64(args, GROUP.lines), i64(args, GROUP.n_lines), done + 1):
            return
        for member in range(i64(args, GROUP.count)):
            begin = spans[2 * member]
            slot, y = _slot(args, done, member), i64(args, GROUP.y) + 4 * (first * i64(args, GROUP.y_stride) + begin)
            _copy(slot, stride, y, i64(args, GROUP.y_stride), spans[2 * member + 1] - begin, count, thread, n_threads)
        done += 1
