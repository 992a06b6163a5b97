"""Every failure prints one line on standard error and has an exit code."""

import os
import subprocess
import sys

import numpy as np
import pytest
import typer

from numflow.cli.failures import guarded
from numflow.errors import FormatError
from tests.conftest import REPO
from tests.quant.small import write_model


def fail_with(error):
    @guarded
    def command():
        raise error

    return command


@pytest.mark.parametrize("error, code, line", [
    (FormatError("x.gguf: cut off\n at byte 12"), 1, "error: x.gguf: cut off at byte 12"),
    (FormatError("x.gguf: no tensor a\x1b[31mb\x9b"), 1, r"error: x.gguf: no tensor a\x1b[31mb\x9b"),
    (OSError(28, "No space left on device"), 1, "error: No space left on device"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (PermissionError(13, "Permission denied", "x.gguf"), 1, "error: x.gguf: Permission denied"),
    (MemoryError(), 1, "error: out of memory; a smaller model, a shorter prompt or fewer new tokens need less"),
    (ZeroDivisionError("division by zero"), 1, "error: unexpected ZeroDivisionError: division by zero (a bug in "
     "numflow: please report it with the traceback that NUMFLOW_DEBUG=1 shows)")])
def test_one_line_and_a_code(error, code, line, capsys, monkeypatch):
    monkeypatch.delenv("NUMFLOW_DEBUG", raising=False)
    with pytest.raises(typer.Exit) as end:
        fail_with(error)()
    assert end.value.exit_code == code
    assert capsys.readouterr() == ("", line + "\n")


@pytest.mark.parametrize("error", [FormatError("x"), KeyboardInterrupt(), ZeroDivisionError("y")])
def test_debugging_keeps_the_traceback(error, monkeypatch):
    monkeypatch.setenv("NUMFLOW_DEBUG", "1")
    with pytest.raises(type(error)):
        fail_with(error)()


def test_an_exit_is_not_a_failure(capsys):
    with pytest.raises(typer.Exit) as end:
        fail_with(typer.Exit(3))()
    assert end.value.exit_code == 3
    assert capsys.readouterr() == ("", "")


def numflow(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "numflow", *arguments], cwd=REPO, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes differ")
def test_a_reader_that_leaves_is_no_error():
    process = numflow("models", env={**os.environ, "NUMFLOW_HOME": os.devnull + "/none"})
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 141


def test_an_error_in_a_process_of_its_own():
    out, err = (process := numflow("generate", "-m", "./gone.gguf", "text")).communicate(timeout=60)
    assert (process.returncode, out, err) == (1, "", "error: no file or folder gone.gguf\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [["models"], ["--help"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.thin(3)
def test_a_full_disk_behind_standard_output(arguments, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "numflow", *arguments], cwd=REPO, text=True, stdout=full,
                              stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")


def test_standard_output_may_be_closed():
    command = f'"{sys.executable}" -m numflow --version >&-'
    done = subprocess.run(command, cwd=REPO, text=True, shell=True, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", [("generate", "hello"), ("perplexity", "--text", "TEXT", "--context", 8)])
@pytest.mark.thin(2)
def test_weights_that_are_no_numbers_are_named(run, tmp_path, command):
    name = "model.layers.0.self_attn.v_proj.weight"
    folder = write_model(tmp_path / "bad", change=lambda t: t[name].__setitem__((2, 7), np.nan))
    (tmp_path / "text").write_text("who is there? " * 9)
    done = run(*(str(tmp_path / "text") if word == "TEXT" else word for word in command), "-m", folder)
    assert (done.code, done.err.strip().splitlines()[-1]) == (
        1, f"error: the model's logits are not finite numbers: tensor '{name}' has nan in row 2, column 7; its file is "
           "damaged, or was written so") and "Traceback" not in done.err
