"""A prefix cache that survives a restart: a file for each model, all of them within a budget on the disk."""

import contextlib
import json
import warnings
from pathlib import Path

from numflow import places, trust
from numflow.engine.sessions.sessions import Sessions
from numflow.errors import NumflowError
from numflow.formats.kept import digest

KIND, ENDING = "prefixes", ".session"


class DiskCache:
    """The prefix cache of one model as it was when its last engine was closed. nbytes: of all files of the folder."""

    def __init__(self, sessions: Sessions, nbytes: int):
        self._sessions, self._nbytes = sessions, nbytes
        folder = places.cache(KIND)
        self.path: Path | None = None
        if trust.usable(folder, "kept texts"):
            self.path = folder / f"{digest([json.dumps(sessions.identity, sort_keys=True)])}{ENDING}"

    def take_up(self) -> int:
        """Let the prefix cache have what is there. A file of no use is left out, with a warning. Returns the
        tokens."""
        if self.path is None or not trust.readable(self.path):
            return 0
        try:
            return self._sessions.take_up(self.path)
        except NumflowError as error:
            warnings.warn(f"kept texts are left out: {error}", stacklevel=2)
            return 0

    def keep(self) -> None:
        """Write the prefix cache; the oldest files of other models make room."""
        if self.path is None:
            return
        try:
            places.make(self.path.parent)
            self._sessions.keep(self.path, self._nbytes)
            self._prune()
        except (OSError, NumflowError) as error:
            warnings.warn(f"texts cannot be kept: {error}", stacklevel=2)

    def _prune(self) -> None:
        assert self.path is not None
        found = sorted(((path.stat(), path) for path in self.path.parent.glob(f"*{ENDING}")),
                       key=lambda pair: -pair[0].st_mtime)
        taken = 0
        for stat, path in found:
            taken += stat.st_size
            if taken > self._nbytes and path != self.path:
                with contextlib.suppress(OSError):  # another process was faster
                    path.unlink()
