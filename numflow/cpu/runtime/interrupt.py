"""Deferring Ctrl-C during code that an exception would break."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Defer an interrupt during the block until its end.

    The compiler calls back into Python, where an exception would be lost and leave half a kernel behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts go to the main thread
        return
    received = []
    before = signal.signal(signal.SIGINT, lambda *args: received.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if received and callable(before):
            before(*received[0])
