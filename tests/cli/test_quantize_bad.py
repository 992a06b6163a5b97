"""Failures while a model is quantised: one line of explanation, an exit code, and no partial output."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from numflow.formats import writer
from tests.quant.small import TEXT, write_model
from tests.waiting import until

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("change, message", [
    (lambda t: t[UP].__setitem__((3, 5), np.nan), f"{UP} cannot be quantised: row 3, column 5 is nan"),
    (lambda t: t[UP].__setitem__((3, 5), -np.inf), f"{UP} cannot be quantised: row 3, column 5 is -inf"),
    (lambda t: t["model.norm.weight"].__setitem__(9, np.nan), "model.norm.weight: row 0, column 9 is no finite number"),
    (lambda t: t.update({UP: np.full((96, 64), 1e300)}), f"{UP} cannot be quantised: row 0, column 0 is inf"),
    (lambda t: t[UP].__setitem__((3, 5), 1e30), f"{UP} has weights up to 1e+30; 2^27 is the most"),
    (lambda t: t.__setitem__(UP, np.zeros((0, 64), np.float32)), f"'{UP}' is [0, 64], but spec 'llama' expects"),
])
def test_weights_that_cannot_be(run, tmp_path, change, message):
    bad = write_model(tmp_path / "bad", change=change)
    done = run("quantize", bad, tmp_path / "x", "--weights", "q3h", "--no-calibration")
    told = [line for line in done.err.splitlines() if not line.startswith("quantising to q3h")]
    assert done.code == 1 and len(told) == 1 and message in told[0]
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["bad"]


@pytest.mark.parametrize("change", ["cut", "short", "empty", "bit", "header", "length"])
@pytest.mark.thin(3)
def test_damaged_files_are_noticed(run, source, tmp_path, change):
    file = tmp_path / "x"
    assert run("quantize", source, file, "--weights", "q4", "--no-calibration").code == 0
    data = file.read_bytes()
    half = len(data) // 2
    file.write_bytes({"cut": data[:half], "short": data[:5], "empty": b"", "header": data[:20] + b"\xff" + data[21:],
                      "bit": data[:half] + bytes([data[half] ^ 1]) + data[half + 1:],
                      "length": b"\xff" * 8 + data[8:]}[change])
    done = run("verify", file)
    assert done.code == 1 and str(file) in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("bits", ["1", "0", "-3", "nan"])
def test_sizes_out_of_reach(run, source, text, tmp_path, bits):
    done = run("quantize", source, tmp_path / "x", "--target-bpw", bits, "--imatrix", text, "--context", 64,
               "--chunks", 2)
    assert done.code == 1 and "bits per weight are too few: the smallest choice (q2) takes 2.6200" in done.err


def test_nothing_is_measured_for_what_cannot_be(run, source, text, tmp_path, monkeypatch):
    monkeypatch.setattr("numflow.engine.quantise.calibrate.calibrate", lambda *a, **k: pytest.fail("calibrates"))
    there, calibrated = tmp_path / "there", ("--imatrix", text)
    there.write_text("mine")
    for words, message in (
            ((there, "--weights", "q4"), "is there already; --force"),
            ((tmp_path / "no" / "x", "--weights", "q4"), "no folder"),
            ((os.devnull, "--weights", "q4", "--force"), "is there already, and is no file"),
            ((tmp_path, "--weights", "q4", "--force"), "is there already, and is no file"),
            ((source / "model.safetensors", "--weights", "q4", "--force"), "the target is the source itself"),
            ((source / "tokenizer.json", "--weights", "q4", "--force"), "the target is the source itself"),
            ((tmp_path / ("x" * 300), "--weights", "q4"), f"error: {tmp_path / ('x' * 300)}: File name too long"),
            ((tmp_path / ("x" * 250), "--weights", "q4"), "File name too long"),  # .NAME.PID.part is too long
            ((tmp_path / "x", "--weights", "q44"), "no quantisation scheme"),
            ((tmp_path / "x", "--target-bpw", "2"), "2 bits per weight are too few")):
        done = run("quantize", source, *words, *calibrated)
        assert done.code == 1 and message in done.err and done.err.count("\n") == 1, done.err
    for out, message in ((there, "is there already, and is no calibration"), (tmp_path / "no" / "x", "no folder"),
                         (source / "model.safetensors", "is there already, and is no calibration"),
                         (tmp_path / ("x" * 300), "File name too long")):
        done = run("imatrix", "-m", source, "--text", text, "-o", out)
        assert done.code == 1 and message in done.err and done.err.count("\n") == 1, done.err
    assert there.read_text() == "mine"


@pytest.mark.parametrize("words", [("quantize", "SOURCE", "OUT", "--weights", "q4", "--imatrix", "TEXT"),
                                   ("imatrix", "-m", "SOURCE", "--text", "TEXT", "-o", "OUT")])
def test_nothing_is_measured_for_a_folder_that_may_not_be_written(run, source, text, tmp_path, monkeypatch, words):
    monkeypatch.setattr("numflow.engine.quantise.calibrate.calibrate", lambda *a, **k: pytest.fail("calibrates"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **how: path != tmp_path and access(path, mode, **how))
    given = {"SOURCE": source, "TEXT": text, "OUT": tmp_path / "x"}
    done = run(*(given.get(word, word) for word in words))
    assert (done.code, done.err) == (1, f"error: {tmp_path / 'x'}: the folder {tmp_path} may not be written\n")


def test_no_calibration_is_left_unused(run, source, text, tmp_path):
    made = tmp_path / "made"
    assert run("imatrix", "-m", source, "--text", text, "-o", made, "--context", 64, "--chunks", 2).code == 0
    for words, message in (
            (("--weights", "q4_b32t1a", "--imatrix", made), "q4_b32t1a: Inferflow's schemes have one way"),
            (("--weights", "q4_b32t1a+1%", "--imatrix", made), "which uses no calibration; leave it out"),
            (("--weights", "q4", "--context", 64), "--context and --chunks are for a calibration text"),
            (("--weights", "q4", "--imatrix", made, "--chunks", 2), "is a calibration already: --context")):
        done = run("quantize", source, tmp_path / "x", *words)
        assert done.code == 1 and message in done.err, done.err
    done = run("generate", "-m", source, "--weights", "q4", "--imatrix", text, "hi")
    assert done.code == 1 and f"{text}: not a calibration: `numflow imatrix` makes one from a text" in done.err


def test_no_calibration_on_a_model_that_computes_nan(run, text, tmp_path):
    bad = write_model(tmp_path / "bad", change=lambda t: t["model.norm.weight"].__setitem__(9, np.nan))
    done = run("imatrix", "-m", bad, "--text", text, "-o", tmp_path / "c", "--context", 64, "--chunks", 1)
    assert done.code == 1 and "not finite numbers" in done.err and not (tmp_path / "c").exists()


@pytest.mark.parametrize("threads", [0, -3])
def test_threads_that_are_none(run, source, tmp_path, threads):
    done = run("quantize", source, tmp_path / "x", "--weights", "q4", "--threads", threads, "--no-calibration")
    assert done.code == 1 and f"threads should be a whole number from 1, is {threads}" in done.err


def test_a_calibration_is_written_over_another(run, source, text, tmp_path):
    for chunks in (1, 2):
        done = run("imatrix", "-m", source, "--text", text, "-o", tmp_path / "c", "--context", 64, "--chunks", chunks)
        assert done.code == 0 and f"{64 * chunks} tokens" in done.out


def test_a_source_of_other_shapes(run, source, tmp_path):
    assert run("quantize", source, tmp_path / "x", "--weights", "q4", "--no-calibration").code == 0
    done = run("verify", tmp_path / "x", "--against", write_model(tmp_path / "other", ffn=128))
    assert done.code == 1 and "has other hashes than its source had" in done.err
    assert "down_proj.weight' is [64, 96], in" in done.err and "it is [64, 128]" in done.err


def test_a_calibration_of_another_model(run, source, text, tmp_path):
    made, renamed, wide = (tmp_path / name for name in ("made", "renamed", "wide"))
    assert run("imatrix", "-m", source, "--text", text, "-o", made, "--context", 64, "--chunks", 2).code == 0
    save_file({f"x{name}": value for name, value in load_file(made).items()}, renamed,
              metadata={"kind": "numflow calibration", "facts": json.dumps({"model": "somebody"})})
    done = run("quantize", source, tmp_path / "x", "--weights", "q4", "--imatrix", renamed)
    assert done.code == 1 and "calibration is of another model (somebody): it has none of the 16 matrices" in done.err
    other = write_model(tmp_path / "other", ffn=128)
    assert run("imatrix", "-m", other, "--text", text, "-o", wide, "--context", 64, "--chunks", 2).code == 0
    for words in (("quantize", source, tmp_path / "x", "--weights", "q4"),
                  ("generate", "-m", source, "--weights", "q4", "--device", "reference", "hi")):
        done = run(*words, "--imatrix", wide)
        assert done.code == 1 and "down_proj.weight has 96 columns, the calibration 128" in done.err
    assert not (tmp_path / "x").exists()


def test_a_calibration_that_is_damaged(run, source, text, tmp_path):
    made, bad, name = tmp_path / "made", tmp_path / "bad", f"{UP}.importance"
    assert run("imatrix", "-m", source, "--text", text, "-o", made, "--context", 64, "--chunks", 2).code == 0
    good, facts = load_file(made), {"kind": "numflow calibration", "facts": "{}", "moments": "{}"}
    for value, message in ((np.nan, "is nan to nan"), (-1, "is -1 to -1"), (np.inf, "is inf to inf")):
        save_file({**good, name: np.full(64, value, np.float32)}, bad, metadata=facts)
        done = run("quantize", source, tmp_path / "x", "--weights", "q4", "--imatrix", bad)
        assert done.code == 1 and f"{bad}: {name} should be finite and not negative, {message}" in done.err
    for sample in ("words", [["a"]], [3], None):
        save_file(good, bad, metadata={**facts, "facts": json.dumps({"sample": sample})})
        done = run("quantize", source, tmp_path / "x", "--target-bpw", 4, "--imatrix", bad)
        assert done.code == 1 and f"{bad}: facts: sample should be lists of token ids" in done.err
    save_file({key: value for key, value in good.items() if key != name}, bad, metadata=facts)
    told = f"1 of 16 matrices are unknown to the calibration, such as {UP}"
    assert told in run("quantize", source, tmp_path / "x", "--weights", "q4", "--imatrix", bad).out
    assert told in run("generate", "-m", source, "--weights", "q4", "--imatrix", bad, "-n", 1, "--device",
                       "reference", "hi").err
    assert "unknown" not in run("quantize", source, tmp_path / "y", "--weights", "q4", "--imatrix", made).out


@pytest.mark.merge
def test_patterns_that_fit_nothing_are_told(run, source, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('weights = "q4"\n[tensors]\n"blk.7.*" = "q6"\n"blk.1.*" = "q5"\n')
    done = run("quantize", source, tmp_path / "x", "--recipe", recipe)
    assert done.code == 0 and "the recipe's pattern 'blk.7.*' fits no matrix" in done.out
    assert "blk.1" not in done.out
    done = run("perplexity", "-m", source, "--weights", recipe, "--text", recipe, "--device", "reference")
    assert "the recipe's pattern 'blk.7.*' fits no matrix" in done.err


def test_a_base_that_reads_other_tokens(run, source, text, tmp_path):
    other = write_model(tmp_path / "other")
    table = json.loads((other / "tokenizer.json").read_text())
    words = table["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(table))
    done = run("perplexity", "-m", source, "--text", text, "--kl-against", other, "--context", 64, "--chunks", 1,
               "--device", "reference")
    assert done.code == 1 and "one vocabulary: the model tokenizes the text differently from the base" in done.err


def test_what_killed_runs_left_goes(run, source, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, running, elsewhere = (tmp_path / f".x.{pid}.part" for pid in (ended.pid, os.getppid(), 99999999))
    other, nobodys, pipe = (tmp_path / name for name in (".a model.gguf.99999998.part", ".y.part", ".p.99999997.part"))
    for path in (left, running, elsewhere, other, nobodys):
        path.write_bytes(b"half a model")
    with open(elsewhere, "ab") as file:  # locked as by another container, whose process id means nothing here
        writer._hold(file)
        if hasattr(os, "mkfifo"):
            os.mkfifo(pipe)
        assert run("quantize", source, tmp_path / "x", "--weights", "q4", "--no-calibration").code == 0
    assert not left.exists() and not other.exists()
    assert running.exists() and nobodys.exists() and (elsewhere.exists() or writer.fcntl is None)
    assert pipe.exists() or not hasattr(os, "mkfifo")


_START = "import sys; from numflow.cli.app import app; app(sys.argv[1:])"
_LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
# The tests may run with signals ignored, as under nohup and a shell's "&".
_HEARD = "from signal import *\nsignal(SIGHUP, SIG_DFL), signal(SIGINT, default_int_handler)\n"


def start(source, target, before=""):
    return subprocess.Popen([sys.executable, "-c", before + _START, "quantize", str(source), str(target), "--weights",
                             "q4", "--force", "--no-calibration"], stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.name != "posix", reason="limits and signals of POSIX")
@pytest.mark.merge
def test_a_disk_that_fills(source, tmp_path):
    target = tmp_path / "x"
    target.write_bytes(b"what was there")
    process = start(source, target, _LIMITED)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and f"{target}: cannot be written: File too large" in err
    assert target.read_bytes() == b"what was there" and list(tmp_path.iterdir()) == [target]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGHUP, -1),
                                        (signal.SIGKILL, -9)])
def test_an_interrupt(tmp_path, sent, code):
    source, target = write_model(tmp_path / "source", ffn=64 * 1024), tmp_path / "out" / "x"
    target.parent.mkdir()
    target.write_bytes(b"what was there")
    process = start(source, target, _HEARD)
    until(lambda: list(target.parent.glob(".x.*.part")) or process.poll() is not None, "a file that is being written")
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == code and target.read_bytes() == b"what was there"
    if sent != signal.SIGKILL:
        assert list(target.parent.iterdir()) == [target]
    else:  # the killed process could not clean up: the next run does
        writer._remove_left_over(target)
        assert list(target.parent.iterdir()) == [target]
