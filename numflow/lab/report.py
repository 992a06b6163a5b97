"""Output of an experiment: report.md, results.json with the recipe, and figures."""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numflow.engine.measure.host import host, load_average
from numflow.errors import RequestError
from numflow.lab import style
from numflow.lab.plotting import pyplot
from numflow.lab.recipe import command, commit, described

REJECTED = "rejected"  # sub-folder for a report with implausible results


class Lab:
    """The argument of an experiment's `run(lab)`: it has the settings, and collects text, tables, figures and results.

    quick: use toy sizes. options: the experiment's OPTIONS with the user's values. given: the user's values, as text.
    recipes: recipe by part, for parts of a report that were measured by different commands.
    """

    def __init__(self, name: str, title: str, quick: bool, folder: Path, options: Mapping[str, Any],
                 given: Mapping[str, str] | None = None, dirty: bool = False):
        self.name, self.title, self.quick, self.folder, self.options = name, title, quick, folder, dict(options)
        self.results: dict[str, Any] = {}
        self.recipes: dict[str, dict[str, Any]] = {}
        self.past: dict[str, Any] | None = None
        self.doubts: list[str] = []
        self._command = command(name, quick, given or {}, dirty)
        self._body: list[str] = []
        self.shown: dict[str, Any] = {}  # name -> matplotlib figure
        self.captions: dict[str, tuple[str, str]] = {}  # name -> (finding, caption)
        self._figures: dict[str, bytes] = {}
        self._load, self._commit = load_average(), commit()
        folder.mkdir(parents=True, exist_ok=True)  # also for intermediate files of the experiment
        self._begin, self._started = time.perf_counter(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())

    def say(self, line: str) -> None:
        """Print a line of progress on standard error."""
        print(line, file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the experiment."""
        return time.perf_counter() - self._begin

    def heading(self, text: str) -> None:
        self._body += [f"## {text}", ""]

    def text(self, paragraph: str) -> None:
        self._body += [paragraph.strip(), ""]

    def claim(self, sentence: str, holds: bool, otherwise: str = "") -> None:
        """Add a sentence on the results if `holds`; else add `otherwise`, or "Not so in this run" with the sentence."""
        self.text(sentence if holds else otherwise or f"Not so in this run: {sentence}")

    def doubt(self, holds: bool, problem: str) -> None:
        """Record an implausible result, which means a wrong measurement, unless `holds`. A report with doubts is not
        published: it is written to the folder REJECTED."""
        if not holds:
            self.doubts.append(problem)

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add a table with aligned columns; floats have three significant digits."""
        cells = [list(map(_cell, row)) for row in rows]
        widths = [max(len(h), *(len(row[i]) for row in cells), 3) if cells else max(len(h), 3)
                  for i, h in enumerate(headers)]
        self._body.append("| " + " | ".join(h.ljust(w) for h, w in zip(headers, widths, strict=True)) + " |")
        self._body.append("|" + "|".join("-" * (w + 2) for w in widths) + "|")
        for row in cells:
            self._body.append("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |")
        self._body.append("")

    def figure(self, figure: Any, name: str, finding: str, *facts: str, caption: str = "", part: str = "",
               **margins: float) -> None:
        """Add a figure of `style.figure` to the report, as NAME.svg and NAME.png.

        finding: the title, a sentence on what the figure shows. facts: model, threads, "simulated". caption: text below
        the figure; default: the finding. part: part of the report whose recipe is named. margins: of `style.layout`.
        """
        recipe = self.recipes.get(part) or self.recipe()
        self.shown[name], self.captions[name] = figure, (finding, caption)
        style.title(figure, finding, style.source(recipe, *facts, "quick, toy sizes" * self.quick), **margins)
        self._figures |= {name + suffix: data for suffix, data in style.drawn(figure).items()}
        self._body += [*shown(name, finding, caption), ""]

    def pyplot(self):
        """matplotlib.pyplot without a window.

        Raises:
            DeviceError: matplotlib is not installed.
        """
        return pyplot()

    def recipe(self) -> dict[str, Any]:
        """Command, options, commit, machine, and load before and now. When redrawing (redraw.py): the recipe of the
        stored results."""
        return self.past or {
            "command": self._command, "options": {key: described(value) for key, value in self.options.items()},
            "started": self._started, "seconds": round(self.seconds, 1), "commit": self._commit,
            "load_before": self._load, "load_after": load_average(), "host": host()}

    def before(self) -> dict[str, Any]:
        """results.json of the existing report; {} if there is none."""
        try:
            return json.loads((self.folder / "results.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def measured(self, part: str) -> None:
        """Record that a part of the report was measured in this run."""
        self.recipes[part] = self.recipe()

    def kept(self, part: str) -> None:
        """Record that a part of the report is from an earlier run, with the recipe of that run."""
        before = self.before()
        found = before.get("parts", {}).get(part) or before.get("recipe")
        if found:
            self.recipes[part] = found

    def write(self) -> None:
        """Write report.md, results.json and the figures; called by the harness at the end of the experiment.

        Raises:
            RequestError: there are doubts, and the run was not quick; the report is in the folder REJECTED.
        """
        rejected = bool(self.doubts) and not self.quick
        folder, recipe = self.folder / REJECTED if rejected else self.folder, self.recipe()
        folder.mkdir(parents=True, exist_ok=True)
        whole = {"experiment": self.name, "recipe": recipe, "results": self.results}
        whole |= ({"parts": self.recipes} if self.recipes else {}) | ({"doubts": self.doubts} if self.doubts else {})
        (folder / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
        lines = [*self._head(recipe), *self._body]
        (folder / "report.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
        self.write_figures(folder)
        if rejected:
            raise RequestError(f"implausible results: {'; '.join(self.doubts)}; measure again on an idle machine. The "
                               f"report is in {folder}; the published report is unchanged")

    def write_figures(self, folder: Path) -> None:
        """Write only the figures, as files of a folder."""
        for name, data in self._figures.items():
            (folder / name).write_bytes(data)

    def _head(self, recipe: Mapping[str, Any]) -> list[str]:
        machine = recipe["host"]
        versions = ", ".join(f"{name} {machine[name]}" for name in ("numflow", "numba", "llvmlite", "numpy")
                             if machine[name])
        tree = "no commit" if recipe["commit"] is None else f"commit {recipe['commit']}"
        changed = " (the tree had changes that are in no commit)" if (recipe["commit"] or "").endswith("+") else ""
        caches = ", ".join(f"{name} {size}" for name, size in machine["caches"].items())
        facts = [_processor(machine), f"caches {caches}" if caches else "",
                 " ".join(machine["flags"]), machine["system"]]
        head = [f"# {self.title}", "",
                f"Written by `{recipe['command']}` on {recipe['started']} in {recipe['seconds']:.0f} s, {tree}{changed}"
                f"{' (quick: toy sizes, figures mean nothing)' if self.quick else ''}.",
                f"{'; '.join(filter(None, facts))}; Python {machine['python']}, {versions}."]
        if recipe["load_before"] is not None:
            head.append(f"Load average {recipe['load_before']:.1f} before, {recipe['load_after']:.1f} after.")
        older = {part: part_recipe for part, part_recipe in self.recipes.items()
                 if part_recipe["started"] < recipe["started"]}
        head += [kept(part, part_recipe, machine) for part, part_recipe in older.items()]
        if self.doubts:
            head += ["", f"**Implausible results: {'; '.join(self.doubts)}.**"]
        return [*head, ""]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)


def kept(part: str, recipe: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """A line on a part from an earlier run, with its machine if that differs from the report's."""
    processor, flags = _processor(recipe["host"]), " ".join(recipe["host"].get("flags", ()))
    where = f", on {processor}{'; ' * bool(flags)}{flags}"
    return (f"Kept from before: {part}, by `{recipe['command']}` on {recipe['started']}, commit "
            f"{recipe['commit'] or 'not recorded'}{where if processor != _processor(machine) else ''}.")


def _processor(machine: Mapping[str, Any]) -> str:
    family = f", family {machine['family']}" if machine.get("family") else ""
    return f"{machine['cpu']}{family}, {machine['cores']} cores"


def shown(name: str, finding: str, caption: str = "") -> list[str]:
    """Markdown lines that show a figure."""
    return [f"![{finding}]({name}.png)", "", f"*{caption or finding}*"]
