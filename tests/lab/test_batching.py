"""The experiment on batching, in its quick form on a tiny model."""

import json

import pytest

from numflow.lab import run_experiment
from tests.engine.tiny import CONFIG, write_checkpoint


def test_the_report_on_batching(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("NUMFLOW_LLAMA_CPP", raising=False)
    (tmp_path / "tiny").mkdir()
    folder = write_checkpoint(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 512}))
    out = run_experiment("batching", quick=True, out=tmp_path / "out",
                         options={"model": str(folder), "requests": "3", "threads": "1"})
    text, found = (out / "report.md").read_text(), json.loads((out / "results.json").read_text())
    results = found["results"]
    assert "llama-batched-bench was not found" in text
    assert "exactly the tokens that each gives alone" in text
    assert set(results["scale"]) == {"1", "4"}
    assert [row["batching"] for row in results["serving"]] == ["dynamic", "static", "one by one"]
    assert results["prefix"]["tokens_found"] == 256
    assert results["memory"]["swap"]["same_tokens"] and results["memory"]["recompute"]["same_tokens"]
    assert str(tmp_path) not in json.dumps(found) + text
    assert {path.name for path in out.iterdir()} == {"report.md", "results.json", "sequences.png", "sequences.svg",
                                                     "load.png", "load.svg"}
