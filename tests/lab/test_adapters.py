"""The experiment on adapters, in its quick form on a tiny model."""

import json

from numflow.lab import run_experiment
from tests.engine.tiny import write_checkpoint


def test_the_report_on_adapters(tmp_path):
    (tmp_path / "tiny").mkdir()
    folder = write_checkpoint(tmp_path / "tiny")
    out = run_experiment("adapters", quick=True, out=tmp_path / "out",
                         options={"model": str(folder), "threads": "1", "activations": "f32"})
    text, found = (out / "report.md").read_text(), json.loads((out / "results.json").read_text())
    assert "| the base alone" in text and found["results"]["adapter_mib"] > 0
    assert set(found["results"]["samples"]) == {"0", "2"} and str(tmp_path) not in json.dumps(found) + text
