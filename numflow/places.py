"""Folders of numflow on this machine: downloaded models, and files made from models that can be made again."""

import errno
import os
import sys
from pathlib import Path

CACHES = ("kernels", "prepared", "quantised")  # what can be made again


def expanded(path: str | os.PathLike) -> Path:
    """A path with the home folder in the place of "~"; one of a user who has none stays as it is."""
    return Path(os.path.expanduser(path))


def home() -> Path:
    """numflow's own folder: $NUMFLOW_HOME, else `numflow` in the user's cache folder of this platform.

    Raises:
        OSError: the user has no home folder, as in some containers, and nothing else names a place.
    """
    if os.environ.get("NUMFLOW_HOME"):
        return expanded(os.environ["NUMFLOW_HOME"]).absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    found = expanded(base)
    if str(found).startswith("~"):
        raise OSError(errno.ENOENT, "this user has no home folder; NUMFLOW_HOME names a place for models and compiled "
                                    "kernels", base)
    return found.absolute() / "numflow"


def cache(kind: str) -> Path:
    """The folder of one of CACHES: in $NUMFLOW_CACHE, else in numflow's own folder."""
    named = os.environ.get("NUMFLOW_CACHE")
    return (expanded(named).absolute() if named else home()) / kind


def make(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone.

    Raises:
        OSError: one of them cannot be made.
    """
    if not folder.is_dir():
        if folder.parent != folder:
            make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
