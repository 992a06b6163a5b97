import json
import sys

import pytest

from numflow.errors import DeviceError, ModelNotFoundError, RequestError
from numflow.lab import list_experiments, run_experiment

EXPERIMENT = '''"""Counts to three.

More words.
"""
OPTIONS = {"upto": 3, "label": "n"}


def run(lab):
    lab.results["sum"] = sum(range(lab.options["upto"] + 1))
    lab.heading("Sums")
    lab.table([lab.options["label"], "sum"], [[n, n * (n + 1) / 2] for n in range(2 if lab.quick else 4)])
    plt = lab.pyplot()
    figure, axis = plt.subplots()
    axis.plot([1, 2, 3])
    lab.figure(figure, "line", "A line")
    plt.close(figure)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "experiments" / "count").mkdir(parents=True)
    (tmp_path / "experiments" / "count" / "run.py").write_text(EXPERIMENT)
    monkeypatch.setenv("NUMFLOW_EXPERIMENTS", str(tmp_path / "experiments"))
    return tmp_path


def test_report_results_and_figure_are_written(folder):
    assert list_experiments() == {"count": "Counts to three."}
    out = run_experiment("count", options={"upto": "5"})
    assert out == folder / "reports" / "count"
    results = json.loads((out / "results.json").read_text())
    assert results["results"] == {"sum": 15}
    assert results["recipe"]["command"] == "numflow experiment count"
    assert results["recipe"]["options"] == {"upto": 5, "label": "n"}
    report = (out / "report.md").read_text()
    assert report.startswith("# Counts to three.\n")
    assert "| 3   | 6   |" in report
    assert "![A line](line.png)" in report
    assert (out / "line.png").read_bytes().startswith(b"\x89PNG")


def test_recipe_names_files_without_this_machines_folders(folder):
    out = run_experiment("count", options={"label": "/models/a.gguf,/models/b.gguf,c"})
    assert json.loads((out / "results.json").read_text())["recipe"]["options"]["label"] == "a.gguf,b.gguf,c"


def test_matplotlib_is_asked_for_before_anything_is_measured(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (folder / "experiments" / "count" / "run.py").write_text('"""Fails."""\ndef run(lab):\n    raise AssertionError\n')
    with pytest.raises(DeviceError, match="experiments draw with matplotlib"):
        run_experiment("count")
    assert not (folder / "reports").exists()


def test_quick_is_said_and_out_is_used(folder):
    out = run_experiment("count", quick=True, out=folder / "elsewhere")
    assert "toy sizes" in (out / "report.md").read_text()
    assert not (folder / "reports").exists()


def test_mistakes_are_clear(folder):
    with pytest.raises(ModelNotFoundError, match="did you mean 'count'"):
        run_experiment("cuont")
    with pytest.raises(RequestError, match="no option 'up_to'; did you mean 'upto'"):
        run_experiment("count", options={"up_to": "5"})
    with pytest.raises(RequestError, match="upto: expected int"):
        run_experiment("count", options={"upto": "many"})


def test_an_experiment_may_have_several_files(folder):
    (folder / "experiments/count/helper.py").write_text("VALUE = 7\n")
    (folder / "experiments/count/run.py").write_text('"""Two files."""\nfrom .helper import VALUE\n\n'
                                       'def run(lab):\n    lab.results["value"] = VALUE\n')
    out = run_experiment("count")
    assert json.loads((out / "results.json").read_text())["results"] == {"value": 7}
