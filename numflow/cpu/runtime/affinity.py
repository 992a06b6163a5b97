"""CPU affinity of threads (Linux only).

The scheduler tends to wake a thread on the core of the thread that wakes it. If the other cores are not quite idle, a
worker then shares the caller's core. The two alternate within microseconds, so neither is migrated: half the speed for
seconds. So a woken worker may run on every core except the caller's. If threads outnumber the cores, as devices of a
plan may, threads are pinned to cores in turn: else three of four may stay on one core for seconds.
"""

import os

from numflow.cpu.runtime.symbols import LINUX

MASK_BYTES = 128  # bytes of a mask of 1024 CPUs


def allowed_mask() -> bytes:
    """Mask of the CPUs that this process may use, MASK_BYTES bytes; zeros if unknown, or if there are too many CPUs."""
    cpus = os.sched_getaffinity(0) if LINUX else {0}
    usable = LINUX and max(cpus) < 8 * MASK_BYTES
    return sum(1 << cpu for cpu in cpus if usable).to_bytes(MASK_BYTES, "little")
