"""`numflow plan` from the command line."""

import json

import pytest

from numflow.lab import machine
from tests.conftest import shared


def test_a_table_with_the_winner_drawn(run):
    result = run("plan", "--shape", "7b", "--cluster", "v100x4-pcie", "--devices", "0&1;2&3", "--context", 512)
    assert result.code == 0
    assert "7b on 4 x Tesla V100 16 GB, PCIe 3.0, 1 x 512 tokens, latency" in result.out
    assert "0&1;2&3  hybrid" in result.out
    assert "best: " in result.out
    assert "device 0" in result.out.split("\n\n")[-1]


def test_json_has_memory_and_reasons(run):
    result = run("plan", "--shape", "1b", "--cluster", "h200x8", "--devices", "0;1", "--batch", 4, "--json",
                  "--objective", "throughput")
    found = json.loads(result.out)
    assert found["objective"] == "throughput"
    assert [c["devices"] for c in found["candidates"]].count("0;1") == 1
    assert all(c["reason"] and c["memory"]["0"]["limit"] == 141e9 for c in found["candidates"])


def test_clusters_are_listed(run):
    assert "v100x4-nvlink" in run("plan", "--clusters").out


@pytest.mark.parametrize(("option", "value", "said"), [
    ("--devices", "0;;1", "position 3: expected a device"), ("--memory", "1GB,2GB,3GB", "one size or 4, has 3"),
    ("--shape", "9b", "no shape '9b'"), ("--weights", "Q9", "no tensor type named 'Q9'"),
    ("--objective", "speed", "objective should be one of"), ("--memory", "1MB", "no strategy fits"),
    ("--context", "0", "context should be at least 1, is 0"),
    ("--context", "8193", "--context should be 1 .. 8192 tokens, as 1b's, is 8193"),
    ("--batch", "-1", "batch should be at least 1, is -1"), ("--memory", "-1GB", "--memory should be a size such as"),
    ("--kv", "q7", "--kv should be one of f32, f16, q8"), ("--cluster", "moon", "no cluster file moon")])
def test_mistakes_are_one_line(run, option, value, said):
    words = {"--shape": "1b", "--cluster": "v100x4-pcie", option: value}
    result = run("plan", *(word for pair in words.items() for word in pair))
    assert result.code == 1
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_too_little_memory_fails_in_json_too(run):
    result = run("plan", "--shape", "1b", "--cluster", "v100x4-pcie", "--devices", "0;1", "--memory", "10MB", "--json")
    assert result.code == 1 and "no strategy fits" in result.err
    found = json.loads(result.out)
    assert found["candidates"] and not any(c["fits"] for c in found["candidates"])


def test_a_cut_is_priced_once(run):
    """Shares that round to the same layers are one candidate."""
    result = run("plan", "--shape", "1b", "--cluster", "rtx4090-host", "--devices", "cpu;0", "--context", 64, "--json")
    cuts = [(*(m["weights"] for m in c["memory"].values()), c["tok_s"])
            for c in json.loads(result.out)["candidates"]]
    assert len(cuts) == len(set(cuts))


@pytest.mark.parametrize("devices", ["2;5", "cpu;3", ""])
def test_this_machine_has_devices_of_any_name(run, monkeypatch, devices):
    figures = {"memory": 4e9, "bandwidth": 1e10, "operations": 1e11, "step": 1e-6, "host_bandwidth": 1e10,
               "latency": 1e-6, "crowded": 1e-5, "cores": 2.0, "start": 0.0, "start_each": 0.0}
    monkeypatch.setattr(machine, "measure", lambda count: figures)
    words = ["--devices", devices] if devices else []
    result = run("plan", "--shape", "135m", "--context", 64, "--json", "--measure", *words)
    found = json.loads(result.out)["candidates"]
    assert {name for c in found for name in c["memory"]} == set(devices.split(";") if devices else ["0"])


@pytest.mark.parametrize("weights", ["q3h", "Q4_K"])
def test_weights_of_a_model_with_experts(run, weights):
    """In the types as loaded: a matrix whose number of columns does not fit the type keeps its type."""
    folder = shared("fixtures", "mixtral_8x7b")
    sizes = [json.loads(run("plan", "-m", folder, "--cluster", "v100x4-pcie", "--devices", "0", *words, "--json").out)
             ["candidates"][0]["memory"]["0"]["weights"] for words in ([], ["--weights", weights])]
    assert 0 < sizes[1] < sizes[0] if weights == "q3h" else sizes[1] == sizes[0]
