"""Loop of the worker threads outside the GIL (threads.py)."""

import numba

from numflow.cpu.runtime.access import i64, i64_ptr
from numflow.cpu.runtime.affinity_kernels import choose_cpu, current_cpu
from numflow.cpu.runtime.atomic import (
    acquire,
    call_kernel,
    exchange,
    fetch_add,
    give_way,
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
    BEGUN,
    CALLER,
    CROWDED,
    FEWER,
    FIRST_RUN,
    LOCK,
    MASK,
    PATIENCE,
    RELEASED,
    ROWS,
    RUN,
    SLEEPERS,
    SLEPT,
    STATE,
    STOP,
    TABLE,
    WORKER_BYTES,
    WORKERS,
)

AWAKE, ASLEEP = 0, 1

YIELDS = 4000      # yields before a worker goes to sleep: about 2 ms on idle cores
SHORT_PAUSE, LONG_PAUSE = 100_000, 3_000_000  # microseconds before the next try with all threads: first, longest


@numba.njit
def _sleep(control, thread, goal):
    """Sleep until barrier `goal` is released."""
    line = control + WORKERS + thread * WORKER_BYTES
    begin = microseconds()
    while load_acquire(control + RELEASED) < goal:
        exchange(line + BARRIER_STATE, ASLEEP)
        fetch_add(control + SLEEPERS, 1)
        if fetch_add(control + RELEASED, 0) < goal or exchange(line + BARRIER_STATE, AWAKE) == AWAKE:
            acquire(i64(line + BARRIER_LOCK, 0))
        fetch_add(control + SLEEPERS, -1)
    fetch_add(control + SLEPT, microseconds() - begin)


@numba.njit
def _release(control, thread, n_threads, goal):
    """Let all threads leave barrier `goal`; wake the sleeping ones."""
    exchange(control + RELEASED, goal)
    if load_acquire(control + SLEEPERS) > 0:
        for other in range(n_threads):
            line = control + WORKERS + other * WORKER_BYTES
            if other != thread and exchange(line + BARRIER_STATE, AWAKE) == ASLEEP:
                release(i64(line + BARRIER_LOCK, 0))


@numba.njit
def _barrier(control, thread, n_threads, begun, patience):
    """Barrier: every thread arrives before any leaves. Spins up to `patience` times, then yields or sleeps.

    begun: the field BEGUN of the control block. Returns the next patience: if cores are scarce, a spinning thread keeps
    the core from the thread that it waits for, so patience falls fast.
    """
    arrived = fetch_add(control + ARRIVED, 1) + 1 - begun[0]
    barrier = (arrived + n_threads - 1) // n_threads
    goal = begun[1] + barrier
    if arrived == barrier * n_threads:
        _release(control, thread, n_threads, goal)
        return patience
    for _ in range(patience):
        if load_acquire(control + RELEASED) >= goal:
            return min(2 * patience, SPINS)
        pause()
    while load_acquire(control + RELEASED) < goal:
        if give_way(control + CROWDED):
            _sleep(control, thread, goal)
    return max(patience // 4, 16)


@numba.njit
def _walk(control, thread, n_threads):
    """Run the rows of the table as one thread."""
    table, rows, patience = i64_ptr(i64(control + TABLE, 0)), i64(control + ROWS, 0), i64(control + PATIENCE, 0)
    begun = i64(control + BEGUN, 0), i64(control + BEGUN, 1)
    for row in range(rows):
        call_kernel(table[3 * row], table[3 * row + 1], thread, n_threads)
        if n_threads > 1 and (table[3 * row + 2] != 0 or row == rows - 1):
            patience = _barrier(control, thread, n_threads, begun, patience)


@numba.njit
def _wake_all(control, n_threads):
    for worker in range(1, n_threads):
        line = control + WORKERS + worker * WORKER_BYTES
        if exchange(line + STATE, AWAKE) == ASLEEP:
            release(i64(line + LOCK, 0))


@numba.njit
def _run(control, n_threads):
    store_release(control + CALLER, current_cpu())
    store_release(control + SLEPT, 0)
    exchange(control + RUN, (i64(control + RUN, 0) // FIRST_RUN + 1) * FIRST_RUN + n_threads)
    _wake_all(control, n_threads)
    _walk(control, 0, n_threads)


@kernel
def run(control, thread, n_threads):
    """Publish the run of TABLE and ROWS, and take part in it as thread 0."""
    _run(control, n_threads)


@numba.njit
def _choose(fewer, n_threads, now):
    """Number of threads of the next run. fewer: the field FEWER; now: the time."""
    return n_threads if fewer[0] == 0 or now >= fewer[1] else fewer[0]


@numba.njit
def _learn(fewer, n_threads, threads, slept, begin, end):
    """Update the field FEWER after a run of `threads` threads that slept for `slept` microseconds in total.

    After two runs in which the threads slept for more than a quarter of the time, runs use fewer threads. All threads
    are tried again after a pause, which doubles each time that the try was in vain.
    """
    in_vain = threads > 1 and 4 * slept > threads * (end - begin)
    if threads == n_threads:
        fewer[2] = min(max(2 * fewer[2], SHORT_PAUSE), LONG_PAUSE) if in_vain else 0
        fewer[1] = end + fewer[2]
        if not in_vain:
            fewer[0] = fewer[3] = 0
        elif fewer[3] == 0:
            fewer[3] = 1
        elif fewer[0] == 0:
            fewer[0] = max(3 * threads // 4, 1)
    elif in_vain:
        fewer[0] = max(3 * threads // 4, 1)


@kernel
def run_fewer(control, thread, n_threads):
    """The same with fewer threads, if not all of them get a core."""
    fewer, begin = i64_ptr(control + FEWER), microseconds()
    threads = _choose(fewer, n_threads, begin)
    _run(control, threads)
    _learn(fewer, n_threads, threads, load_acquire(control + SLEPT), begin, microseconds())


@kernel
def walk_group(args, thread, n_threads):
    """Run a table per group of threads. args: for each thread, its control block, its index there, and the number of
    threads there."""
    _walk(i64(args, 3 * thread), i64(args, 3 * thread + 1), i64(args, 3 * thread + 2))


@kernel
def stop(control, thread, n_threads):
    """Make all workers return."""
    exchange(control + STOP, 1)
    _wake_all(control, n_threads)


@kernel
def serve(control, thread, n_threads):
    """Loop of a worker: take part in every new run, sleep after a long wait, return on STOP."""
    line = control + WORKERS + thread * WORKER_BYTES
    patience, done, waited, awake = i64(control + PATIENCE, 0), 0, 0, False
    while load_acquire(control + STOP) == 0:
        newest = load_acquire(control + RUN)
        if newest != done:
            done, threads = newest, newest % FIRST_RUN
            if thread < threads:
                if not awake:
                    choose_cpu(thread, n_threads, load_acquire(control + CALLER), control + ALLOWED, line + MASK)
                _walk(control, thread, threads)
                waited, awake = 0, True
        elif waited < patience:
            waited += 1
            pause()
        elif waited < patience + YIELDS and not give_way(control + CROWDED):
            waited += 1
        else:
            exchange(line + STATE, ASLEEP)
            nothing_new = fetch_add(control + RUN, 0) == done and fetch_add(control + STOP, 0) == 0
            if nothing_new or exchange(line + STATE, AWAKE) == AWAKE:  # else the caller is waking this worker
                acquire(i64(line + LOCK, 0))
            waited, awake = 0, False
