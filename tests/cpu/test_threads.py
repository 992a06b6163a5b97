"""Worker threads: every kernel runs once and in order, no wake-up is lost, and nothing hangs."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from numflow.cpu.runtime import cores, threads_kernels
from numflow.cpu.runtime.access import i64, i64_ptr
from numflow.cpu.runtime.atomic import fetch_add, pause
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.runtime.threads import ARRIVED, CROWDED, FEWER, STATE, WORKER_BYTES, WORKERS, Threads, shared_threads
from numflow.errors import DeviceError
from tests.waiting import until

REPEAT = 50


@kernel
def _count(args, thread, n_threads):
    """args[thread] += 1"""
    i64_ptr(args)[thread] += 1


@kernel
def _check_sum(args, thread, n_threads):
    """After a barrier all threads must have counted as often as this one; args[15] counts violations."""
    mine = i64(args, thread)
    for other in range(n_threads):
        if i64(args, other) != mine:
            fetch_add(args + 15 * 8, 1)


@kernel
def _spin(args, thread, n_threads):
    """Spin for about 100 ms."""
    for _ in range(i64(args, 0)):
        pause()


def _table(*calls, barriers=None):
    table = np.zeros((len(calls), 3), np.int64)
    for row, (fn, args) in zip(table, calls, strict=True):
        row[:] = fn.address, args.ctypes.data, 1
    if barriers is not None:
        table[:, 2] = barriers
    return table


@pytest.fixture(params=[1, 2, 3])
def pool(request):
    made = Threads(request.param)
    yield made
    made.close()


def test_every_thread_walks_every_row_with_barriers_between(pool):
    memory = np.zeros(16, np.int64)
    table = _table(*[(_count, memory), (_check_sum, memory)] * REPEAT)
    for run in range(1, 6):
        pool.run(table, len(table))
        assert memory[:pool.n_threads].tolist() == [run * REPEAT] * pool.n_threads
    assert memory[15] == 0


def test_a_run_may_end_anywhere_in_the_table(pool):
    memory = np.zeros(16, np.int64)
    table = _table(*[(_count, memory)] * 4, barriers=[0, 0, 1, 0])
    for rows in (0, 1, 2, 3, 4):
        memory[:] = 0
        pool.run(table, rows)
        assert memory[:pool.n_threads].tolist() == [rows] * pool.n_threads


def test_sleeping_workers_wake(pool):
    memory = np.zeros(16, np.int64)
    table = _table((_count, memory))
    for run in range(1, 8):
        pool.run(table, 1)
        assert memory[:pool.n_threads].tolist() == [run] * pool.n_threads
        time.sleep(0.02 if run % 2 else 0.002)


@kernel
def _last_is_late(args, thread, n_threads):
    """The last thread takes about 20 ms."""
    if thread == n_threads - 1:
        for _ in range(i64(args, 0)):
            pause()


def test_where_other_programs_want_the_cores_threads_sleep_in_barriers(pool):
    memory, rounds = np.zeros(16, np.int64), np.array([500_000])
    pool._control[CROWDED // 8] = 1 << 62
    before = time.thread_time()
    pool.run(_table(*[(_count, memory), (_last_is_late, rounds), (_check_sum, memory)] * 10), 30)
    used = time.thread_time() - before
    assert memory[:pool.n_threads].tolist() == [10] * pool.n_threads and memory[15] == 0
    if pool.n_threads > 1:
        assert used < 0.05  # about 200 ms


def test_a_run_has_fewer_threads_where_they_would_sleep():
    pool, memory, rounds = Threads(4), np.zeros(16, np.int64), np.array([500_000])
    table = _table((_count, memory), (_last_is_late, rounds), (_check_sum, memory))
    pool._control[CROWDED // 8] = 1 << 62
    for _ in range(2):
        pool.run(table, 3, fewer=True)
    pool._control[FEWER // 8 + 1] = 1 << 62  # no new try with all threads
    pool.run(table, 3, fewer=True)
    assert memory[:4].tolist() == [3, 3, 3, 2] and memory[15] == 0
    pool.run(table, 1)
    assert memory[:4].tolist() == [4, 4, 4, 3]
    pool.close()


def test_how_many_threads_are_tried_when():
    fewer, begin = np.zeros(4, np.int64), 1_000_000

    def run(slept, took=1000):
        threads = threads_kernels._choose.py_func(fewer, 8, begin)
        threads_kernels._learn.py_func(fewer, 8, threads, slept * threads * took // 100, begin, begin + took)
        return threads

    assert [run(24), run(26), run(24), run(26), run(26), run(26), run(26), run(0), run(50)] == [8] * 5 + [6, 4, 3, 3]
    assert [run(50), run(50), run(50)] == [2, 1, 1]
    for wait in (400_000, 800_000, 1_600_000, 3_000_000, 3_000_000):  # a new try with all threads, in vain
        begin = fewer[1]
        assert [run(50), run(50)] == [8, 1] and fewer[1] == begin + 1000 + wait
    begin = fewer[1]
    assert [run(10), run(10), run(50), run(50), run(10)] == [8] * 4 + [6] and fewer[2] == 200_000


def test_idle_workers_use_no_time():
    pool = Threads(2)
    memory = np.zeros(16, np.int64)
    pool.run(_table((_count, memory)), 1)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    pool.close()


def test_runs_from_several_python_threads_take_turns(pool):
    memory = np.zeros(16, np.int64)
    table = _table(*[(_count, memory), (_check_sum, memory)] * 5)

    def work():
        for _ in range(20):
            pool.run(table, len(table))

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert memory[:pool.n_threads].tolist() == [300] * pool.n_threads
    assert memory[15] == 0


def test_an_interrupt_leaves_the_threads_usable(pool):
    memory, spins = np.zeros(16, np.int64), np.array([2_000_000])
    slow, quick = _table((_spin, spins)), _table((_count, memory))
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            pool.run(slow, 1)
    timer.join()
    pool.run(quick, 1)
    assert memory[:pool.n_threads].tolist() == [1] * pool.n_threads


def test_closed_threads_and_forked_children_are_refused(monkeypatch):
    pool = Threads(2)
    table = _table((_count, np.zeros(16, np.int64)))
    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="before a fork"):
        patch.setattr(os, "getpid", lambda: -1)
        pool.run(table, 1)
    pool.close()
    pool.close()
    with pytest.raises(DeviceError, match="closed"):
        pool.run(table, 1)
    with pytest.raises(DeviceError, match="at least 1"):
        Threads(0)


def _wait_until_asleep(pool: Threads) -> None:
    """Wait until the workers sleep; on a busy machine they rarely get a core."""
    states = pool._control[(WORKERS + WORKER_BYTES + STATE) // 8::WORKER_BYTES // 8][:pool.n_threads - 1]
    until(lambda: (states == threads_kernels.ASLEEP).all(), "workers that sleep")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_workers_keep_off_the_core_of_the_caller():
    pool = Threads(2)
    (worker,) = (t for t in threading.enumerate() if t.name == "numflow-1" and t in pool._finalizer.peek()[2][1])
    before = os.sched_getaffinity(0)
    try:
        for cpu in sorted(before)[:2]:
            os.sched_setaffinity(0, {cpu})
            _wait_until_asleep(pool)
            memory = np.zeros(16, np.int64)
            pool.run(_table((_count, memory)), 1)
            assert os.sched_getaffinity(worker.native_id) == before - {cpu}
    finally:
        os.sched_setaffinity(0, before)
        pool.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_every_core_has_its_share_of_threads_that_outnumber_them():
    before = os.sched_getaffinity(0)
    cpus, caller = sorted(before), min(before)
    pool = Threads(2 * len(cpus))
    workers = pool._finalizer.peek()[2][1]
    try:
        os.sched_setaffinity(0, {caller})
        _wait_until_asleep(pool)
        pool.run(_table((_count, np.zeros(2 * len(cpus), np.int64))), 1)
        assert [os.sched_getaffinity(worker.native_id) for worker in workers] == [{c} for c in (cpus * 2)[1:]]
    finally:
        os.sched_setaffinity(0, before)
        pool.close()


def test_each_may_walk_a_table_of_its_own():
    """Two sets of threads in one run, each with its own barriers."""
    pools, memories = [Threads(2), Threads(1)], np.zeros((2, 16), np.int64)
    tables = [_table(*[(_count, memory), (_check_sum, memory)] * REPEAT) for memory in memories]
    own = np.array([(pools[0].address, 0, 2), (pools[0].address, 1, 2), (pools[1].address, 0, 1)], np.int64)
    for run in range(1, 4):
        for pool, table, rows in zip(pools, tables, (len(tables[0]), 2), strict=True):
            pool.hold(table, rows)
        shared_threads(3).run(_table((threads_kernels.walk_group, own)), 1)
        assert memories[0, :3].tolist() == [run * REPEAT, run * REPEAT, 0] and memories[0, 15] == 0
        assert memories[1, :3].tolist() == [run, 0, 0]
    for pool in pools:
        pool.close()


def test_threads_end_with_their_owner():
    before = threading.active_count()
    pool = Threads(3)
    assert threading.active_count() == before + 2
    del pool
    assert threading.active_count() == before


def test_threads_of_one_size_are_shared():
    one, other = shared_threads(2), shared_threads(2)
    assert one is other
    assert shared_threads(3) is not one


def test_the_interpreter_exits_while_workers_spin_or_sleep():
    code = """
        import sys, time
        import numpy as np
        from numflow.cpu.runtime.threads import Threads
        pool = Threads(3)
        pool.run(np.zeros((1, 3), np.int64), 0)
        time.sleep(float(sys.argv[1]))
        raise SystemExit(7)
    """
    for wait in ("0", "0.1"):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), wait], timeout=30, check=False)
        assert done.returncode == 7


@pytest.mark.parametrize(("quota", "siblings", "expected"), [
    ("max 100000", "", 8), ("200000 100000", "", 2), ("250000 100000", "", 3), ("50000 100000", "", 1),
    ("", "pairs", 4)])
def test_default_threads(monkeypatch, quota, siblings, expected):
    def text(path):
        if "topology" in str(path):
            cpu = int(path.parts[-3].removeprefix("cpu"))
            return f"{cpu % 4},{cpu % 4 + 4}" if siblings else ""
        return quota if path.name == "cpu.max" else ""

    monkeypatch.setattr(cores, "_allowed", lambda: set(range(8)))
    monkeypatch.setattr(cores, "_text", text)
    assert cores.default_threads() == expected


@kernel
def arrive(args, thread, n_threads):
    control, memory = i64(args, 0), i64_ptr(i64(args, 1))
    memory[thread] = threads_kernels._barrier(control, thread, n_threads, (0, 0), memory[thread])


def test_spinning_is_given_up_where_cores_are_scarce():
    """A thread that has spun at a barrier in vain spins less at the next barrier."""
    pool, patience = Threads(2), np.full(2, threads_kernels.SPINS, np.int64)
    control, args = pool._control, np.array([pool.address, patience.ctypes.data], np.int64)
    arrive.prepare()
    for expected in (threads_kernels.SPINS // 4, threads_kernels.SPINS // 16):
        waiting = threading.Thread(target=arrive, args=(args.ctypes.data, 1, 2))
        waiting.start()
        while control[ARRIVED // 8] % 2 == 0:
            time.sleep(0.01)
        time.sleep(0.1)  # longer than a thread spins
        arrive(args.ctypes.data, 0, 2)
        waiting.join()
        assert patience.tolist() == [threads_kernels.SPINS, expected]
    patience[0] = 16
    arrive(args.ctypes.data, 0, 1)  # a single thread does not wait
    assert patience[0] == 16
    pool.close()
