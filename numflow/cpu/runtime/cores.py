"""Default number of threads: the physical cores that this process may run on, within its container's quota.

Beside it the number of rounds that threads spin, which is smaller if there are more threads than that.
"""

import math
import os
from pathlib import Path

# Weights are read at the speed of memory, which a few dozen cores saturate; more only wait for each other.
MOST = 32
SPINS, SCARCE = 2000, 16  # before a waiting thread yields its core, about 40 us; where threads outnumber cores


def default_threads() -> int:
    """Physical cores in the affinity mask, at most the cgroup's CPU quota and MOST; at least 1."""
    cores = _physical(_allowed())
    quota = _quota()
    return max(1, min(cores, MOST if quota is None else math.ceil(quota), MOST))


def patience(threads: int) -> int:
    """Rounds that one of so many threads spins before it yields its core, which the awaited thread may need."""
    return SPINS if threads <= default_threads() else SCARCE


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical(cpus: set[int]) -> int:
    """Cores among these logical CPUs: hardware threads of one core count once, where the system says so."""
    cores = set()
    for cpu in cpus:
        siblings = _text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.add(siblings or str(cpu))
    return len(cores)


def _quota() -> float | None:
    """CPUs' worth of time the control group grants, None without a limit (cgroup v2, then v1)."""
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
