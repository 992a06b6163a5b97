"""Loop of the worker threads outside the GIL (threads.py)."""

import numba
import numpy as np

from numflow.cpu.runtime.access import i64, i64_ptr
from numflow.cpu.runtime.affinity_kernels import choose_cpu, current_cpu
from numflow.cpu.runtime.atomic import (
    acquire,
    call_kernel,
    cpu_yield,
    exchange,
    fetch_add,
    load_acquire,
    microseconds,
    pause,
    release,
    store_release,
)
from numflow.cpu.runtime.cores import SPINS
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.runtime.threads import (
    ALLOWED,
    ARRIVED,
    BARRIER_LOCK,
    BARRIER_STATE,
    CALLER,
    CROWDED,
    LOCK,
    MASK,
    PATIENCE,
    RELEASED,
    ROWS,
    RUN,
    SLEEPERS,
    STATE,
    STOP,
    TABLE,
    TIME,
    WORKER_BYTES,
    WORKERS,
)

AWAKE, ASLEEP = 0, 1

YIELDS = 4000      # about 2 ms, on idle cores, before a worker goes to sleep
LONG_YIELD, CROWD_LASTS = 50, 200_000  # microseconds: other programs ran meanwhile; how long that is taken to go on


@numba.njit
def _give_way(control, thread):
    """Yield the core once, unless other programs are known to want it; whether they do."""
    room = control + WORKERS + thread * WORKER_BYTES + TIME
    begin = np.int64(microseconds(room))
    if begin < load_acquire(control + CROWDED):
        return True
    cpu_yield()
    end = np.int64(microseconds(room))
    if end - begin < LONG_YIELD:
        return False
    store_release(control + CROWDED, end + CROWD_LASTS)
    return True


@numba.njit
def _sleep(control, thread, goal):
    """Sleep until barrier `goal` is released."""
    line = control + WORKERS + thread * WORKER_BYTES
    while load_acquire(control + RELEASED) < goal:
        exchange(line + BARRIER_STATE, ASLEEP)
        fetch_add(control + SLEEPERS, 1)
        if fetch_add(control + RELEASED, 0) < goal or exchange(line + BARRIER_STATE, AWAKE) == AWAKE:
            acquire(i64(line + BARRIER_LOCK, 0))
        fetch_add(control + SLEEPERS, -1)


@numba.njit
def _release(control, thread, n_threads, goal):
    """Let all threads leave barrier `goal`; wake those that sleep there."""
    exchange(control + RELEASED, goal)
    if load_acquire(control + SLEEPERS) > 0:
        for other in range(n_threads):
            line = control + WORKERS + other * WORKER_BYTES
            if other != thread and exchange(line + BARRIER_STATE, AWAKE) == ASLEEP:
                release(i64(line + BARRIER_LOCK, 0))


@numba.njit
def _barrier(control, thread, n_threads, patience):
    """Every thread arrives before any leaves. Spins up to `patience` times, then yields or sleeps; returns the next
    patience.

    Where cores are scarce, what spins keeps the core from the thread it waits for: so patience falls fast.
    """
    arrived = fetch_add(control + ARRIVED, 1) + 1
    goal = (arrived + n_threads - 1) // n_threads
    if arrived == goal * n_threads:
        _release(control, thread, n_threads, goal)
        return patience
    for _ in range(patience):
        if load_acquire(control + RELEASED) >= goal:
            return min(2 * patience, SPINS)
        pause()
    while load_acquire(control + RELEASED) < goal:
        if _give_way(control, thread):
            _sleep(control, thread, goal)
    return max(patience // 4, 16)


@numba.njit
def _walk(control, thread, n_threads):
    table, rows, patience = i64_ptr(i64(control + TABLE, 0)), i64(control + ROWS, 0), i64(control + PATIENCE, 0)
    for row in range(rows):
        call_kernel(table[3 * row], table[3 * row + 1], thread, n_threads)
        if n_threads > 1 and (table[3 * row + 2] != 0 or row == rows - 1):
            patience = _barrier(control, thread, n_threads, patience)


@numba.njit
def _wake_all(control, n_threads):
    for worker in range(1, n_threads):
        line = control + WORKERS + worker * WORKER_BYTES
        if exchange(line + STATE, AWAKE) == ASLEEP:
            release(i64(line + LOCK, 0))


@kernel
def run(control, thread, n_threads):
    """Publish the run that TABLE and ROWS describe and walk it as thread 0."""
    store_release(control + CALLER, current_cpu())
    fetch_add(control + RUN, 1)
    _wake_all(control, n_threads)
    _walk(control, 0, n_threads)


@kernel
def walk_own(args, thread, n_threads):
    """Walk a table of one's own; args has, for each thread: its control block, its number there, how many they are."""
    _walk(i64(args, 3 * thread), i64(args, 3 * thread + 1), i64(args, 3 * thread + 2))


@kernel
def stop(control, thread, n_threads):
    """Make all workers return."""
    exchange(control + STOP, 1)
    _wake_all(control, n_threads)


@kernel
def serve(control, thread, n_threads):
    """A worker's life: walk every new run, sleep after a long wait, return when told to stop."""
    line = control + WORKERS + thread * WORKER_BYTES
    patience, done, waited, awake = i64(control + PATIENCE, 0), 0, 0, False
    while load_acquire(control + STOP) == 0:
        if load_acquire(control + RUN) != done:
            if not awake:
                choose_cpu(thread, n_threads, load_acquire(control + CALLER), control + ALLOWED, line + MASK)
            done, awake = done + 1, True
            _walk(control, thread, n_threads)
            waited = 0
        elif waited < patience:
            waited += 1
            pause()
        elif waited < patience + YIELDS and not _give_way(control, thread):
            waited += 1
        else:
            exchange(line + STATE, ASLEEP)
            nothing_new = fetch_add(control + RUN, 0) == done and fetch_add(control + STOP, 0) == 0
            if nothing_new or exchange(line + STATE, AWAKE) == AWAKE:  # or the caller is waking this worker already
                acquire(i64(line + LOCK, 0))
            waited, awake = 0, False
