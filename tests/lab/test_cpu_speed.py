"""The experiment cpu-speed: samples survive an interruption, and the report is written from them."""

import importlib
import json
import subprocess
import sys

import pytest

from numflow.lab import Lab
from numflow.lab.harness import _load
from tests.conftest import REPO


@pytest.fixture(scope="module")
def experiment():
    module = _load(REPO / "experiments" / "cpu-speed" / "run.py")
    parts = "rounds", "report", "quiet"
    found = {name: importlib.import_module(f"{module.__name__}.{name}") for name in parts}
    return found | {"llama_cpp": importlib.import_module("..llama_cpp", module.__name__)}


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
               "model|m.Q4_0.gguf|1|ik decode": [250.0, 240.0, 260.0], "model|m.Q4_0.gguf|1|repeated": [2.0],
               "model|m.Q4_0.gguf|1|disturbed": [1.0], "model|m.Q4_0.gguf|1|others": [0.1],
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
    assert ["m.Q4_0.gguf", "1", "200.0 (100.0-300.0)", "100.0 (90.0-110.0)", "250.0 (240.0-260.0)",
            "2", "1.4, 2 of 3, 1 disturbed", "0.8", "1.25, MISSED, 1 disturbed", "10"] in cells
    assert ["m.Q4_0.gguf", "1", "1000.0 (1000.0-1000.0)", "500.0 (500.0-500.0)", "2",
            "2, 1 disturbed"] in cells
    assert ["m.Q4_0.gguf", "1", "0.90 (0.90-0.90)", "300 (300-300)", "150 (150-150)", "2",
            "210 (210-210)"] in cells
    for name in ("roofline", "tokens_per_second", "by_context", "by_batch"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert f"{name}.png" in text


def test_a_verdict_has_its_spread(experiment):
    verdict = experiment["report"].verdict
    assert verdict(1.5, [15, 16, 30], [10, 10, 10]) == "1.5" and verdict(1.5, [], [1]) == verdict(None, [1], [1]) == ""
    assert verdict(1.5, [14, 16, 30], [10, 10, 10]) == "1.5, 2 of 3"
    assert verdict(1.5, [14, 14, 30], [10, 10, 10], 2) == "1.5, MISSED, 1 of 3, 2 disturbed"
    assert verdict(1.5, [10, 10], [10, 10]) == "1.5, MISSED"


def test_disturbed_rounds_are_repeated(experiment, tmp_path):
    """Another process takes a core in two of five rounds; memory is slow in one round."""
    seconds, speeds = iter([1.0, 0.05, 1.0, 0.05, 0.05, 9.9]), iter([30, 30, 30, 30, 30, 30, 20, 30, 30, 29, 0, 0])
    state = {"clock": 0.0, "busy": 0.0, "own": 0.0}
    watch = experiment["quiet"].Watch(lambda threads: next(speeds), lambda: state["busy"], lambda: state["own"],
                                      lambda: state["clock"])
    results = iter(range(10))

    def turn():
        state["clock"], state["own"] = state["clock"] + 1, state["own"] + 1
        state["busy"] += 1 + next(seconds)
        value = next(results)
        return {"decode": value, "ik decode": 2 * value}

    rounds = experiment["rounds"]
    samples, key = rounds.Samples(tmp_path / "samples.json", 2, resume=False), ("model", "m", 1)
    rounds.in_quiet(samples, watch, key, 1, turn)
    assert samples.of(*key, "decode") == [1, 4] and samples.of(*key, "ik decode") == [2, 8]
    assert samples.of(*key, "repeated") == [3] and samples.of(*key, "disturbed") == [0]
    assert samples.of(*key, "slowest memory") == [29]


def test_disturbed_rounds_fill_up_and_are_told(experiment, tmp_path):
    busy = iter(range(0, 100, 2))
    watch = experiment["quiet"].Watch(lambda threads: 30, lambda: next(busy), lambda: 0.0, lambda: 0.0)
    rounds = experiment["rounds"]
    samples, key = rounds.Samples(tmp_path / "samples.json", 2, resume=False), ("batch", "m", 1, 8)
    rounds.in_quiet(samples, watch, key, 1, lambda: {"decode": 5.0})
    assert samples.of(*key, "decode") == [5, 5] and samples.of(*key, "disturbed") == [2]
    assert samples.of(*key, "repeated") == [2]


def test_what_this_process_and_its_children_take_is_not_others(experiment):
    quiet = experiment["quiet"]
    before, busy = quiet.own_seconds(), quiet.busy_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert quiet.own_seconds() - before >= 0.05 and quiet.busy_seconds() - busy >= 0.05


def test_without_their_programs_there_are_no_peers(experiment, tmp_path):
    assert experiment["llama_cpp"].found("", "") == experiment["llama_cpp"].found(str(tmp_path), str(tmp_path)) == []


def test_ik_llama_cpp_is_asked_twice(experiment, tmp_path):
    """Stand-ins for ik_llama.cpp's programs: llama-bench prints which arguments it got; the table goes to stderr."""
    (tmp_path / "llama-bench").write_text("""#!/bin/sh
echo "loading"
case "$*" in *"-rtr 1"*) speed=20;; *) speed=10;; esac
case "$*" in *"-n 0 -gp 32,128"*) speed=${speed}1;; *" -p 512 -n 0"*) speed=${speed}2;; esac
echo "[{\\"avg_ts\\": $speed}]"
""")
    (tmp_path / "llama-batched-bench").write_text("""#!/bin/sh
echo "main: $*" >&2
echo "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |" >&2
echo "|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|" >&2
echo "|    32 |     16 |    8 |    384 |    0.100 |  2560.00 |    0.200 |   640.50 |    0.300 |  1280.00 |" >&2
""")
    for name in ("llama-bench", "llama-batched-bench"):
        (tmp_path / name).chmod(0o755)
    plain, repacked = experiment["llama_cpp"].found("", str(tmp_path))
    assert [plain.key, repacked.key] == ["ik", "ik -rtr"]
    assert (plain.prefill("m", 1, 512), repacked.prefill("m", 1, 512)) == (102, 202)
    assert (plain.decode("m", 1, 32, 128), repacked.decode("m", 1, 32, 128)) == (101, 201)
    assert plain.batched("m", 1, 8, 32, 16) == 640.5


def test_llama_cpp_is_asked_for_tokens_per_second(experiment, tmp_path):
    """Stand-ins for llama.cpp's programs."""
    answers = {"llama-bench": json.dumps([{"avg_ts": 12.5}]), "llama-batched-bench": '{"speed_tg": 99.5,}'}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nsleep 0.1\necho '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    peer = experiment["llama_cpp"].LlamaCpp(str(tmp_path))
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
