"""The experiment on recurrent states, in its quick form."""

import json

import numpy as np
import pytest

import numflow
from numflow.engine.sessions.identity import identity
from numflow.lab import run_experiment
from numflow.lab.harness import _load
from tests.conftest import REPO


def test_the_report_on_states(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("NUMFLOW_LLAMA_CPP", raising=False)
    out = run_experiment("state", quick=True, out=tmp_path / "out",
                         options={"models": "lfm2", "parts": "models,memory,types"})
    text, found = (out / "report.md").read_text(), json.loads((out / "results.json").read_text())["results"]
    assert "llama-bench was not found" in text
    assert set(found["models"]["LFM2-350M-like|1"]["samples"]) == {"prefill 40", "decode", "decode, 3 texts"}
    sizes = {row["type"]: row["bytes"] for row in found["types"]}
    assert sizes["q8"] < sizes["f16"] == sizes["bf16"] < sizes["f32"]
    errors = [row["rms"] for row in found["types"]]
    assert errors[0] == 0 and all(0 < error < 0.1 for error in errors[1:])
    kept = {(row["name"].partition("-")[0], row["tokens"]): row for row in found["memory"]}
    assert all(row["least"] <= row["writing"] <= row["kept"] for row in kept.values())
    assert kept["Gemma", 4096]["writing"] < 1.2 * kept["Gemma", 4096]["least"]
    # 576 numbers of 2 bytes in 61 layers for each token; a window of 1024 in five layers of six
    assert kept["DeepSeek", 4096]["least"] == 2 * 576 * 61 * 4096
    assert kept["Gemma", 32768]["kept"] < 0.3 * kept["Gemma", 32768]["expanded"]
    assert kept["DeepSeek", 32768]["expanded"] > 70 * kept["DeepSeek", 32768]["kept"]


def test_sessions_tell_types_of_states_apart(tmp_path):
    """Logits of the experiment's GGUF file do not depend on batch boundaries either; bf16 has the size of f16."""
    made = vars(_load(REPO / "experiments" / "state" / "run.py"))["models"]
    path, found = made.qwen35(True).write(tmp_path / "model.gguf", "F32"), []
    for dtype in ("f16", "bf16", "f16"):
        with numflow.load(path, state_type=dtype, threads=1) as model:
            found.append(identity(model))
            whole = model.logits(list(range(3, 40)))
    assert found[0]["bytes"] == found[1]["bytes"] and found[0] == found[2] != found[1]
    with numflow.load(path, state_type="f16", threads=2, chunk=7) as model:
        np.testing.assert_array_equal(model.logits(list(range(3, 40))), whole)
