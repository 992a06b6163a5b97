"""A lock in turns."""

import threading
import time

from numflow.engine.turns import Turns


def test_nobody_is_kept_out():
    lock, stop, taken = Turns(), threading.Event(), []

    def hog():
        while not stop.is_set():
            with lock:
                time.sleep(0.002)

    def visit():
        for _ in range(10):
            with lock:
                taken.append(time.perf_counter())

    threads = [threading.Thread(target=hog), threading.Thread(target=visit)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    threads[1].join(10)
    stop.set()
    threads[0].join()
    assert len(taken) == 10
    assert taken[-1] - begin < 1  # a visit waits for one turn, not for the end


def test_it_is_taken_again_by_its_owner_and_not_by_others():
    lock, found = Turns(), []
    with lock, lock:
        other = threading.Thread(target=lambda: found.append(lock.acquire(timeout=0.01)))
        other.start()
        other.join()
    assert found == [False]
    other = threading.Thread(target=lambda: (found.append(lock.acquire(timeout=1)), lock.release()))
    other.start()
    other.join()
    assert found == [False, True]
