import json
import re
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
    of_commit(monkeypatch, "abc1234")
    return tmp_path


def of_commit(monkeypatch, name):
    """The git commit that results and reports record, whatever the state of the working tree."""
    for module in ("numflow.lab.harness", "numflow.lab.report"):
        monkeypatch.setattr(f"{module}.commit", lambda: name)


def test_report_results_and_figure_are_written(folder):
    assert list_experiments() == {"count": "Counts to three."}
    out = run_experiment("count", options={"upto": "5"})
    assert out == folder / "reports" / "count"
    results = json.loads((out / "results.json").read_text())
    assert results["results"] == {"sum": 15}
    assert results["recipe"]["command"] == "numflow experiment count --set upto=5"
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
    with pytest.raises(DeviceError, match="figures need matplotlib"):
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


def test_the_recipe_is_the_command_that_made_it(folder):
    out = run_experiment("count", quick=True, out=folder / "elsewhere", options={"label": "/models/a file.gguf"})
    recipe = json.loads((out / "results.json").read_text())["recipe"]
    assert recipe["command"] == "numflow experiment count --quick --set 'label=a file.gguf'"
    report = (out / "report.md").read_text()
    assert f"Written by `{recipe['command']}`" in report
    assert recipe["load_before"] is None or f"Load average {recipe['load_before']:.1f} before" in report
    host = recipe["host"]
    assert {"cpu", "family", "flags", "caches", "cores", "numflow"} <= set(host)
    assert host["caches"] == {} or any(size in report for size in host["caches"].values())


def test_a_changed_tree_publishes_nothing_unless_it_says_so(folder, monkeypatch):
    of_commit(monkeypatch, "abc1234+")
    with pytest.raises(RequestError, match="differs from commit abc1234.*--dirty"):
        run_experiment("count")
    assert not (folder / "reports").exists()
    run_experiment("count", out=folder / "mine")  # not the folder of published reports
    run_experiment("count", quick=True)
    report = (run_experiment("count", dirty=True) / "report.md").read_text()
    assert "--dirty" in report and "commit abc1234+ (the tree had changes that are in no commit)" in report


DOUBTFUL = '''"""Finds what cannot be."""
OPTIONS = {"ratio": 0.9}


def run(lab):
    lab.results["ratio"] = lab.options["ratio"]
    lab.doubt(lab.options["ratio"] <= 1, f"a ratio of {lab.options['ratio']:g}")
    lab.claim("It is below the limit.", lab.options["ratio"] < 0.95, "It is at the limit.")
'''


def test_results_that_cannot_be_are_not_published(folder):
    (folder / "experiments/count/run.py").write_text(DOUBTFUL)
    out = run_experiment("count")
    before = (out / "report.md").read_text()
    assert "It is below the limit." in before
    assert "It is at the limit." in (run_experiment("count", out=folder / "at", options={"ratio": "1.0"}) /
                                     "report.md").read_text()
    with pytest.raises(RequestError, match="implausible results: a ratio of 1.3; measure again"):
        run_experiment("count", options={"ratio": "1.3"})
    assert (out / "report.md").read_text() == before
    assert "**Implausible results: a ratio of 1.3.**" in (out / "rejected" / "report.md").read_text()
    quick = run_experiment("count", quick=True, out=folder / "quick", options={"ratio": "1.3"})
    assert "a ratio of 1.3" in (quick / "report.md").read_text()


PARTS = '''"""Two parts."""
OPTIONS = {"part": "a"}


def run(lab):
    for part in "ab":
        lab.measured(part) if part == lab.options["part"] else lab.kept(part)
'''


def test_parts_that_are_kept_keep_their_recipe(folder, monkeypatch):
    (folder / "experiments/count/run.py").write_text(PARTS)
    monkeypatch.setattr("numflow.lab.report.time.strftime", lambda *_: "2026-01-01 00:00:00 UTC")
    run_experiment("count")
    monkeypatch.setattr("numflow.lab.report.time.strftime", lambda *_: "2026-01-02 00:00:00 UTC")
    out = run_experiment("count", options={"part": "b"})
    parts = json.loads((out / "results.json").read_text())["parts"]
    assert parts["a"]["command"] == "numflow experiment count"
    assert parts["b"]["command"] == "numflow experiment count --set part=b"
    assert "Kept from before: a, by `numflow experiment count` on 2026-01-01" in (out / "report.md").read_text()
    assert re.search(r"Kept from before: a, .* commit [^,]+\.$", (out / "report.md").read_text(), re.M)
    there = (out / "results.json").read_text()
    cores = json.loads(there)["recipe"]["host"]["cores"]
    (out / "results.json").write_text(there.replace(f'"cores": {cores}', '"cores": 96'))
    run_experiment("count", options={"part": "b"})
    text = (out / "report.md").read_text()
    assert re.search(r"Kept from before: a, .* commit [^,]+, on .*, 96 cores.*\.$", text, re.M)
