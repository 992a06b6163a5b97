"""Prefix cache on disk that survives a restart: one file per model, limited in total size."""

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
    """Prefix cache of one model, saved when its engine is closed. nbytes: maximum size of all files in the folder."""

    def __init__(self, sessions: Sessions, nbytes: int):
        self._sessions, self._nbytes = sessions, nbytes
        folder = places.cache(KIND)
        self.path: Path | None = None
        if trust.usable(folder, "kept texts"):
            self.path = folder / f"{digest([json.dumps(sessions.identity, sort_keys=True)])}{ENDING}"

    def load(self) -> int:
        """Load the saved prefix cache; a file that cannot be used gives a warning. Returns the number of tokens."""
        if self.path is None or not trust.readable(self.path):
            return 0
        try:
            return self._sessions.load_cache(self.path)
        except NumflowError as error:
            warnings.warn(f"kept texts are left out: {error}", stacklevel=2)
            return 0

    def save(self) -> None:
        """Save the prefix cache; the oldest files of other models are deleted beyond the limit."""
        if self.path is None:
            return
        try:
            places.make(self.path.parent)
            self._sessions.save_cache(self.path, self._nbytes)
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
                with contextlib.suppress(OSError):  # another process deleted the file first
                    path.unlink()
