"""Figures of the committed reports: drawn from results.json alone, in the one style."""

import re
import shutil

import pytest

from numflow.cli.experiment import experiment
from numflow.errors import ModelNotFoundError, RequestError
from numflow.lab import redraw_experiment
from tests.lab.test_harness import folder  # noqa: F401

COUNT = '''"""Counts to three."""
from numflow.lab import style

def run(lab):
    lab.results["sum"] = 6
    lab.text("One, two, three.")
    redraw(lab)

def redraw(lab):
    made, axis = style.figure()
    axis.plot([1, 2, 3], **style.series(0))
    axis.set_xlabel("n")
    lab.figure(made, "line", f"The sum is {lab.results['sum']}", "counted")
'''


def test_a_figure_is_drawn_again(folder, monkeypatch, capsys):  # noqa: F811
    (folder / "experiments/count/run.py").write_text(COUNT)
    experiment("count")
    report = folder / "reports" / "count"
    (report / "results.json").write_text((report / "results.json").read_text().replace('"sum": 6', '"sum": 7'))
    assert redraw_experiment("count") == report
    text = (report / "report.md").read_text()
    assert "![The sum is 7](line.png)\n\n*The sum is 7*" in text and "One, two, three." in text
    assert b"The sum is 7" in (report / "line.svg").read_bytes()
    said = "Figures drawn anew from results.json on .* by `numflow experiment count --redraw`."
    assert len(re.findall(said, text)) == 1
    before = text
    redraw_experiment("count", folder / "elsewhere")
    assert (report / "report.md").read_text() == before and (folder / "elsewhere" / "line.png").is_file()
    experiment("count", redraw=True)
    assert (report / "report.md").read_text() == before


def test_what_cannot_be_drawn_is_refused(folder):  # noqa: F811
    with pytest.raises(ModelNotFoundError, match="no report of 'count'"):
        redraw_experiment("count")
    experiment("count", set_=["upto=4"])
    with pytest.raises(RequestError, match="no figures that could be drawn from its results alone"):
        redraw_experiment("count")
    with pytest.raises(RequestError, match="measures nothing"):
        experiment("count", redraw=True, quick=True)
    shutil.rmtree(folder / "reports")
    (folder / "experiments/count/run.py").write_text(COUNT)
    experiment("count")
    report = folder / "reports/count/report.md"
    report.write_text(report.read_text() + "\n![Another](other.png)\n\n*Another*\n")
    with pytest.raises(RequestError, match="shows line, other; drawn were line: run the experiment itself"):
        redraw_experiment("count")
