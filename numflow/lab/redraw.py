"""Redraw the figures of a published report from its results.json. Nothing is measured, and of the report's text only
the captions of figures change."""

import json
import re
import time
from pathlib import Path

from numflow.errors import ModelNotFoundError, RequestError
from numflow.lab.harness import experiments_dir, list_experiments, load
from numflow.lab.report import Lab, shown

_LINE = "Figures drawn anew from results.json on "  # in published reports


def redraw_experiment(name: str, out: Path | None = None) -> Path:
    """Redraw the figures of reports/NAME with `redraw(lab)` of experiments/NAME/run.py; return their folder.

    out: another folder for the figures; then report.md is not changed.

    Raises:
        ModelNotFoundError: there is no such experiment, or no report of it.
        RequestError: the experiment has no `redraw`, or the drawn figures are not those of the report.
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
    """A Lab with the results of a report and its redrawn figures. Raises as `redraw_experiment`."""
    experiments = list_experiments()
    folder = experiments_dir().parent / "reports" / name
    try:
        found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except OSError:
        raise ModelNotFoundError(f"no report of {name!r} in {folder}") from None
    redraw = getattr(load(name), "redraw", None)
    if redraw is None:
        raise RequestError(f"the figures of experiment {name!r} cannot be drawn from its results alone")
    lab = Lab(name, experiments[name], False, folder, found["recipe"]["options"])
    lab.past, lab.results, lab.recipes = found["recipe"], found["results"], found.get("parts", {})
    redraw(lab)
    return lab


def with_figures(report: str, lab: Lab, name: str) -> str:
    """The text of a report with the new titles and captions of figures, and a line about the redrawing."""
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
