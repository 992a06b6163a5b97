"""`--session FILE`: the KV cache of a text is restored from a file, and saved to the file after the text has grown."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numflow.errors import RequestError


class CommandSession:
    """The session file of a command.

    note: the note in the file; None for a new file. stats: report restored and saved tokens on standard error.
    sessions: the OpenSessions of the loaded model.
    """

    def __init__(self, sessions: Any, path: Path, stats: bool):
        from numflow.formats.writer import check_place, found

        self.sessions, self._path, self._stats = sessions, path, stats
        self.note: Any = None
        check_place(path)
        if found(path):
            restored = sessions.restore(path)
            self.note = restored.note
            self._report(f"{restored.cached} of {restored.tokens} tokens are restored from {path}")

    def save(self, note: Any = None) -> None:
        """Save the text that ran last.

        Raises:
            RequestError: the file cannot be written.
        """
        saved = self.sessions.save(self._path, note=note)
        self._report(f"{saved.cached} of {saved.tokens} tokens are saved in {self._path}")

    def _report(self, line: str) -> None:
        if self._stats:
            print(line, file=sys.stderr)


@contextmanager
def session(model: Any, path: Path | None, stats: bool = False) -> Iterator[CommandSession | None]:
    """A context in which the model keeps the KV cache of its texts; yields None without a path.

    Raises:
        RequestError: the file is no session of this model, or the model cannot save its state.
    """
    if path is None:
        yield None
        return
    from numflow.engine.sessions.sessions import OpenSessions

    if not model.is_decoder:
        raise RequestError(f"{model.network.name} is no decoder: --session has no KV cache to save")
    with OpenSessions(model) as sessions:
        yield CommandSession(sessions, path, stats)
