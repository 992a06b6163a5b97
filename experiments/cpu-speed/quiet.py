"""Disturbance of a round by other processes: the memory bandwidth before and after, and the cores that others use."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OTHERS, SLOWER = 0.15, 0.9  # cores that others may take; the part of its best bandwidth that memory has to have
_BUSY = (1, 2, 3, 6, 7, 8)  # of /proc/stat's columns: user, nice, system, interrupts, soft ones, stolen


@dataclass(frozen=True)
class Round:
    """others: cores that other processes took. before, after: GB/s that threads read; best: of the run so far."""

    others: float
    before: float
    after: float
    best: float

    @property
    def disturbed(self) -> str:
        """Reason that the round counts as disturbed; "" if it does not."""
        if self.others > OTHERS:
            return f"other processes took {self.others:.2f} cores"
        slow = min(self.before, self.after)
        return f"memory was at {slow / self.best:.0%} of its best" if slow < SLOWER * self.best else ""


class Watch:
    """Runs rounds and tells which were disturbed.

    read: GB/s of memory with so many threads, measured in some 50 ms.
    """

    def __init__(self, read: Callable[[int], float], busy: Callable[[], float] | None = None,
                 own: Callable[[], float] | None = None, clock: Callable[[], float] = time.perf_counter):
        self._read, self._busy, self._own, self._clock = read, busy or busy_seconds, own or own_seconds, clock
        self._best: dict[int, float] = {}

    def round(self, threads: int, run: Callable[[], dict[str, float]]) -> tuple[dict[str, float], Round]:
        """Results of a round by name, and its disturbance."""
        before = self._read(threads)
        begin, busy, own = self._clock(), self._busy(), self._own()
        results = run()
        others = (self._busy() - busy - (self._own() - own)) / max(self._clock() - begin, 1e-9)
        after = self._read(threads)
        best = self._best[threads] = max(before, after, self._best.get(threads, 0.0))
        return results, Round(max(0.0, others), before, after, best)


def busy_seconds(root: Path = Path("/proc")) -> float:
    """Seconds that all processors have worked or were stolen; 0 where the system does not say."""
    try:
        fields = (root / "stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    return sum(int(fields[at]) for at in _BUSY if at < len(fields)) / os.sysconf("SC_CLK_TCK")


def own_seconds(root: Path = Path("/proc")) -> float:
    """CPU seconds of this process and its children, including children that have ended; 0 if the system does not report
    them."""
    parents, used = {}, {}
    for folder in root.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)], used[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours, me = 0, os.getpid()
    for process in used:
        above: int | None = process
        while above is not None and above != me:
            above = parents.get(above)
        ours += used[process] if above == me else 0
    return ours / os.sysconf("SC_CLK_TCK")


def memory_speed(threads: int) -> float:
    """GB/s that so many threads read, in some 50 ms."""
    from numflow.cpu.measure.roofline import measure_limits

    return measure_limits(threads, 1 << 28, 3).read_gb_s
