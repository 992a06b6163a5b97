"""Worker threads that run a table of kernels in lockstep, outside the GIL.

The calling thread is thread 0. The workers wait for it in three stages: they spin, then yield, then sleep on a lock. A
thread that waits in a barrier spins, then yields. If other programs compete for the core, they keep a yielded core for
milliseconds, while a sleeping thread gets its core back as soon as it is woken. So waiting threads then sleep instead
of yielding, and a run that allows any number of threads uses fewer of them while they would sleep much of the time.
A run is one call from Python. A row of the table is followed by a barrier if its third column is 1. The threads share
one array of int64, the control block, whose fields have a cache line each.

No wake-up is lost. A worker that goes to sleep first announces it (exchange) and then checks once more for a new run.
The caller first publishes the run (exchange) and then checks who sleeps. So one of the two always sees the other.
"""

import ctypes
import os
import threading
import weakref

import numpy as np

from numflow.cpu.memory.buffers import LINE, aligned
from numflow.cpu.runtime.affinity import MASK_BYTES, allowed_mask
from numflow.cpu.runtime.cores import patience
from numflow.cpu.runtime.kernel import Code
from numflow.errors import DeviceError

_CODE = Code("numflow.cpu.runtime.threads_kernels")
_RUN, _RUN_FEWER, _STOP, _SERVE = (_CODE.kernel(name) for name in ("run", "run_fewer", "stop", "serve"))

_python = ctypes.pythonapi
_python.PyThread_allocate_lock.restype = ctypes.c_void_p
_python.PyThread_acquire_lock.argtypes = [ctypes.c_void_p, ctypes.c_int]

# Byte offsets of the control block's fields.
RUN = 0 * LINE         # newest run: FIRST_RUN * its number + its number of threads
TABLE = 1 * LINE       # address of the run's rows: kernel, args, barrier flag
ROWS = 2 * LINE
ARRIVED = 3 * LINE     # total number of arrivals of threads at barriers
RELEASED = 4 * LINE    # total number of completed barriers
STOP = 5 * LINE        # 1: workers return
CALLER = 6 * LINE      # CPU of thread 0 when it woke workers
ALLOWED = 7 * LINE     # mask of the allowed CPUs, two lines
PATIENCE = 9 * LINE    # most spins before a thread yields its core
SLEEPERS = 10 * LINE   # number of threads that sleep in a barrier
CROWDED = 11 * LINE    # time in microseconds until which other programs are assumed to compete for the cores
BEGUN = 12 * LINE      # ARRIVED and RELEASED before the newest run
SLEPT = 13 * LINE      # microseconds that threads have slept in barriers of the newest run
FEWER = 14 * LINE      # of runs that may use fewer threads: their number of threads (0: all), the time of the next try
                       # with all threads, the pause before it, and whether the last try with all threads was in vain
WORKERS = 15 * LINE    # for each thread: STATE and LOCK between runs, STATE and LOCK in barriers, then a CPU mask
FIRST_RUN = 1 << 16
STATE, LOCK, BARRIER_STATE, BARRIER_LOCK, MASK, WORKER_BYTES = 0, 8, 16, 24, LINE, LINE + MASK_BYTES


def _new_lock() -> int:
    """Address of a CPython lock, acquired. The lock works without the GIL and is never freed (32 bytes)."""
    lock = _python.PyThread_allocate_lock()
    if not lock:
        raise MemoryError("the system has no lock left for a worker thread")
    _python.PyThread_acquire_lock(lock, 1)
    return lock


def _work(control: np.ndarray, thread: int, n_threads: int) -> None:
    """Body of a worker thread; it keeps the control block alive."""
    _SERVE(control.ctypes.data, thread, n_threads)


def _end(control: np.ndarray, workers: list[threading.Thread]) -> None:
    _STOP(control.ctypes.data, 0, len(workers) + 1)
    for worker in workers:
        worker.join(timeout=5.0)


class Threads:
    """`n_threads` threads, the caller included, that run tables of kernels. Sleeping workers cost nothing."""

    def __init__(self, n_threads: int):
        if n_threads < 1:
            raise DeviceError(f"threads should be at least 1, is {n_threads}")
        self.n_threads, self._pid, self._lock = n_threads, os.getpid(), threading.Lock()
        self._control = aligned((WORKERS + n_threads * WORKER_BYTES) // 8, np.int64)
        self._control[ALLOWED // 8:PATIENCE // 8] = np.frombuffer(allowed_mask(), np.int64)
        self._control[PATIENCE // 8] = patience(n_threads)
        for thread in range(n_threads):
            for lock in (LOCK, BARRIER_LOCK):
                self._control[(WORKERS + thread * WORKER_BYTES + lock) // 8] = _new_lock()
        self.address = self._control.ctypes.data  # of the control block
        workers = [threading.Thread(target=_work, args=(self._control, thread, n_threads), daemon=True,
                                    name=f"numflow-{thread}") for thread in range(1, n_threads)]
        for fn in (_RUN, _RUN_FEWER, _STOP, _SERVE):
            fn.prepare()
        for worker in workers:
            worker.start()
        self._finalizer = weakref.finalize(self, _end, self._control, workers)

    def run(self, table: np.ndarray, rows: int, fewer: bool = False) -> None:
        """Run the first `rows` rows of `table`, int64 [n, 3]: kernel address, args address, barrier after it (0 or 1).

        The last row always ends with a barrier: all work is done on return. An interrupt of the caller (Ctrl-C) takes
        effect after the run. fewer: the run may use fewer threads, if not all of them get a core.

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
            self.hold(table, rows)
            (_RUN_FEWER if fewer else _RUN)(self.address, 0, self.n_threads)

    def hold(self, table: np.ndarray, rows: int) -> None:
        """Set the table of the next run; `run` does it itself, exchange/lockstep.py does it for its own threads."""
        control = self._control
        control[TABLE // 8], control[ROWS // 8] = table.__array_interface__["data"][0], rows
        control[BEGUN // 8], control[BEGUN // 8 + 1] = control[ARRIVED // 8], control[RELEASED // 8]

    def close(self) -> None:
        """Stop the workers. Also happens when the object is collected and at the interpreter's exit."""
        self._finalizer()


_shared: weakref.WeakValueDictionary[int, Threads] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_threads(n_threads: int) -> Threads:
    """The process's Threads of this size, shared by programs that take turns."""
    with _shared_lock:
        threads = _shared.get(n_threads)
        if threads is None or threads._pid != os.getpid():
            threads = _shared[n_threads] = Threads(n_threads)
        return threads
