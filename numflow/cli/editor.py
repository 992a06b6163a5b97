"""A line editor for questions at a terminal: several lines, a history kept between runs, completion of commands."""

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

LONGEST = 1 << 20  # bytes of a history; of a longer one the newer half stays
FILES = ("attach", "load", "save")  # commands that a file's name follows


class Editor:
    """Edits one text at a time. Enter sends it, Alt-Enter begins a line, a paste is text with its line ends.

    words: commands with their help, without "/". history: the file of earlier texts; None: of this run alone.
    more: a terminal's input and output, if not this process's own.
    """

    def __init__(self, words: Mapping[str, str], history: Path | None, **more: Any):
        self._session: PromptSession[str] = PromptSession(
            history=_history(history), completer=CommandCompleter(words), complete_while_typing=False,
            multiline=True, prompt_continuation=_continued, key_bindings=_keys(), **more)

    def line(self, prompt: str) -> str:
        """The next text.

        Raises:
            EOFError: Ctrl-D on an empty line. KeyboardInterrupt: Ctrl-C on an empty line.
        """
        return self._session.prompt(prompt)


def _continued(width: int, line: int, wraps: int) -> str:
    """Text before a further line, but not before what a line has too many of."""
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
    """Commands after a "/" that begins the text, and names of files after those that take one."""

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
    """Texts of earlier runs, in a file that this user alone reads; where it cannot be written, those of this run."""
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
    """Drop the older half of a history that has become too long, up to the mark of an entry."""
    content = path.read_bytes()
    if len(content) > LONGEST:
        half = content[-LONGEST // 2:]
        path.write_bytes(half[max(0, half.find(b"\n# ")):])
