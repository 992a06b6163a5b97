"""Folders of numflow on this machine: downloaded models, and caches."""

import errno
import os
import sys
from pathlib import Path

CACHES = ("kernels", "prepared", "quantised")  # kinds of cached files


def expanded(path: str | os.PathLike) -> Path:
    """Path with "~" replaced by the home folder; unchanged if the user has no home folder."""
    return Path(os.path.expanduser(path))


def home() -> Path:
    """numflow's folder: $NUMFLOW_HOME, else `numflow` in the user's cache folder of this platform.

    Raises:
        OSError: the user has no home folder, as in some containers, and no variable names a folder.
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
    """Folder of a kind of cached files: in $NUMFLOW_CACHE, else in numflow's folder."""
    named = os.environ.get("NUMFLOW_CACHE")
    return (expanded(named).absolute() if named else home()) / kind


def make(folder: Path) -> None:
    """Create a folder and its missing parents, accessible to this user only.

    Raises:
        OSError: a folder cannot be created.
    """
    if not folder.is_dir():
        if folder.parent != folder:
            make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
