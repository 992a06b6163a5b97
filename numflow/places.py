"""Folders of numflow on this machine: downloaded models, and files made from models that can be made again."""

import os
import sys
from pathlib import Path

CACHES = ("kernels", "prepared", "quantised")  # what can be made again


def home() -> Path:
    """numflow's own folder: $NUMFLOW_HOME, else `numflow` in the user's cache folder of this platform."""
    if os.environ.get("NUMFLOW_HOME"):
        return Path(os.environ["NUMFLOW_HOME"]).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "numflow"


def cache(kind: str) -> Path:
    """The folder of one of CACHES: in $NUMFLOW_CACHE, else in numflow's own folder."""
    named = os.environ.get("NUMFLOW_CACHE")
    return (Path(named).expanduser().absolute() if named else home()) / kind


def make(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone.

    Raises:
        OSError: one of them cannot be made.
    """
    if not folder.is_dir():
        if folder.parent != folder:
            make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
