"""`chat` at a terminal: the line editor, and how answers are drawn."""

import io
import json
import os
import stat

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from numflow.cli.answers import DrawnAnswer
from numflow.cli.conversation import COMMANDS
from numflow.cli.editor import LONGEST, CommandCompleter, Editor
from numflow.cli.keyboard import Keyboard
from numflow.server.messages.reply import ReplyPart, Splitter

pyte = pytest.importorskip("pyte")
pytest.importorskip("pty")
WORDS = {word: about for word, (_, about) in COMMANDS.items()}
PASTE = "\x1b[200~{}\x1b[201~"


@pytest.fixture
def keys():
    """An in-memory keyboard, and the Keyboard that reads from it with a history file."""
    with create_pipe_input() as pipe:
        def keyboard(history=None):
            return Keyboard(True, Editor(WORDS, history, input=pipe, output=DummyOutput()).line)

        yield pipe, keyboard


def test_lines_pastes_and_new_lines(keys):
    pipe, keyboard = keys
    pipe.send_text("helo\x1b[Dl\r" + PASTE.format("/undo\n two\nthree") + "!\r" + "a\x1b\rb\r" + '"""x\ry"""\r')
    ready = keyboard()
    assert [ready.question() for _ in range(4)] == ["hello", "/undo\n two\nthree!", "a\nb", "x\ny"]


def test_ctrl_c_clears_then_leaves_and_ctrl_d_ends(keys, capsys):
    pipe, keyboard = keys
    pipe.send_text("wrong\x03right\r\x03kept\r\x04")
    ready = keyboard()
    assert [ready.question() for _ in range(2)] == ["right", "kept"]
    assert capsys.readouterr().err.count("Ctrl-C again or Ctrl-D exits") == 1
    assert ready.question() is None
    pipe.send_text("text\x03\x03\x03")
    with pytest.raises(KeyboardInterrupt):
        ready.question()


def test_history_is_kept_between_runs_for_this_user_alone(keys, tmp_path):
    pipe, keyboard = keys
    file = tmp_path / "home" / "history"
    pipe.send_text("first\r" + PASTE.format("two\nlines") + "\r")
    ready = keyboard(file)
    assert [ready.question(), ready.question()] == ["first", "two\nlines"]
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert list(FileHistory(str(file)).load_history_strings()) == ["two\nlines", "first"]


