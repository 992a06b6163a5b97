"""Progress reports of a download: none, or a bar on standard error."""

import sys
import time
from collections.abc import Callable


class Silent:
    """Reporter without output; also the interface of all reporters."""

    def note(self, text: str) -> None:
        """Print a line."""

    def stage(self, text: str, total: int) -> None:
        """Start the next stage, of `total` bytes (0: unknown)."""

    def done(self, bytes: int) -> None:
        """Set the progress of the stage in bytes from its start."""

    def part(self, done: int, of: int, what: str) -> None:
        """Set the progress of the stage in parts. what: name of a part, such as "window"."""

    def close(self) -> None:
        """Finish: no more stages follow."""


class Lines(Silent):
    """One line per stage, and one line of progress every `pause` seconds, for logs and pipes."""

    def __init__(self, pause: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._pause, self._clock = pause, clock
        self._text, self._total, self._last = "", 0, clock()

    def note(self, text: str) -> None:
        self._last = self._clock()
        print(text, file=sys.stderr, flush=True)

    def stage(self, text: str, total: int) -> None:
        self._text, self._total = text, total
        self.note(f"{text} ({megabytes(total)})" if total else text)

    def done(self, bytes: int) -> None:
        if self._clock() - self._last >= self._pause:
            so_far = f"{bytes / self._total:.0%}" if self._total else megabytes(bytes)
            self.note(f"{self._text}: {so_far}")

    def part(self, done: int, of: int, what: str) -> None:
        if self._clock() - self._last >= self._pause:
            self.note(f"{what} {done} of {of}")


class Bar(Silent):
    """A progress bar (rich) per stage, with bytes and speed."""

    def __init__(self):
        from rich import progress
        from rich.console import Console

        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn(),
                   progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
        self._progress = progress.Progress(*columns, console=Console(stderr=True))
        self._task = None

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def stage(self, text: str, total: int) -> None:
        self._progress.start()
        self._task = self._progress.add_task(text, total=total or None)

    def done(self, bytes: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=bytes)

    def part(self, done: int, of: int, what: str) -> None:
        if done % 8 == 0 or done == of:
            self.note(f"{what} {done} of {of}")

    def close(self) -> None:
        self._progress.stop()


def reporter(progress: bool = True) -> Silent:
    """Reporter for this process: silent, a bar on a terminal, or plain lines."""
    if not progress:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()


def megabytes(count: int) -> str:
    """Size as text, in units of 1000: "98.4 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
