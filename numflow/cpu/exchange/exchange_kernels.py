"""Kernels of collectives of devices (exchange.py)."""

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
    """Wait until all of `count` lines have reached `rounds`; False if the run is aborted.

    A waiting thread yields its core after some spins: the awaited thread may need it. If other programs compete for the
    core, it sleeps for short times instead, since a yield would wait for them.
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
    """Copy a thread's share of rows of `width` elements of 4 bytes; strides in elements."""
    vectors = (width + 15) // 16
    begin, end = share(rows * vectors, thread, n_threads)
    for item in range(begin, end):
        t, column = item // vectors, item % vectors * 16
        value = load_part(source + 4 * (t * source_stride + column), width - column)
        store_part(target + 4 * (t * target_stride + column), value, width - column)


@inline
def _row_elements(args):
    """Row stride of a slot in elements."""
    return (i64(args, GROUP.width) + 15) // 16 * 16


@kernel
def nothing(args, thread, n_threads):
    """Placeholder of a step that Python does, between two walks over the table."""
    return


@kernel
def send(args, thread, n_threads):
    line, stride, ring = i64(args, PAIR.my_line) + LINE * thread, _row_elements(args), i64(args, PAIR.ring)
    rows, slot_rows = i64(i64(args, PAIR.header), i64(args, PAIR.rows)), i64(args, PAIR.slot_bytes) // (4 * stride)
    done = i64(line, 0)
    for first in range(0, rows, slot_rows):
        if not _wait(args, i64(args, PAIR.their_line), i64(args, PAIR.their_count), done - ring + 1):
            return
        slot = i64(args, PAIR.slots) + done % ring * i64(args, PAIR.slot_bytes)
        _copy(i64(args, PAIR.x) + 4 * first * i64(args, PAIR.x_stride), i64(args, PAIR.x_stride), slot, stride,
              i64(args, PAIR.width), min(slot_rows, rows - first), thread, n_threads)
        done += 1
        store_release(line, done)


@kernel
def receive(args, thread, n_threads):
    line, stride, ring = i64(args, PAIR.my_line) + LINE * thread, _row_elements(args), i64(args, PAIR.ring)
    rows, slot_rows = i64(i64(args, PAIR.header), i64(args, PAIR.rows)), i64(args, PAIR.slot_bytes) // (4 * stride)
    done = i64(line, 0)
    for first in range(0, rows, slot_rows):
        if not _wait(args, i64(args, PAIR.their_line), i64(args, PAIR.their_count), done + 1):
            return
        slot = i64(args, PAIR.slots) + done % ring * i64(args, PAIR.slot_bytes)
        _copy(slot, stride, i64(args, PAIR.y) + 4 * first * i64(args, PAIR.y_stride), i64(args, PAIR.y_stride),
              i64(args, PAIR.width), min(slot_rows, rows - first), thread, n_threads)
        done += 1
        store_release(line, done)


@inline
def _slot(args, done, member):
    """Address of a member's slot of a round."""
    return i64(args, GROUP.slots) + (done % 2 * i64(args, GROUP.members) + member) * i64(args, GROUP.slot_bytes)


@kernel
def all_reduce(args, thread, n_threads):
    line, stride, width = i64(args, GROUP.my_line) + LINE * thread, _row_elements(args), i64(args, GROUP.width)
    rows, slot_rows = i64(i64(args, GROUP.header), i64(args, GROUP.rows)), i64(args, GROUP.slot_bytes) // (4 * stride)
    done = i64(line, 0)
    adds, n_adds = i64_ptr(i64(args, GROUP.table)), i64(args, GROUP.count)
    for first in range(0, rows, slot_rows):
        count = min(slot_rows, rows - first)
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
            offset = 4 * (t * stride + column)
            total = load_part(_slot(args, done, adds[0]) + offset, width - column)
            for i in range(1, n_adds):
                total = total + load_part(_slot(args, done, adds[i]) + offset, width - column)
            y = i64(args, GROUP.y) + 4 * ((first + t) * i64(args, GROUP.y_stride) + column)
            store_part(y, total, width - column)
        done += 1


@kernel
def all_gather(args, thread, n_threads):
    line, stride, spans = i64(args, GROUP.my_line) + LINE * thread, _row_elements(args), i64_ptr(i64(args, GROUP.table))
    rows, slot_rows = i64(i64(args, GROUP.header), i64(args, GROUP.rows)), i64(args, GROUP.slot_bytes) // (4 * stride)
    done = i64(line, 0)
    me = i64(args, GROUP.me)
    for first in range(0, rows, slot_rows):
        count = min(slot_rows, rows - first)
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
