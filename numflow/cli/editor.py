"""A line editor for questions at a terminal: multi-line texts, a history file, completion of commands and files."""

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from numflow import places

LONGEST = 1 << 20  # bytes; a longer history file is cut to its newest LONGEST / 2 bytes
FILES = ("attach", "load", "save")  # commands whose argument is a file name


class Editor:
    """Editor of one text at a time. Enter sends the text, Alt-Enter starts a new line, a paste keeps its line ends.

    words: commands with their help, without "/". history: the history file; None: keep the history in memory.
    more: the terminal's input and output for PromptSession, if not the terminal of this process.
    """

    def __init__(self, words: Mapping[str, str], history: Path | None, **more: Any):
        self._session: PromptSession[str] = PromptSession(
            history=_history(history), completer=CommandCompleter(words), complete_while_typing=False,
            multiline=True, prompt_continuation=_continued, key_bindings=_keys(), **more)

    def line(self, prompt: str) -> str:
        """Read the next text.

        Raises:
            EOFError: Ctrl-D on an empty line. KeyboardInterrupt: Ctrl-C on an empty line.
        """
        return self._session.prompt(prompt)


def _continued(width: int, line: int, wraps: int) -> str:
    """Prompt of a continuation line; "" for the rest of a wrapped line."""
    return "" if wraps else "... "


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


class CommandCompleter(Completer):
    """Completes commands after a leading "/", and file names after commands that take one."""

    def __init__(self, words: Mapping[str, str]):
        self._words, self._paths = words, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Completions of the text before the cursor."""
        text = document.text_before_cursor
        word, space, rest = text.removeprefix("/").partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not space:
            yield from (Completion(name, -len(word), display=f"/{name}", display_meta=help)
                        for name, help in self._words.items() if name.startswith(word))
        elif word in FILES:
            yield from self._paths.get_completions(Document(rest), complete_event)


def _history(path: Path | None) -> History:
    """The history of earlier runs, in a file with mode 600; an in-memory history if the file cannot be written."""
    if path is None:
        return InMemoryHistory()
    try:
        places.make(path.parent)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        _shorten(path)
    except OSError as error:
        print(f"questions are not kept for the next time: {path}: {error.strerror}", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(str(path))


def _shorten(path: Path) -> None:
    """Cut a history file that is longer than LONGEST to its newest half, starting at an entry."""
    content = path.read_bytes()
    if len(content) > LONGEST:
        half = content[-LONGEST // 2:]
        path.write_bytes(half[max(0, half.find(b"\n# ")):])
