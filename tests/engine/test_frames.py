"""Frames between the command `numflow generate` and the threads that run kernels: the path that a reader follows."""

import sys
from pathlib import Path

import numflow
from numflow.cli.app import app
from numflow.engine.load import load
from tests.engine.fake import FakeTokenizer
from tests.engine.tiny import write_checkpoint

PACKAGE = Path(numflow.__file__).parent
PATH = [("cli/failures.py", "guarded.<locals>.run"), ("cli/groups.py", "grouped.<locals>.run"),
        ("cli/generate.py", "generate"), ("cli/generate.py", "_show"), ("engine/run/streaming.py", "Stream.__next__"),
        ("engine/run/core.py", "Core.step"), ("engine/runner/runner.py", "Runner.execute"),
        ("cpu/program.py", "Program.run"), ("cpu/runtime/threads.py", "Threads.run")]
GREEDY = [*PATH[:6], ("engine/run/pace.py", "Pace.decode"), ("engine/runner/runner.py", "Runner.decode"),
          ("cpu/program.py", "Program.decode"), PATH[-1]]


class Tokenizer(FakeTokenizer):
    """Few ids, as the tiny model has."""

    def encode(self, text, add_special=True, parse_special=True):
        return [5 + letter % 40 for letter in text.encode()]


def frames(frame) -> tuple[tuple[str, str], ...]:
    """(file, function) of a frame and its callers, outermost first; those of the package only."""
    found = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            found.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(reversed(found))


def test_the_path_to_the_threads_is_short(tmp_path, monkeypatch, capsys):
    model = load(write_checkpoint(tmp_path / "tiny"), threads=2)
    model._load_tokenizer = Tokenizer
    monkeypatch.setattr(numflow, "load", lambda *_, **__: model)
    seen = set()

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_qualname == "Threads.run":
            seen.add(frames(frame))

    sys.setprofile(look)
    try:
        app(["generate", "-m", "tiny", "--raw", "ab", "--max-tokens", "2"], prog_name="numflow")
    except SystemExit as end:
        assert not end.code, capsys.readouterr().err
    finally:
        sys.setprofile(None)
    assert seen == {tuple(PATH), tuple(GREEDY)}
    assert len(PATH) == 9 and len(GREEDY) == 10 and len({file for file, _ in PATH}) == 8
