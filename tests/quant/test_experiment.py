"""The experiment quant-error, at toy size."""

import json

import pytest

from numflow.lab import run_experiment
from tests.conftest import REPO

pytestmark = pytest.mark.slow


def test_it_writes_its_report(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("NUMFLOW_EXPERIMENTS", str(REPO / "experiments"))
    out = run_experiment("quant-error", quick=True, out=tmp_path, options={"llama_cpp": ""})
    results = json.loads((out / "results.json").read_text())["results"]
    errors = {row["scheme"]: row["errors"]["normal"] for row in results["rows"]}
    assert errors["q3h"] < 0.9 * errors["q3h_b64t1"]
    assert results["codes"]["q4"]["levels"] == 16
    assert results["codes"]["q4_b64t1"]["levels"] == 15
    report = (out / "report.md").read_text()
    assert "| q3h       | numflow   | 3.7031 |" in report
    for figure in ("error_against_bits", "error_times_levels", "codes"):
        assert (out / f"{figure}.png").stat().st_size > 10_000
