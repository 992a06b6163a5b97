"""What parts of the suite share: the device, a clock, the time that is left, and where results go."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from numflow.cuda.compat import driver, versions
from numflow.cuda.device import Device, Launch, Simulated, open_device

LIMIT_S = 600.0  # of a part


@dataclass
class Setting:
    """A run of the suite. quick: toy sizes. rows: what the part that is running has found, one dict each."""

    simulator: bool
    quick: bool
    out: Path
    rows: list[dict] = field(default_factory=list)
    begun: float = 0.0

    def device(self, index: int = 0) -> Device:
        """A device of its own: a stream of the GPU, or a simulated one."""
        return Simulated(index) if self.simulator else open_device("gpu")

    @property
    def is_over(self) -> bool:
        """Whether the part has used its time."""
        return time.perf_counter() - self.begun > LIMIT_S

    def add(self, **row) -> None:
        """Keep a result and show it."""
        self.rows.append(row)
        print("  " + "  ".join(f"{k} {_short(v)}" for k, v in row.items()), flush=True)

    def run(self, name: str, part: Callable[["Setting"], None], again: bool) -> None:
        """Run a part and write its file, unless it is there."""
        path = self.out / f"{name}.json"
        if path.exists() and not again:
            print(f"{name}: {path} is there")
            return
        print(f"{name}:", flush=True)
        self.rows, self.begun = [], time.perf_counter()
        error = ""
        try:
            part(self)
        except Exception as problem:  # the other parts are to run all the same
            error = f"{type(problem).__name__}: {problem}"
            print(f"  FAILED {error}", flush=True)
        facts = {"part": name, "device": self.device().name, "simulator": self.simulator, "quick": self.quick,
                 "driver": driver_version(self.simulator),
                 "seconds": round(time.perf_counter() - self.begun, 1), "complete": not (error or self.is_over),
                 "error": error, "python": platform.python_version(), "versions": versions(), "rows": self.rows}
        self.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=1))


def driver_version(simulator: bool) -> str:
    """What the GPU's driver calls itself, "13.0" for 13000."""
    if simulator:
        return "none"
    found = int(driver().cuDriverGetVersion()[1])
    return f"{found // 1000}.{found % 1000 // 10}"


def seconds(device: Device, work: Callable[[], None], repeats: int = 10) -> float:
    """Median time of `work`, which only puts things into the device's queue."""
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
    """Seconds of the launches once, replayed `copies` times as one graph where there are graphs."""
    if isinstance(device, Simulated):
        return seconds(device, lambda: [device.launch(work) for work in works])
    graph = device.record(works * copies)
    try:
        return seconds(device, lambda: device.replay(graph)) / copies
    finally:
        device.drop(graph)


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)
