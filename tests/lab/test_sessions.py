"""The experiment on sessions, in its quick form on a tiny model."""

import json

from numflow.lab import run_experiment
from tests.engine.tiny import write_checkpoint


def test_the_report_on_sessions(tmp_path):
    (tmp_path / "tiny").mkdir()
    folder = write_checkpoint(tmp_path / "tiny")
    out = run_experiment("sessions", quick=True, out=tmp_path / "out",
                         options={"model": str(folder), "backend": "reference"})
    text, found = (out / "report.md").read_text(), json.loads((out / "results.json").read_text())
    assert "restored from its session" in text and not found.get("doubts") and str(tmp_path) not in text
    assert {name: len(own) for name, own in found["results"]["seconds"].items()} == {
        "read again": 1, "taken up": 1, "taking up": 1}
