"""Figures of a published report, drawn anew from its results.json: nothing is measured, no table and no sentence of the
report changes but those at the figures."""

import json
import re
import time
from pathlib import Path

from numflow.errors import ModelNotFoundError, RequestError
from numflow.lab.harness import experiments_dir, list_experiments, load
from numflow.lab.report import Lab, shown

_LINE = "Figures drawn anew from results.json on "


def redraw_experiment(name: str, out: Path | None = None) -> Path:
    """Draw the figures of reports/NAME again, by experiments/NAME/run.py's `redraw(lab)`. Returns their folder.

    out: another folder for the figures; report.md stays as it is.

    Raises:
        ModelNotFoundError: no such experiment, or no report of it.
        RequestError: the experiment cannot; the report has figures that were not drawn, or lacks some that were.
        DeviceError: matplotlib is not installed.
    """
    lab = drawn_again(name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        lab.write_figures(out)
        return out
    page = lab.folder / "report.md"
    page.write_text(with_figures(page.read_text(encoding="utf-8"), lab, name), encoding="utf-8")
    lab.write_figures(lab.folder)
    return lab.folder


def drawn_again(name: str) -> Lab:
    """The report's results, drawn. As `redraw_experiment`."""
    known = list_experiments()
    folder = experiments_dir().parent / "reports" / name
    try:
        found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except OSError:
        raise ModelNotFoundError(f"no report of {name!r} in {folder}") from None
    redraw = getattr(load(name), "redraw", None)
    if redraw is None:
        raise RequestError(f"experiment {name!r} has no figures that could be drawn from its results alone")
    lab = Lab(name, known[name], False, folder, found["recipe"]["options"])
    lab.past, lab.results, lab.recipes = found["recipe"], found["results"], found.get("parts", {})
    redraw(lab)
    return lab


def with_figures(report: str, lab: Lab, name: str) -> str:
    """A report whose figures have the titles of today, and a line that says so."""
    there = set(re.findall(r"^!\[[^\]]*\]\((\S+)\.png\)$", report, re.M))
    if there != set(lab.shown):
        raise RequestError(f"the report of {name!r} shows {', '.join(sorted(there))}; drawn were "
                           f"{', '.join(sorted(lab.shown))}: run the experiment itself")
    for figure, (finding, caption) in lab.captions.items():
        lines = "\n".join(shown(figure, finding, caption))
        report = re.sub(rf"^!\[[^\]]*\]\({re.escape(figure)}\.png\)\n\n\*[^\n]*\*$", lines.replace("\\", r"\\"), report,
                        flags=re.M)
    line = f"{_LINE}{time.strftime('%Y-%m-%d', time.gmtime())} by `numflow experiment {name} --redraw`."
    report = re.sub(rf"^{re.escape(_LINE)}.*\n", "", report, flags=re.M)
    head, rest = report.split("\n\n", 2)[:2], report.split("\n\n", 2)[2]
    return "\n\n".join([head[0], f"{head[1]}\n{line}", rest])
