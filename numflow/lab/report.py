"""What an experiment writes: report.md by program, results.json with the recipe, figures."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numflow.distribution import install
from numflow.engine.measure.bench import host
from numflow.errors import DeviceError


class Lab:
    """Handed to an experiment's `run(lab)`: settings in, paragraphs, tables, figures and results out.

    quick: toy sizes wanted. options: the experiment's OPTIONS with what the user set.
    """

    def __init__(self, name: str, title: str, quick: bool, folder: Path, options: Mapping[str, Any]):
        self.name, self.title, self.quick, self.folder, self.options = name, title, quick, folder, dict(options)
        self.results: dict[str, Any] = {}
        self._body: list[str] = []
        self._begin, self._started = time.perf_counter(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, line: str) -> None:
        """Progress, for whoever waits."""
        print(line, file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Time since the experiment began."""
        return time.perf_counter() - self._begin

    def heading(self, text: str) -> None:
        self._body += [f"## {text}", ""]

    def text(self, paragraph: str) -> None:
        self._body += [paragraph.strip(), ""]

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A table whose columns line up in the text file too; floats with three significant digits."""
        cells = [list(map(_cell, row)) for row in rows]
        widths = [max(len(h), *(len(row[i]) for row in cells), 3) if cells else max(len(h), 3)
                  for i, h in enumerate(headers)]
        self._body.append("| " + " | ".join(h.ljust(w) for h, w in zip(headers, widths, strict=True)) + " |")
        self._body.append("|" + "|".join("-" * (w + 2) for w in widths) + "|")
        for row in cells:
            self._body.append("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |")
        self._body.append("")

    def figure(self, figure: Any, name: str, caption: str) -> None:
        """Save a matplotlib figure as NAME.png and show it in the report."""
        figure.savefig(self.folder / f"{name}.png", dpi=120, bbox_inches="tight")
        self._body += [f"![{caption}]({name}.png)", "", f"*{caption}*", ""]

    def pyplot(self):
        """matplotlib.pyplot without a window.

        Raises:
            DeviceError: matplotlib is not installed.
        """
        return pyplot()

    def write(self) -> None:
        """report.md and results.json; called by the harness when the experiment is done."""
        recipe = self._recipe()
        (self.folder / "results.json").write_text(
            json.dumps({"experiment": self.name, "recipe": recipe, "results": self.results}, indent=1) + "\n")
        host = recipe["host"]
        versions = ", ".join(f"{name} {host[name]}" for name in ("numflow", "numba", "llvmlite", "numpy") if host[name])
        head = [f"# {self.title}", "",
                f"Written by `{recipe['command']}` on {recipe['started']} in {recipe['seconds']:.0f} s"
                f"{' (quick: toy sizes, figures mean nothing)' if self.quick else ''}.",
                f"{host['cpu']}, {host['cores']} cores, {host['system']}; Python {host['python']}, {versions}.", ""]
        (self.folder / "report.md").write_text("\n".join([*head, *self._body]).rstrip() + "\n", encoding="utf-8")

    def _recipe(self) -> dict[str, Any]:
        words = ["numflow", "experiment", self.name, *(["--quick"] if self.quick else [])]
        options = {key: _portable(value) for key, value in self.options.items()}
        return {"command": shlex.join(words), "options": options, "started": self._started,
                "seconds": round(self.seconds, 1), "commit": _commit(),
                "host": host()}


def pyplot():
    """matplotlib.pyplot without a window.

    Raises:
        DeviceError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise DeviceError(f"experiments draw with matplotlib: {install('report')}") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _portable(value: Any) -> Any:
    """An option as others can read it: of files and folders of this machine, the last part of their paths."""
    if not isinstance(value, str):
        return value
    return ",".join(Path(part).name if Path(part).is_absolute() else part for part in value.split(","))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def _commit() -> str | None:
    """The source tree's commit, with "+" if files differ from it; None outside one."""
    def git(*words: str) -> str | None:
        try:
            run = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    head = git("rev-parse", "--short", "HEAD")
    return None if head is None else head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
