"""The experiment speculative, with a tiny model of random weights."""

import json

import pytest

from numflow.lab import run_experiment
from tests.conftest import REPO

pytestmark = pytest.mark.slow


def test_it_writes_its_report(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("NUMFLOW_EXPERIMENTS", str(REPO / "experiments"))
    out = run_experiment("speculative", quick=True, out=tmp_path)
    results = json.loads((out / "results.json").read_text())["results"]
    assert [row["accuracy"] for row in results["oracle"]] == [0.0, 1.0]
    assert results["oracle"][0]["accepted"] == 0
    assert results["oracle"][1]["accepted"] == results["oracle"][1]["drafts"] > 0
    own, cut = results["drafts"]
    assert own["accepted"] == own["drafts"] > 0  # drafts by the model itself are always accepted
    assert cut["accepted"] < cut["drafts"]
    assert (out / "speedup.png").stat().st_size > 10_000
    assert "## Draft models" in (out / "report.md").read_text()
    trained = results["trained"]
    assert {(row["model"], row["draft"]) for row in trained} == {("tiny-hybrid", "mtp"), ("tiny", "tiny-eagle"),
                                                                 ("tiny", "tiny-draft")}
    for row in trained:
        assert row["guesses"] is None or row["drafts"] >= row["accepted"] > 0
        assert 0 < row["read"] < 0.6 and 0 < row["read_large"] < 0.2 and row["cost"] > 0
    small = {(row["draft"], row["guesses"]): row for row in trained}
    for row in results["wide"]:  # a widened model computes the same
        assert row["guesses"] is None or row["accepted"] == small[row["draft"], row["guesses"]]["accepted"]


def test_parts_that_are_not_measured_are_kept(tmp_path, monkeypatch):
    """Also the parts of an older report, whose results have no list of parts."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("NUMFLOW_EXPERIMENTS", str(REPO / "experiments"))
    published = json.loads((REPO / "reports" / "speculative" / "results.json").read_text())
    old = published | {"results": {key: value for key, value in published["results"].items()
                                   if key not in ("trained", "wide")}}
    (tmp_path / "results.json").write_text(json.dumps(old))
    options = {"parts": "trained", "rounds": "1", "tokens": "4", "temperatures": "0"}
    out = run_experiment("speculative", out=tmp_path, options=options)
    found = json.loads((out / "results.json").read_text())
    assert {key: found["results"][key] for key in old["results"]} == old["results"] and found["results"]["wide"]
    assert found["parts"]["guesses"] == old.get("parts", {}).get("guesses", old["recipe"])
    assert "Kept from before: guesses, by" in (out / "report.md").read_text()
