"""Standard input as a file, a pipe, a silent pipe or closed, on real file descriptors."""

import os
import sys

import pytest

from numflow.cli import inputs
from numflow.cli.inputs import piped_text, read_lines, read_prompt
from numflow.errors import RequestError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors of POSIX")


@pytest.fixture
def stdin(monkeypatch):
    """Make an open descriptor standard input; all descriptors are closed after the test."""
    opened = []

    def use(descriptor):
        stream = os.fdopen(descriptor, encoding="utf-8")
        opened.append(stream)
        monkeypatch.setattr(sys, "stdin", stream)

    yield use
    for stream in opened:
        stream.close()


@pytest.fixture
def pipe(stdin):
    """The write end of a pipe whose read end is standard input."""
    reading, writing = os.pipe()
    stdin(reading)
    return os.fdopen(writing, "wb")


def test_a_file(stdin, tmp_path):
    (tmp_path / "text").write_text("from a file\n")
    stdin(os.open(tmp_path / "text", os.O_RDONLY))
    assert read_prompt("Sum up:", None, "x") == "Sum up:\n\nfrom a file"


def test_a_pipe(pipe):
    pipe.write(b"piped\nlines")
    pipe.close()
    assert read_lines(["one"], None) == ["one", "piped", "lines"]


def test_a_pipe_that_never_closes_and_never_speaks_is_left(pipe, monkeypatch, capsys):
    monkeypatch.setattr(inputs, "PATIENCE", 0.01)
    assert read_prompt("Say hello", None, "x") == "Say hello"
    assert capsys.readouterr().err.startswith("no data on standard input in ")
    pipe.close()


def test_who_asks_for_a_pipe_waits_for_it(pipe, monkeypatch):
    monkeypatch.setattr(inputs, "PATIENCE", 0.0)
    waited = []

    def write_when_waited_for(descriptor, seconds):
        waited.append(seconds)
        pipe.write(b"late")
        pipe.close()

    monkeypatch.setattr(inputs, "_readable", write_when_waited_for)
    os.set_blocking(sys.stdin.fileno(), False)
    assert read_prompt("Sum up:", "-", "x") == "Sum up:\n\nlate"
    assert waited == [None]


@pytest.mark.parametrize("path, flags", [(os.devnull, os.O_RDONLY), (".", os.O_RDONLY), (os.devnull, os.O_WRONLY)])
def test_what_gives_nothing_is_nothing(monkeypatch, path, flags):
    descriptor = os.open(path, flags)
    stream = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    monkeypatch.setattr(sys, "stdin", stream)
    assert read_prompt("Say hello", None, "x") == "Say hello"
    stream.close()


def test_a_file_that_cannot_be_read_is_nothing(monkeypatch, tmp_path):
    stream = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    monkeypatch.setattr(sys, "stdin", stream)
    assert piped_text() == ""
    stream.close()


def test_no_standard_input_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompt("Say hello", None, "x") == "Say hello"
    with pytest.raises(RequestError, match="no prompt"):
        read_prompt(None, None, "x")
    with pytest.raises(RequestError, match="no text"):
        read_lines([], None)


def test_bytes_that_are_no_text_are_refused(pipe):
    pipe.write(b"caf\xe9")
    pipe.close()
    with pytest.raises(RequestError, match=r"standard input: not UTF-8 text \(byte 3\)"):
        read_prompt("Sum up:", None, "x")
