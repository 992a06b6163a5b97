"""`--session FILE`: a text's keys and values are taken up from a file, and written to it when the text has grown."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numflow.errors import RequestError


class CommandSession:
    """The session of a command. note: found in the file, None where it is new. stats: tell on standard error what is
    found and kept. sessions: of the model that runs."""

    def __init__(self, sessions: Any, path: Path, stats: bool):
        from numflow.formats.writer import check_place, found

        self.sessions, self._path, self._stats = sessions, path, stats
        self.note: Any = None
        check_place(path)
        if found(path):
            taken = sessions.restore(path)
            self.note = taken.note
            self._tell(f"{taken.cached} of {taken.tokens} tokens are there from {path}")

    def save(self, note: Any = None) -> None:
        """Write the text that ran last.

        Raises:
            RequestError: it cannot be written.
        """
        kept = self.sessions.save(self._path, note=note)
        self._tell(f"{kept.cached} of {kept.tokens} tokens are kept in {self._path}")

    def _tell(self, line: str) -> None:
        if self._stats:
            print(line, file=sys.stderr)


@contextmanager
def session(model: Any, path: Path | None, stats: bool = False) -> Iterator[CommandSession | None]:
    """The session of a block in which the model remembers its texts; None without a path.

    Raises:
        RequestError: the file is no session of this model, or the model's texts cannot be saved.
    """
    if path is None:
        yield None
        return
    from numflow.engine.sessions.sessions import OpenSessions

    if not model.is_decoder:
        raise RequestError(f"{model.network.name} is no decoder: its texts cannot be gone on from")
    with OpenSessions(model) as sessions:
        yield CommandSession(sessions, path, stats)
