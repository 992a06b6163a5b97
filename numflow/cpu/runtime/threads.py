"""Worker threads that walk a table of kernels in step, outside the GIL.

The calling thread is thread 0; the others wait for it in three stages: they spin, then yield, then sleep on a lock.
A thread that waits in a barrier spins, then yields. Where other programs want the core, they keep it for milliseconds
once it is yielded, while a thread that sleeps gets its core back as soon as it is woken: so there all waiting is sleep,
and a run for which any number of threads will do takes fewer of them while they would sleep for much of it.
A run is one call from Python, whoever sleeps; each row of the table ends in a barrier (where its third column says
so). All that the threads share is one array of int64, the control block: each field has a cache line of its own.

A wake-up cannot be lost. A worker that goes to sleep first says so (exchange) and then looks once more for a new run;
the caller first publishes the run (exchange) and then looks who sleeps. One of the two sees the other.
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
RUN = 0 * LINE         # the newest run: which one it is, and below FIRST_RUN how many threads it has
TABLE = 1 * LINE       # address of that run's rows: kernel, args, barrier after it?
ROWS = 2 * LINE
ARRIVED = 3 * LINE     # threads that came to a barrier, ever
RELEASED = 4 * LINE    # barriers that all threads have reached, ever
STOP = 5 * LINE        # workers return
CALLER = 6 * LINE      # CPU that thread 0 was on when it woke workers
ALLOWED = 7 * LINE     # mask of the CPUs there are, two lines
PATIENCE = 9 * LINE    # how often a thread spins, at most, before it yields its core
SLEEPERS = 10 * LINE   # threads that sleep in a barrier
CROWDED = 11 * LINE    # time in microseconds, until when other programs are taken to want these cores
BEGUN = 12 * LINE      # ARRIVED and RELEASED before the newest run
SLEPT = 13 * LINE      # microseconds that threads have slept in barriers of the newest run
FEWER = 14 * LINE      # of runs that may have fewer threads: how many they have (0: all), when all are tried again, the
                       # pause till then, and whether all have been tried in vain
WORKERS = 15 * LINE    # for each thread: STATE and LOCK between runs, those of barriers, then a mask
FIRST_RUN = 1 << 16
STATE, LOCK, BARRIER_STATE, BARRIER_LOCK, MASK, WORKER_BYTES = 0, 8, 16, 24, LINE, LINE + MASK_BYTES


def _new_lock() -> int:
    """Address of one of CPython's own locks, taken; it works without the GIL. It is never freed (32 bytes)."""
    lock = _python.PyThread_allocate_lock()
    if not lock:
        raise MemoryError("the system has no lock left for a worker thread")
    _python.PyThread_acquire_lock(lock, 1)
    return lock


def _work(control: np.ndarray, thread: int, n_threads: int) -> None:
    """A worker thread; it keeps the control block alive."""
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
        """Walk the first `rows` rows of `table`, int64 [n, 3]: kernel address, args address, barrier after it (0 or 1).

        The last one always ends in a barrier: all work is done when this returns. An interrupt of the caller (Ctrl-C)
        takes effect after the run. fewer: only some of the threads may walk, those that get a core.

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
        """Set what the next run walks; `run` does so itself, others (exchange/lockstep.py) for their own threads."""
        control = self._control
        control[TABLE // 8], control[ROWS // 8] = table.__array_interface__["data"][0], rows
        control[BEGUN // 8], control[BEGUN // 8 + 1] = control[ARRIVED // 8], control[RELEASED // 8]

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
