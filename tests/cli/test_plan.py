"""`numflow plan` from the command line."""

import json

import pytest


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
    ("--kv", "q7", "--kv should be one of f32, f16, q8"), ("--cluster", "moon", "no cluster file moon")])
def test_mistakes_are_one_line(run, option, value, said):
    words = {"--shape": "1b", "--cluster": "v100x4-pcie", option: value}
    result = run("plan", *(word for pair in words.items() for word in pair))
    assert result.code == 1
    assert said in result.err
    assert len(result.err.strip().splitlines()) == 1
