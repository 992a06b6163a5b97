"""Where models are kept on this machine, and whether the network may be used."""

import os
import sys
from pathlib import Path


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


def models_dir() -> Path:
    """The folder of downloaded models: one folder per model, by its registry name."""
    return home() / "models"


def user_catalogue() -> Path:
    """The user's own list of models, in the form of models.toml; it need not exist."""
    return home() / "models.toml"


def is_offline(flag: bool = False) -> bool:
    """Whether the network must not be touched: by argument, or by $NUMFLOW_OFFLINE (1, true, yes or on)."""
    return flag or os.environ.get("NUMFLOW_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")
