"""Holding back Ctrl-C where it would do harm."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """An interrupt that comes while the block runs takes effect after it.

    The compiler calls back into Python, where an exception gets lost and leaves half a kernel behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts go to the main thread
        return
    came = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came and callable(before):
            before(*came[0])
