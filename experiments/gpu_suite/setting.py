"""The common setting of all parts of the suite: the device, the time limit, and the results."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from numflow.cuda.compiler.compat import driver, versions
from numflow.cuda.device.device import Device, Launch, Simulated
from numflow.cuda.device.gpu import open_device
from numflow.errors import DeviceFaultError

LIMIT_S = 480.0     # time limit of a part, checked between two results
KILLED_S = 570.0    # time after which a part that no longer checks is killed
MOST_FAILURES = 8   # successive failures of a part before it gives up
INTERRUPTED = "interrupted"
OVER = "time is up"  # first words of the error of a part that continues where it stopped when it is run again
FAULT = "fault"     # first word of the error of a part whose process had a GPU fault
FAULT_CODE = 70     # exit status of such a process


class GivenUp(Exception):
    """A part in which every attempt fails."""


class Faulted(Exception):
    """A fault of the GPU: this process can no longer use it, and another process continues after the current row."""


@dataclass
class Setting:
    """A run of the suite.

    quick: toy sizes. rows: results of the current part, one dict each. tried: attempts that have ended, with success or
    not, in this process or in an earlier one that a fault of the GPU ended.

    The part's file is rewritten with every row, so that results survive the end of the process.
    """

    simulator: bool
    quick: bool
    out: Path
    part: str = ""
    rows: list[dict] = field(default_factory=list)
    tried: list[dict] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    limit_s: float = LIMIT_S
    _name: str = "none"
    _failures: int = 0

    def device(self, index: int = 0, careful: bool = False) -> Device:
        """A new device: a stream of the GPU, or a simulated one. careful: a fault names its kernel."""
        made = Simulated(index) if self.simulator else open_device("gpu", careful=careful)
        self._name = made.name
        return made

    @property
    def is_over(self) -> bool:
        """Whether the part has used up its time."""
        return self.left_s < 0

    @property
    def left_s(self) -> float:
        """Seconds that remain for the part."""
        return self.begun + self.limit_s - time.perf_counter()

    @property
    def path(self) -> Path:
        """Path of the part's file."""
        return self.out / f"{self.part}.json"

    def add(self, **row) -> None:
        """Store a result and print it."""
        self.rows.append(row)
        if "failed" not in row:
            self._failures = 0
        print("  " + "  ".join(f"{k} {_short(v)}" for k, v in row.items()), flush=True)
        self.write(INTERRUPTED)

    def was_tried(self, **about) -> bool:
        """Whether this attempt has ended already, in this process or in an earlier one that met a fault."""
        return _plain(about) in self.tried

    @contextmanager
    def attempt(self, **about) -> Iterator[None]:
        """A context for something that may fail: a failure becomes a row, and the part continues, unless nothing
        succeeds.

        Raises:
            GivenUp: several failures in a row, as when the GPU cannot run anything.
            Faulted: a fault of the GPU, after which this process cannot use it.
        """
        try:
            yield
            self.tried.append(_plain(about))
        except (GivenUp, Faulted):
            raise
        except Exception as problem:
            self.tried.append(_plain(about))
            self.add(**about, failed=f"{type(problem).__name__}: {problem}"[:300])
            if isinstance(problem, DeviceFaultError):
                raise Faulted(str(problem)) from problem
            self._failures += not isinstance(problem, ImportError)  # others may not need that package
            if self._failures >= MOST_FAILURES:
                raise GivenUp(f"{MOST_FAILURES} failures in a row, the last: {problem}") from problem

    def run(self, part: Callable[["Setting"], None]) -> bool:
        """Run the part, after the row at which a fault or the time limit ended it before, and write its file.

        Returns whether another process should continue, because this one met a fault of the GPU.
        """
        error, before = "", kept(self.path)
        if before and before["error"].startswith((FAULT, OVER)) and self._is_like(before):
            self.rows, self.tried = before["rows"], before["tried"]
        self.write(INTERRUPTED)
        try:
            part(self)
            error = OVER if self.is_over else ""
        except Faulted as problem:
            error = f"{FAULT}: {problem}"
        except Exception as problem:  # the other parts are to run all the same
            error = f"{type(problem).__name__}: {problem}"
            print(f"  FAILED {error}", flush=True)
        self.write(error)
        return error.startswith(FAULT)

    def write(self, error: str) -> None:
        """Write the part's file with the results so far."""
        facts = {"part": self.part, "device": self._name, "simulator": self.simulator, "quick": self.quick,
                 "driver": driver_version(self.simulator), "seconds": round(time.perf_counter() - self.begun, 1),
                 "complete": not (error or self.is_over or any("failed" in row for row in self.rows)),
                 "error": error, "python": platform.python_version(), "versions": _versions(), "rows": self.rows,
                 "tried": self.tried}
        keep(self.path, facts)

    def is_done(self) -> bool:
        """Whether the part has a result of these sizes that no fault cut short."""
        facts = kept(self.path)
        return bool(facts) and self._is_like(facts) and not facts["error"]

    def _is_like(self, facts: dict) -> bool:
        return (facts["simulator"], facts["quick"]) == (self.simulator, self.quick)

    def ended(self, how: str) -> None:
        """Note that the part's process has ended before the part was finished."""
        print(f"  FAILED {how}", flush=True)
        facts = kept(self.path)
        if facts and facts["error"] == INTERRUPTED:
            keep(self.path, {**facts, "complete": False, "error": how})
        else:
            self.write(how)


def keep(path: Path, facts: dict) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(facts, indent=1))
    whole.replace(path)


def kept(path: Path) -> dict:
    """The content of a file of `keep`, {} if there is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _plain(about: dict) -> dict:
    """A value as JSON can store it."""
    return json.loads(json.dumps(about))


_VERSIONS: dict[str, str] = {}


def _versions() -> dict[str, str]:
    if not _VERSIONS:
        _VERSIONS.update(versions())
    return _VERSIONS


def driver_version(simulator: bool) -> str:
    """The CUDA version of the GPU's driver, "13.0" for 13000; "none" without a driver."""
    try:
        found = 0 if simulator else int(driver().cuDriverGetVersion()[1])
    except Exception:  # the results matter more than this line
        found = 0
    return f"{found // 1000}.{found % 1000 // 10}" if found else "none"


def seconds(device: Device, work: Callable[[], None], repeats: int = 10) -> float:
    """Median time of `work`, which only puts work into the device's stream."""
    work()
    device.synchronize()
    times = []
    for _ in range(1 if isinstance(device, Simulated) else repeats):
        if isinstance(device, Simulated):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        else:
            begin = device.mark(timing=True)
            work()
            times.append(device.milliseconds(begin, device.mark(timing=True)) / 1e3)
    return statistics.median(times)


def each(device: Device, works: list[Launch], copies: int = 20) -> float:
    """Seconds of one execution of the launches, replayed `copies` times as one CUDA graph if the device has graphs."""
    if isinstance(device, Simulated):
        return seconds(device, lambda: [device.launch(work) for work in works])
    graph = device.record(works * copies)
    try:
        return seconds(device, lambda: device.replay(graph)) / copies
    finally:
        device.drop(graph)


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)
