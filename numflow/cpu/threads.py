"""Worker threads that walk a table of kernels in step, outside the GIL.

The calling thread is thread 0; the others wait for it in three stages: they spin, then yield, then sleep on a lock.
A run is one call from Python, whoever sleeps; each row of the table ends in a barrier (where its third column says
so). All that the threads share is one array of int64, the control block: each field has a cache line of its own.

A wake-up cannot be lost. A worker that goes to sleep first says so (exchange) and then looks once more for a new run;
the caller first publishes the run (exchange) and then looks who sleeps. One of the two sees the other.
"""

import os
import threading
import weakref

import numba
import numpy as np

from numflow.cpu.affinity import MASK_BYTES, allowed_mask, avoid_cpu, current_cpu
from numflow.cpu.atomic import (
    acquire,
    call_kernel,
    cpu_yield,
    exchange,
    fetch_add,
    load_acquire,
    new_lock,
    pause,
    release,
    store_release,
)
from numflow.cpu.kernel import i64, i64_ptr, kernel
from numflow.cpu.memory import LINE, aligned
from numflow.errors import DeviceError

# Byte offsets of the control block's fields.
RUN = 0 * LINE         # number of the newest run; a worker that has done fewer has work
TABLE = 1 * LINE       # address of that run's rows: kernel, args, barrier after it?
ROWS = 2 * LINE
ARRIVED = 3 * LINE     # threads that came to a barrier, ever
RELEASED = 4 * LINE    # barriers that all threads have reached, ever
STOP = 5 * LINE        # workers return
CALLER = 6 * LINE      # CPU that thread 0 was on when it woke workers
ALLOWED = 7 * LINE     # mask of the CPUs there are, two lines
WORKERS = 9 * LINE     # for each thread: STATE and LOCK, then a mask
STATE, LOCK, MASK, WORKER_BYTES = 0, 8, LINE, LINE + MASK_BYTES
AWAKE, ASLEEP = 0, 1

SPINS = 2000       # about 40 us before a waiting thread begins to yield its core
YIELDS = 4000      # about 2 ms, on idle cores, before a worker goes to sleep


