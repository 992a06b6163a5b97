"""quantize, verify and imatrix as commands."""

import json
import os

import pytest

from numflow.formats import container
from tests.quant.small import TEXT, write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"), ffn=80)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_a_model_is_quantised_checked_and_measured(run, source, text, tmp_path):
    made, file = tmp_path / "imatrix.safetensors", tmp_path / "out.safetensors"
    done = run("imatrix", "-m", source, "--text", text, "-o", made, "--context", 64, "--chunks", 4)
    assert (done.code, done.err.count("calibrating")) == (0, 1)
    assert "15 matrices, 256 tokens" in done.out
    done = run("quantize", source, file, "--weights", "q3h", "--imatrix", made)
    assert done.code == 0, done.err
    assert "q3h        14   86,144" in done.out and "bits per weight of its quantised matrices" in done.out
    assert "without calibration" not in done.out
    assert "down_proj.weight is not quantised: q3h has blocks of 32 weights, which do not divide 80 columns" in done.out
    assert container.read_report(file)["calibration"]["tokens"] == 256
    done = run("verify", file, "--against", source)
    assert done.code == 0 and "sizes and hashes, source and errors" in done.out
    done = run("perplexity", "-m", file, "--text", text, "--kl-against", source, "--context", 64, "--chunks", 2,
               "--device", "reference", "--json")
    result = json.loads(done.out)
    assert 0 < result["kl"]["mean"] < 1 and {"median", "p99.9", "max", "stderr"} <= result["kl"].keys()
    assert result["bits_per_weight"] == pytest.approx(container.read_report(file)["bits_per_weight"], abs=1e-5)
    assert {"perplexity", "stderr", "same_top", "same_top_stderr", "protocol", "protocol_text"} <= result.keys()
    done = run("perplexity", "-m", source, "--weights", "q3h", "--text", text, "--context", 64, "--chunks", 2,
               "--device", "reference")
    assert "2 of 16 matrices stay as they are" in done.err and "bits_per_weight" in done.out


@pytest.mark.merge
def test_a_size_to_meet_and_a_text_to_calibrate_on(run, source, text, tmp_path):
    done = run("quantize", source, tmp_path / "x", "--target-bpw", "5", "--imatrix", text, "--context", 64,
               "--chunks", 4, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["recipe"]["name"] == "auto-5"
    assert 4.3 < report["bits_per_weight"] <= 5


@pytest.mark.parametrize("weights, could", [("q3h", True), ("q4", False), ("q2_b32t1b", False), ("Q8_0", False)])
@pytest.mark.thin(3)
def test_few_bits_without_calibration_are_told(run, source, tmp_path, weights, could):
    file = tmp_path / ("x.gguf" if weights == "Q8_0" else "x")
    done = run("quantize", source, file, "--weights", weights, "--no-calibration")
    assert done.code == 0, done.err
    assert ("quantised without calibration" in done.out) == could


def types(file):
    """Type by module of all matrices."""
    return {row["modules"][0]: row["type"] for row in container.read_report(file)["tensors"] if row["modules"]}


def test_a_recipe_with_a_scheme_for_what_it_does_not_name(run, source, tmp_path):
    recipe, file = tmp_path / "r.toml", tmp_path / "x"
    recipe.write_text('weights = "q8"\n[tensors]\n"output" = "q6"\n"*attn_v" = "keep"\n')
    assert run("quantize", source, file, "--weights", "q3h", "--recipe", recipe, "--no-calibration").code == 0
    found = types(file)
    assert (found["output"], found["blk.0.attn_v"], found["blk.1.ffn_up"]) == ("q6", "F32", "q3h")


@pytest.mark.merge
def test_a_size_to_meet_with_a_recipe(run, source, text, tmp_path):
    recipe, file = tmp_path / "r.toml", tmp_path / "x"
    recipe.write_text('[tensors]\n"output" = "q8_b32t2"\n"*attn_v" = "keep"\n"nothing" = "q4"\n')
    size = "--target-bpw", "4.5", "--imatrix", text, "--context", 64, "--chunks", 2
    done = run("quantize", source, file, "--weights", "q3h", "--recipe", recipe, *size)
    assert done.code == 0 and "the recipe's pattern 'nothing' fits no matrix" in done.out, done.err
    found, report = types(file), container.read_report(file)
    assert (found["output"], found["blk.0.attn_v"], found["blk.1.attn_v"]) == ("q8_b32t2", "F32", "F32")
    assert 4.2 < report["bits_per_weight"] <= 4.5 and report["recipe"]["weights"] == "q3h"
    recipe.write_text('[tensors]\n"*" = "q6"\n')
    done = run("quantize", source, file, "--force", "--recipe", recipe, *size)
    assert done.code == 1 and "4.5 bits per weight are too few: the smallest choice (q6) takes 6.6" in done.err


@pytest.mark.parametrize("options, message", [
    ((), "say what to quantise to with --weights, --recipe or --target-bpw"),
    (("--weights", "q4_b32t1a", "--target-bpw", "4", "--imatrix", os.devnull),
     "--target-bpw measures with one of q2, q3, q3h, q4, q5, q6, q8; 'q4_b32t1a' is none"),
    (("--target-bpw", "4", "--no-calibration"), "give a text or a calibration with --imatrix"),
    (("--weights", "q4", "--no-calibration", "--imatrix", os.devnull), "--imatrix and --no-calibration contradict"),
    (("--weights", "q44"), "no quantisation scheme, preset or recipe file 'q44'; did you mean 'q4'"),
    (("--recipe", "nowhere.toml"), "no quantisation scheme, preset or recipe file 'nowhere.toml'"),
])
def test_what_cannot_be(run, source, tmp_path, options, message):
    done = run("quantize", source, tmp_path / "x", *options)
    assert done.code == 1 and message in done.err
    assert done.err.count("\n") == 1 + done.err.count("quantising")


def test_files_that_are_none(run, source, text):
    done = run("verify", source / "model.safetensors")
    assert done.code == 1 and "not one that `numflow quantize` made" in done.err
    done = run("verify", text)
    assert done.code == 1 and "not a checkpoint" in done.err
    text.write_bytes(b"GGUF\3" + bytes(60))
    done = run("verify", text)
    assert done.code == 1 and f"{text}: a file of gguf, which carries no report" in done.err


def test_a_source_of_few_bits_is_warned_of(run, source, tmp_path):
    first = run("quantize", source, tmp_path / "x.safetensors", "--weights", "q4", "--no-calibration")
    again = run("quantize", tmp_path / "x.safetensors", tmp_path / "y.safetensors", "--weights", "q3",
                "--no-calibration")
    assert first.code == again.code == 0 and "warning" not in first.err
    assert "warning: " in again.err and "are quantised already (q4)" in again.err
