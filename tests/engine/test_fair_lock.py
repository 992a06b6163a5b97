"""Fair lock."""

import threading

from numflow.engine.runner.fair_lock import FairLock
from tests.waiting import until


def test_who_waits_comes_before_who_lets_go_and_takes_it_again():
    lock, taken = FairLock(), []

    def visit():
        with lock:
            taken.append("visitor")

    for _ in range(20):
        visitor = threading.Thread(target=visit)
        with lock:
            visitor.start()
            until(lambda: not lock._door.acquire(blocking=False) or lock._door.release(), "a visitor in the door")
        with lock:
            taken.append("holder")
        visitor.join()
    assert taken == ["visitor", "holder"] * 20


def test_it_is_taken_again_by_its_owner_and_not_by_others():
    lock, found = FairLock(), []
    with lock, lock:
        other = threading.Thread(target=lambda: found.append(lock.acquire(timeout=0.01)))
        other.start()
        other.join()
    assert found == [False]
    other = threading.Thread(target=lambda: (found.append(lock.acquire(timeout=1)), lock.release()))
    other.start()
    other.join()
    assert found == [False, True]