@numba.njit
def _barrier(control, n_threads, patience):
    """Every thread arrives before any leaves. Spins up to `patience` times, then yields; returns the next patience.

    Where cores are scarce, what spins keeps the core from the thread it waits for: so patience falls fast.
    """
    arrived = fetch_add(control + ARRIVED, 1) + 1
    goal = (arrived + n_threads - 1) // n_threads
    if arrived == goal * n_threads:
        store_release(control + RELEASED, goal)
        return patience
    for _ in range(patience):
        if load_acquire(control + RELEASED) >= goal:
            return min(2 * patience, SPINS)
        pause()
    while load_acquire(control + RELEASED) < goal:
        cpu_yield()
    return max(patience // 4, 16)


@numba.njit
def _walk(control, thread, n_threads):
    table, rows, patience = i64_ptr(i64(control + TABLE, 0)), i64(control + ROWS, 0), SPINS
    for row in range(rows):
        call_kernel(table[3 * row], table[3 * row + 1], thread, n_threads)
        if n_threads > 1 and (table[3 * row + 2] != 0 or row == rows - 1):
            patience = _barrier(control, n_threads, patience)


@numba.njit
def _wake_all(control, n_threads):
    for worker in range(1, n_threads):
        line = control + WORKERS + worker * WORKER_BYTES
        if exchange(line + STATE, AWAKE) == ASLEEP:
            release(i64(line + LOCK, 0))


@kernel
def _run(control, thread, n_threads):
    """Publish the run that TABLE and ROWS describe and walk it as thread 0."""
    store_release(control + CALLER, current_cpu())
    fetch_add(control + RUN, 1)
    _wake_all(control, n_threads)
    _walk(control, 0, n_threads)


@kernel
def _stop(control, thread, n_threads):
    """Make all workers return."""
    exchange(control + STOP, 1)
    _wake_all(control, n_threads)


@kernel
def _serve(control, thread, n_threads):
    """A worker's life: walk every new run, sleep after a long wait, return when told to stop."""
    line = control + WORKERS + thread * WORKER_BYTES
    done, waited, awake = 0, 0, False
    while load_acquire(control + STOP) == 0:
        if load_acquire(control + RUN) != done:
            if not awake:
                avoid_cpu(load_acquire(control + CALLER), control + ALLOWED, line + MASK)
            done, awake = done + 1, True
            _walk(control, thread, n_threads)
            waited = 0
        elif waited < SPINS:
            waited += 1
            pause()
        elif waited < SPINS + YIELDS:
            waited += 1
            cpu_yield()
        else:
            exchange(line + STATE, ASLEEP)
            nothing_new = fetch_add(control + RUN, 0) == done and fetch_add(control + STOP, 0) == 0
            if nothing_new or exchange(line + STATE, AWAKE) == AWAKE:  # or the caller is waking this worker already
                acquire(i64(line + LOCK, 0))
            waited, awake = 0, False


def _work(control: np.ndarray, thread: int, n_threads: int) -> None:
    """A worker thread; it keeps the control block alive."""
    _serve(control.ctypes.data, thread, n_threads)


def _end(control: np.ndarray, workers: list[threading.Thread]) -> None:
    _stop(control.ctypes.data, 0, len(workers) + 1)
    for worker in workers:
        worker.join(timeout=5.0)


class Threads:
    """`n_threads` threads, the caller included, that run tables of kernels. Sleeping workers cost nothing."""

    def __init__(self, n_threads: int):
        if n_threads < 1:
            raise DeviceError(f"threads should be at least 1, is {n_threads}")
        self.n_threads, self._pid, self._lock = n_threads, os.getpid(), threading.Lock()
        self._control = aligned((WORKERS + n_threads * WORKER_BYTES) // 8, np.int64)
        self._control[ALLOWED // 8:WORKERS // 8] = np.frombuffer(allowed_mask(n_threads), np.int64)
        for thread in range(1, n_threads):
            self._control[(WORKERS + thread * WORKER_BYTES + LOCK) // 8] = new_lock()
        self._address = self._control.ctypes.data
        workers = [threading.Thread(target=_work, args=(self._control, thread, n_threads), daemon=True,
                                    name=f"numflow-{thread}") for thread in range(1, n_threads)]
        for fn in (_run, _stop, _serve):
            fn.prepare()
        for worker in workers:
            worker.start()
        self._finalizer = weakref.finalize(self, _end, self._control, workers)

    def run(self, table: np.ndarray, rows: int) -> None:
        """Walk the first `rows` rows of `table`, int64 [n, 3]: kernel address, args address, barrier after it (0 or 1).

        The last one always ends in a barrier: all work is done when this returns. An interrupt of the caller (Ctrl-C)
        takes effect after the run.

        Raises:
            DeviceError: this is a forked child, which has no workers, or the threads were closed.
        """
        if os.getpid() != self._pid:
            raise DeviceError("a program made before a fork cannot run in the child: make it there")
        if not self._finalizer.alive:
            raise DeviceError("this program was closed")
        if rows == 0:
            return
        with self._lock:
            self._control[TABLE // 8], self._control[ROWS // 8] = table.ctypes.data, rows
            _run(self._address, 0, self.n_threads)

    def close(self) -> None:
        """Stop the workers. Also happens when the object is collected and at the interpreter's exit."""
        self._finalizer()


_shared: weakref.WeakValueDictionary[int, Threads] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_threads(n_threads: int) -> Threads:
    """The process's Threads of this size: programs that take turns use the same workers."""
    with _shared_lock:
        found = _shared.get(n_threads)
        if found is None or found._pid != os.getpid():
            found = _shared[n_threads] = Threads(n_threads)
        return found