def test_a_long_history_is_shortened_and_one_that_cannot_be_written_is_told(keys, tmp_path, capsys):
    pipe, keyboard = keys
    file = tmp_path / "history"
    file.write_text("".join(f"\n# time\n+{n} {'x' * 1000}\n" for n in range(LONGEST // 1000)))
    keyboard(file)
    kept = file.read_text()
    assert LONGEST // 2 - 2000 < len(kept) <= LONGEST // 2 and kept.startswith("\n# time\n+")
    (tmp_path / "file").write_text("")
    pipe.send_text("works\r")
    assert keyboard(tmp_path / "file" / "history").question() == "works"
    assert "questions are not kept for the next time" in capsys.readouterr().err


def test_commands_and_files_are_completed(tmp_path):
    (tmp_path / "notes.md").write_text("")

    def completed(text: str) -> list[str]:
        found = CommandCompleter(WORDS).get_completions(Document(text), CompleteEvent())
        return [text[:len(text) + one.start_position] + one.text for one in found]

    assert completed("/s") == ["/system", "/set", "/save", "/stats"]
    assert completed(f"/attach {tmp_path}/no") == [f"/attach {tmp_path}/notes.md"]
    assert completed(f"say {tmp_path}/no") == completed("what") == completed("one\n/s") == []


class Seen(io.StringIO):
    """A terminal's screen with its whole scrollback."""

    def __init__(self, width: int, height: int):
        super().__init__()
        self.screen = pyte.HistoryScreen(width, height, history=1000)
        self._stream, self.width, self.height = pyte.Stream(self.screen), width, height

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def rows(self) -> list[str]:
        above = ["".join(row[at].data for at in range(self.width)) for row in self.screen.history.top]
        found = [row.rstrip() for row in [*above, *self.screen.display]]
        while found and not found[-1]:
            found.pop()
        return found


def drawn(text: str, pieces: int, width=40, height=12, monkeypatch=None) -> list[str]:
    seen = Seen(width, height)
    answer = DrawnAnswer(Console(file=seen, force_terminal=True, width=width, height=height, highlight=False))
    splitter = Splitter()
    for at in range(0, len(text), pieces):
        answer.take(text[at:at + pieces], splitter.feed(text[at:at + pieces]))
    answer.take("", splitter.feed("", end=True))
    answer.end()
    return seen.rows()


MARKDOWN = """# Rivers

Some words that are **long enough** to be wrapped at forty columns,
and a line of its own with <b>tags</b> and `code`.

1. one
2. two
   - inner

```python
def f(x):
    return x + 1
```

| a | b |
|---|---|
| 1 | 2 |

""" + "".join(f"line {n}\n" for n in range(16)) + "\n    last\n"


@pytest.mark.parametrize("pieces", [3, 10_000])
def test_an_answer_looks_the_same_however_it_comes(pieces, monkeypatch):
    monkeypatch.setattr("numflow.cli.answers.FRAME", 0.0)
    rows = drawn(MARKDOWN, pieces)
    assert rows == drawn(MARKDOWN, 100_000)
    text = "\n".join(rows)
    assert rows[:6] == ["Rivers", "", "Some words that are long enough to be", "wrapped at forty columns,",
                        "and a line of its own with <b>tags</b>", "and code."]
    assert " 1 one\n 2 two\n    • inner\n\n  def f(x):\n      return x + 1\n\n" in text
    assert "def f(x):" in text and "```" not in text and "**" not in text
    assert [row.strip() for row in rows if row.strip().startswith("line ")] == [f"line {n}" for n in range(16)]


def test_thinking_is_folded_into_a_line(monkeypatch):
    monkeypatch.setattr("numflow.cli.answers.FRAME", 0.0)
    rows = drawn("<think>\nfirst this, then that\n</think>\n\nThe answer", 3, width=60)
    assert rows[0].startswith("(thought for ") and rows[0].endswith("s, 4 words: /think shows them)")
    assert rows[1:] == ["The answer"]


def test_a_model_cannot_command_the_terminal():
    rows = drawn("a \x1b[2J\x1b]0;title\x07 b \x9b31m", 4)
    assert rows == ["a \\x1b[2J\\x1b]0;title\\x07 b \\x9b31m"]


def test_no_color_is_kept(monkeypatch):
    text = "Some `code` and\n\n```python\nx = 1\n```\n"
    for colours in (True, False):
        if colours:
            monkeypatch.delenv("NO_COLOR", raising=False)  # rich < 14 takes an empty NO_COLOR for a set one
        else:
            monkeypatch.setenv("NO_COLOR", "1")
        file = io.StringIO()
        terminal = dict(os.environ, TERM="xterm-256color")
        answer = DrawnAnswer(Console(file=file, force_terminal=True, width=60, _environ=terminal))
        answer.take(text, [ReplyPart("content", text)])
        answer.end()
        assert ("\x1b[9" in file.getvalue() or "\x1b[3" in file.getvalue()) is colours


ANSWER = "<think>\nto greet\n</think>\n\nSome **bold** words, `code`,\nand a line.\n"
CHAT = ("tests/cli/chat_at_terminal.py", ANSWER, "chat", "-m", "fake")


@pytest.mark.merge
def test_a_conversation_at_a_terminal(tmp_path):
    from tests.cli.typist import Typist

    (tmp_path / "notes.md").write_text("facts")
    home = {"NUMFLOW_HOME": str(tmp_path / "home")}
    first = Typist(*CHAT, **home)
    try:
        first.wait_until(lambda rows: rows[-1:] == [">"])
        first.type(b"wrong\x03" + PASTE.format("one\ntwo").encode())
        first.wait_until(lambda rows: rows[-2:] == ["> one", "... two"])
        first.type(b"\r")
        first.wait_until(lambda rows: rows[-1:] == [">"] and rows[-3:-1] == ["Some bold words, code,", "and a line."])
        assert first.screen[-4].startswith("(thought for ") and "**" not in "".join(first.screen)
        bold = next(row for row in first.cells if row[0].data == "S")[5]
        assert bold.data == "b" and bold.bold
        first.type(b"/think\r")
        first.wait_until(lambda rows: rows[-2:] == ["to greet", ">"])
        first.type(f"/attach {tmp_path}/notes.md\rsum up\r/save {tmp_path}/talk.json\r/exit\r".encode())
        first.wait_for(b"(2 turns in")
    finally:
        first.close()
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    answer = "Some **bold** words, `code`,\nand a line.\n"
    assert [one["content"] for one in saved] == [
        "one\ntwo", answer, "sum up\n\nnotes.md:\n```\nfacts\n```", answer]
    second = Typist(*CHAT, **home)
    try:
        second.wait_until(lambda rows: rows[-1:] == [">"])
        for _ in range(20):  # earlier questions are read in the background
            before = second.screen
            second.type(b"\x1b[A")
            while second.read(3) and second.screen == before:
                pass
            if second.screen[-1] == "> sum up":
                break
        assert second.screen[-1] == "> sum up"
        second.type(b"\x03\x03\x03")
        second.wait_for(b"interrupted")
    finally:
        second.close()
