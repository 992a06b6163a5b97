"""The experiment on tool calls, in its quick form on a tiny model."""

import json

import pytest

from numflow.lab import run_experiment

pytest.importorskip("starlette")
from tests.server.test_tools import PLAIN
from tests.server.tiny import write_chat_model


@pytest.mark.merge
def test_the_report_on_tool_calls(tmp_path):
    folder = write_chat_model(tmp_path / "tiny")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": PLAIN}))  # it knows no tools
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    out = run_experiment("tool-calls", quick=True, out=tmp_path / "out",
                         options={"model": str(folder), "backend": "reference"})
    text, found = (out / "report.md").read_text(), json.loads((out / "results.json").read_text())["results"]["calls"]
    assert "All 10 calls are JSON and fit" in text and str(tmp_path) not in text
    forced = [own for name, own in found.items() if name != "free"]
    assert len(forced) == 5 and all(own["valid"] == own["streamed"] == own["answers"] == 2 for own in forced)
