"""The experiment quant-error, at toy size."""

import json
import re

import pytest

from numflow.lab import run_experiment
from tests.conftest import REPO
from tests.quant.small import TEXT, write_model

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
    assert re.search(r"\| q3h +\| numflow +\| 3\.7031 ", report)
    for figure in ("error_against_bits", "error_times_levels", "codes"):
        assert (out / f"{figure}.png").stat().st_size > 10_000
    weights = report[report.index("## Relative rms error"):report.index("## Speed")]
    assert [row["type"] for row in results["formats"]] == ["Q4_0"] and "Whole models of GGUF's types" in report
    assert [row["type"] for row in results["files"]] == ["Q4_0"] and min(results["files"][0]["tokens_s"]) > 0
    more = {"llama_cpp": "", "parts": "files", "types": "IQ3_S", "merge": "true"}
    run_experiment("quant-error", quick=True, out=tmp_path, options=more)
    results = json.loads((out / "results.json").read_text())["results"]
    assert [row["type"] for row in results["files"]] == ["Q4_0", "IQ3_S"]
    again = {"llama_cpp": "", "parts": "speed", "merge": "true"}
    run_experiment("quant-error", quick=True, out=tmp_path, options=again)
    merged, now = (out / "report.md").read_text(), json.loads((out / "results.json").read_text())["results"]
    assert merged.count("## Speed") == 1 and weights[:weights.index("<!-- part speed")] in merged
    assert now.keys() == results.keys() and now["rows"] == results["rows"]


def test_divergence_of_a_small_model(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("NUMFLOW_EXPERIMENTS", str(REPO / "experiments"))
    model, text = write_model(tmp_path / "small"), tmp_path / "text.txt"
    text.write_text(TEXT)
    options = {"llama_cpp": "", "language_models": str(model), "text": str(text), "parts": "frontier,kv"}
    out = run_experiment("quant-error", quick=True, out=tmp_path / "out", options=options)
    content = (out / "results.json").read_text()
    assert str(tmp_path) not in content + (out / "report.md").read_text()
    results = json.loads(content)["results"]
    rows = {row["name"]: row for row in results["frontier"]["small"]}
    assert rows["q3h"]["kl"]["mean"] < rows["q3h plain"]["kl"]["mean"]
    assert rows["q8"]["kl"]["mean"] < rows["q5"]["kl"]["mean"] < rows["q3"]["kl"]["mean"] < rows["q2"]["kl"]["mean"]
    assert rows["auto 3.75"]["bits"] <= 3.75
    assert (out / "kl_against_bits.png").stat().st_size > 10_000
    errors = {label: float(error) for label, _, error in results["output_error"]["small"]}
    assert errors["q3, feedback"] < errors["q3, importances"] < 1.02 * errors["q3"]
    assert results["sensitivity"]["small"]["attn_q"]
    kv = {(row["k"], row["v"]): row["kl"]["mean"] for row in results["kv"]["small"]}
    assert kv["q8", "q8"] < kv["q4", "q4"] < kv["q2", "q2"]
