"""The experiment cpu-speed: samples that survive a break, and a report made of them."""

import importlib
import json

import pytest

from numflow.lab import Lab
from numflow.lab.harness import _load
from tests.conftest import REPO


@pytest.fixture(scope="module")
def experiment():
    module = _load(REPO / "experiments" / "cpu-speed" / "run.py")
    return {name: importlib.import_module(f"{module.__name__}.{name}") for name in ("rounds", "report", "peers")}


def test_samples_go_on_where_they_stopped(experiment, tmp_path):
    path = tmp_path / "samples.json"
    samples = experiment["rounds"].Samples(path, 2, resume=True)
    samples.add(3, "model", "a.gguf", 1, "decode")
    again = experiment["rounds"].Samples(path, 2, resume=True)
    assert again.of("model", "a.gguf", 1, "decode") == [3.0]
    assert again.missing("model", "a.gguf", 1, "decode")
    again.add(4, "model", "a.gguf", 1, "decode")
    assert not again.missing("model", "a.gguf", 1, "decode")
    anew = experiment["rounds"].Samples(path, 2, resume=False, again=True)
    anew.add(9, "model", "b.gguf", 1, "decode")
    assert anew.missing("model", "a.gguf", 1, "decode")
    anew.add(5, "model", "a.gguf", 1, "decode")
    assert anew.missing("model", "a.gguf", 1, "decode")
    assert anew.values == {"model|b.gguf|1|decode": [9.0], "model|a.gguf|1|decode": [5.0]}
    assert experiment["rounds"].Samples(path, 2, resume=False).values == {}


def test_the_report_says_what_was_measured_and_asked_for(experiment, tmp_path):
    pytest.importorskip("matplotlib")
    lab = Lab("cpu-speed", "Speed", True, tmp_path, {})
    samples = {"model|m.Q4_0.gguf|1|decode": [200.0, 100.0, 300.0],
               "model|m.Q4_0.gguf|1|peer decode": [100.0, 90.0, 110.0],
               "model|m.Q4_0.gguf|1|prefill": [1000.0], "model|m.Q4_0.gguf|1|peer prefill": [500.0],
               "model|m.Q4_0.gguf|1|bytes": [5e7], "context|m.Q4_0.gguf|1|4096|decode": [90.0],
               "batch|m.Q4_0.gguf|1|8|decode": [500.0], "torch|m.Q4_0.gguf|1|prefill": [1000.0],
               "torch|m.Q4_0.gguf|1|peer prefill": [400.0], "torch|enc|1|32|sentences": [30.0],
               "synthetic|1b q4|1|decode": [20.0], "synthetic|1b q4|1|bytes": [1e9],
               "synthetic|1b q4|1|of bandwidth": [0.9], "synthetic|1b q4|1|of int8 peak": [0.6],
               "start|m.Q4_0.gguf|1|first token": [0.9], "start|m.Q4_0.gguf|1|memory": [300.0],
               "start|m.Q4_0.gguf|1|peer memory": [150.0], "start|m.Q4_0.gguf|1|weights": [90.0]}
    limits = {1: {"threads": 1, "read_gb_s": 30.0, "int8_gop_s": 460.0, "f32_gop_s": 115.0}}
    row = {"op": "linear x", "steps": 1, "microseconds": 10.0, "share": 1.0, "gb_s": 20.0, "gop_s": 80.0,
           "at_limit": 0.7}
    profiles = {"m.Q4_0.gguf": {"prefill": [row], "decode": [row]}}
    experiment["report"].write(lab, samples, limits, profiles, "Title.\n\nAll of it.")
    lab.write()
    text = (tmp_path / "report.md").read_text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert ["m.Q4_0.gguf", "1", "200.0 (100.0-300.0)", "100.0 (90.0-110.0)", "2", "1.4", "10"] in cells
    assert ["m.Q4_0.gguf", "1", "1000.0 (1000.0-1000.0)", "500.0 (500.0-500.0)", "2", "2"] in cells
    assert ["m.Q4_0.gguf", "1", "0.90 (0.90-0.90)", "300 (300-300)", "150 (150-150)", "2",
            "210 (210-210)"] in cells
    for name in ("roofline", "tokens_per_second", "by_context", "by_batch"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert f"{name}.png" in text


def test_without_llama_cpp_there_is_no_peer(experiment, tmp_path):
    peers = experiment["peers"]
    assert not peers.LlamaCpp("") and not peers.LlamaCpp(str(tmp_path))


def test_llama_cpp_is_asked_for_tokens_per_second(experiment, tmp_path):
    """Programs that answer as llama.cpp's do."""
    answers = {"llama-bench": json.dumps([{"avg_ts": 12.5}]), "llama-batched-bench": '{"speed_tg": 99.5,}'}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nsleep 0.1\necho '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    peer = experiment["peers"].LlamaCpp(str(tmp_path))
    assert peer.bench("m.gguf", 1, "-p", 8) == 12.5
    assert 0 < peer.peak_mib < 100
    assert peer.batched("m.gguf", 1, 8, 32, 16) == 99.5


@pytest.mark.slow
def test_kernel_steps(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from numflow.lab import run_experiment

    monkeypatch.setenv("NUMFLOW_EXPERIMENTS", str(REPO / "experiments"))
    out = run_experiment("kernel-steps", quick=True, out=tmp_path)
    rows = json.loads((out / "results.json").read_text())["results"]["rows"]
    assert len(rows) == 7 and all(gop > 0 and gb > 0 for _, gop, gb in rows)
