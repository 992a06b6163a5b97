"""On which core a thread runs (Linux; elsewhere nothing happens).

A scheduler likes to wake a thread on the core of whoever wakes it. Where the other cores are not quite idle, a worker
then shares the caller's core, and because the two take turns within microseconds neither is ever moved: half the speed
for seconds. So a worker that wakes may run on every core but the caller's.
"""

import os

from numflow.cpu.symbols import LINUX

MASK_BYTES = 128  # of a set of 1024 CPUs


def allowed_mask(n_threads: int) -> bytes:
    """The CPUs this process may use as MASK_BYTES bytes; zeros where there are fewer than threads, or it is unknown."""
    cpus = os.sched_getaffinity(0) if LINUX else set()
    usable = n_threads <= len(cpus) and max(cpus) < 8 * MASK_BYTES
    return sum(1 << cpu for cpu in cpus if usable).to_bytes(MASK_BYTES, "little")
