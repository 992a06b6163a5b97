"""On which core a thread runs (Linux; elsewhere nothing happens).

A scheduler likes to wake a thread on the core of whoever wakes it. Where the other cores are not quite idle, a worker
then shares the caller's core, and because the two take turns within microseconds neither is ever moved: half the speed
for seconds. So a worker that wakes may run on every core but the caller's. Where threads outnumber the cores, as
devices of a plan may, each core gets its share of them: else three of four may stay on one core for seconds.
"""

import os

from numflow.cpu.runtime.symbols import LINUX

MASK_BYTES = 128  # of a set of 1024 CPUs


def allowed_mask() -> bytes:
    """The CPUs this process may use as MASK_BYTES bytes; zeros where that is unknown, or there are more than bits."""
    cpus = os.sched_getaffinity(0) if LINUX else {0}
    usable = LINUX and max(cpus) < 8 * MASK_BYTES
    return sum(1 << cpu for cpu in cpus if usable).to_bytes(MASK_BYTES, "little")
