"""The experiment speculative, with a toy of random weights."""

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
    assert own["accepted"] == own["drafts"] > 0  # the model itself is always right
    assert cut["accepted"] < cut["drafts"]
    assert (out / "speedup.png").stat().st_size > 10_000
    assert "## Draft models" in (out / "report.md").read_text()
