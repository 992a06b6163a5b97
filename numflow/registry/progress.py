"""How a download tells what it does: silently, or with a bar on standard error."""

import sys


class Silent:
    """Says nothing; also the interface of all reporters."""

    def note(self, text: str) -> None:
        """A line worth reading."""

    def stage(self, text: str, total: int) -> None:
        """The next stage starts; it will handle `total` bytes (0: unknown)."""

    def done(self, bytes: int) -> None:
        """So many bytes of this stage are done, counted from its start."""

    def close(self) -> None:
        """No more stages."""


class Lines(Silent):
    """One line per stage, for logs and pipes."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def stage(self, text: str, total: int) -> None:
        self.note(f"{text} ({megabytes(total)})" if total else text)


class Bar(Silent):
    """A rich progress bar per stage, bytes and speed."""

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

    def close(self) -> None:
        self._progress.stop()


def reporter(progress: bool = True) -> Silent:
    """The reporter for this process: none, a bar on a terminal, plain lines elsewhere."""
    if not progress:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()


def megabytes(count: int) -> str:
    """A size for people, in units of 1000: "98.4 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
