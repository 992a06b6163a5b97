"""The experiment on variants: random changes of configurations, and comparisons where transformers cannot run."""

import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numflow.lab import run_experiment
from numflow.lab.harness import _load
from tests.conftest import REPO

BASE = {"model_type": "llama", "pad_token_id": 0, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_hidden_layers": 3, "hidden_act": "silu", "rope_theta": 1e4, "rope_parameters": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "vocab_size": 144}


@pytest.fixture(scope="module")
def experiment():
    module = _load(REPO / "experiments" / "variants" / "run.py")
    return module, sys.modules[f"{module.__name__}.changes"]


def test_without_transformers_the_report_says_so(tmp_path):
    out = run_experiment("variants", quick=True, out=tmp_path, options={"python": str(tmp_path / "no python")})
    assert "nothing was compared" in (out / "report.md").read_text()
    assert json.loads((out / "results.json").read_text())["results"] == {}


def test_changes_follow_from_the_seed_and_can_be_applied(experiment):
    changes = experiment[1]
    found = [changes.draw(BASE, BASE, random.Random(number)) for number in range(300)]
    assert found == [changes.draw(BASE, BASE, random.Random(number)) for number in range(300)]
    keys = {key for each in found for change in each for key in change}
    assert {"rope_scaling", "num_hidden_layers", "layer_types", "hidden_act", "num_key_value_heads"} <= keys
    assert not {"pad_token_id", "model_type"} & keys
    for each in found:
        config = changes.applied(BASE, each)
        assert all(config.get(key, changes.LEFT_OUT) == value for change in each for key, value in change.items()
                   if key != "layer_types")
        if isinstance(config.get("layer_types"), list) and isinstance(config.get("num_hidden_layers"), int):
            assert len(config["layer_types"]) == config["num_hidden_layers"]


def test_each_key_is_changed_alone(experiment):
    changes = experiment[1]
    own = BASE | {"attention_bias": False}
    found = changes.singles(BASE, own, random.Random(1))
    assert found == changes.singles(BASE, own, random.Random(1))
    keys = [key for (change,) in found for key in change]
    assert keys == sorted({"attention_bias", "head_dim", "hidden_act", "hidden_size", "layer_types",
                           "num_attention_heads", "num_hidden_layers", "num_key_value_heads"})
    assert all(value not in (own[key], changes.LEFT_OUT) for (change,) in found for key, value in change.items())


def test_changes_that_do_not_matter_are_taken_back(experiment, monkeypatch):
    run, _ = experiment
    monkeypatch.setattr(run, "tried", lambda lab, sides, config, row: {
        "result": run.WRONG if config["hidden_act"] == "gelu" else run.RIGHT, "line": "whole"})
    changes = [{"head_dim": 8}, {"hidden_act": "gelu"}, {"rope_theta": 5e5}]
    left, row = run.smallest(None, None, BASE, changes, {"result": run.WRONG, "saved": False, "number": 1})
    assert left == [{"hidden_act": "gelu"}] and row["line"] == "whole"


def test_who_is_right_about_a_gguf_file(experiment):
    """llama.cpp is right where it runs the file; close logits count only where llama.cpp agrees with transformers."""
    judged = sys.modules[f"{experiment[0].__name__}.gguf_files"].judged
    base = [np.random.default_rng(0).normal(size=(9, 20)).astype(np.float32)]
    close, far = [base[0] + 1e-3], [base[0] + 0.1]
    for ours, peer, result in (
            (base, base, "right"), (far, far, "as llama.cpp alone"), (base, far, "as transformers alone"),
            (far, base, "wrong"), (close, base, "wrong"), (close, close, "right"), (close, far, "wrong"),
            ([base[0] * np.nan], base, "wrong"), ([base[0][:, :8]], base, "wrong"),
            (base, "no tensor", "right"), (far, "no tensor", "passed over"), (far, "not asked", "wrong"),
            ([base[0][:, :8]], "not asked", "passed over")):
        assert judged(ours, peer, base, 0.0)[0] == result
    hidden = [base[0][:, :8]]
    assert judged(hidden, hidden, base, 0.0) == ("right", "")
    assert judged(far, base, base, 0.0)[1].startswith("0.1 from llama.cpp, 0.1 from transformers")


def test_differences_are_told(experiment):
    run, _ = experiment
    wanted = [np.random.default_rng(0).normal(size=(9, 20)).astype(np.float32)]
    near, far = [wanted[0] + 1e-6], [wanted[0] + 1e-3 * (np.arange(20) == 3)]
    assert run.compared(near, near, wanted, 1e-4) == ""
    assert run.compared(far, near, wanted, 1e-4).startswith("whole, 9 rows: 0.001")
    assert run.compared(near, far, wanted, 1e-4).startswith("in chunks, 9 rows: 0.001")
    assert run.compared(near, [near[0] * np.nan], wanted, 1e-4).endswith("nan")
    made = {"greedy": [1, 2], "margin": 0.1}
    assert run.as_chosen([1, 2], made) == run.as_chosen([2, 2], made | {"margin": 0.0}) == ""
    assert run.as_chosen([2, 2], made) == "tokens [2, 2], not [1, 2]"


def test_numbers_as_near_to_those_of_float64_as_transformers_has_them_are_not_wrong(experiment, tmp_path):
    run, _ = experiment
    exact = [np.arange(180).reshape(9, 20) / np.arange(180).std()] * 2
    np.savez(tmp_path / "exact.npz", logits_0=exact[0], logits_1=exact[1])
    near, far = [exact[0] + 2e-4, exact[1]], [exact[0] + 3e-4, exact[1]]

    def asked(found, wanted, answer=None):
        theirs = SimpleNamespace(ask=lambda **request: answer or {"ok": {}})
        return run.nearer(run.Sides(theirs, None), {}, str(tmp_path), [{}, {}], found, wanted)

    assert asked([near, near], far) == (True, "from float64 0.0002, transformers 0.0003")
    assert not asked([near, far], near)[0] and not asked([near, [exact[0], exact[1] * np.nan]], far)[0]
    assert not asked([near, far[::-1]], far)[0]  # another text was the worse one there
    assert asked([[exact[0][:, :8]] * 2], far) == (False, "other shapes")
    assert asked([near], far, {"refused": "no float64"}) == (False, "float64: no float64")


def test_a_request_that_hangs_is_passed_over_and_the_next_one_answered(tmp_path):
    program = tmp_path / "theirs.py"
    program.write_text("import json, sys, time\n"
                       "for line in sys.stdin:\n"
                       "    time.sleep(60 * json.loads(line)['hang'])\n"
                       "    print(json.dumps({'ok': 1}), flush=True)\n")
    theirs = _load(REPO / "experiments" / "variants" / "run.py").Theirs(
        sys.executable, program, limit_s=0.5)
    try:
        first = theirs.ask(hang=1)
        theirs.limit_s = 30
        assert [first, theirs.ask(hang=0)] == [{"refused": "no answer within 0.5 s"}, {"ok": 1}]
    finally:
        theirs.close()
