"""Default number of threads: the physical cores that this process may run on, within its container's quota.

Also the number of spins before a waiting thread yields, which is smaller if threads outnumber the cores.
"""

import math
import os
from pathlib import Path

# A few dozen cores saturate the memory bandwidth, which limits decoding; more cores only wait for each other.
MOST = 32
SPINS, SCARCE = 2000, 16  # spins before a waiting thread yields its core (about 40 us); if threads outnumber cores


def default_threads() -> int:
    """Physical cores in the affinity mask, at most the cgroup's CPU quota and MOST; at least 1."""
    cores = _physical(_allowed())
    quota = _quota()
    return max(1, min(cores, MOST if quota is None else math.ceil(quota), MOST))


def patience(threads: int) -> int:
    """Spins before one of `threads` threads yields its core, which the awaited thread may need."""
    return SPINS if threads <= default_threads() else SCARCE


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical(cpus: set[int]) -> int:
    """Physical cores among these logical CPUs: hardware threads of a core count once, if the topology is known."""
    cores = set()
    for cpu in cpus:
        siblings = _text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.add(siblings or str(cpu))
    return len(cores)


def _quota() -> float | None:
    """CPU quota of the control group, in CPUs; None without a limit (cgroup v2, then v1)."""
    quota, _, period = _text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if not period:
        quota = _text(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
        period = _text(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
