"""Figures of the committed reports are drawn from results.json alone, in one style."""

import re
import shutil

import pytest

from numflow.cli.experiment import experiment
from numflow.errors import ModelNotFoundError, RequestError
from numflow.lab import redraw_experiment, style
from numflow.lab.redraw import drawn_again, with_figures
from tests.conftest import REPO
from tests.lab.test_harness import folder  # noqa: F401

REPORTS = sorted(path.parent.name for path in (REPO / "reports").glob("*/results.json")
                 if "\n![" in (path.parent / "report.md").read_text(encoding="utf-8"))  # a report may have only tables
SLOW = dict.fromkeys(("quant-error", "cpu-speed", "partition"), pytest.mark.slow)  # many figures
LARGEST = 60_000  # bytes of an SVG
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


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in REPORTS])
@pytest.mark.thin(8)
def test_a_report_is_drawn_from_its_results(name):
    lab, there = drawn_again(name), REPO / "reports" / name
    text = (there / "report.md").read_text(encoding="utf-8")
    with_figures(text, lab, name)
    for figure, made in lab.shown.items():
        assert style.crowded(made) == [], figure
        finding, source = (text.get_text() for text in made.texts[:2])
        assert any(character.isdigit() for character in finding) and "commit " in source, figure
        assert any(axis.get_xlabel() for axis in made.axes), figure
        assert f"![{finding}]({figure}.png)" in text, f"drawn anew: numflow experiment {name} --redraw"
        drawn = (there / f"{figure}.svg").read_bytes()
        assert finding.replace("&", "&amp;").encode() in drawn and len(drawn) < LARGEST, figure
        assert (there / f"{figure}.png").read_bytes().startswith(b"\x89PNG")


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
    with pytest.raises(RequestError, match="cannot be drawn from its results alone"):
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
