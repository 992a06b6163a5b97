"""Folders of models on this machine, and offline mode."""

import os
from pathlib import Path

from numflow.places import home

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_models() -> Path:
    """The folder of models that come with numflow."""
    return _PACKAGE / "learn" / "models" / "trained"


def models_dir() -> Path:
    """The folder of downloaded models: one folder per model, by its registry name."""
    return home() / "models"


def user_catalogue() -> Path:
    """The user's list of models, in the form of models.toml; the file need not exist."""
    return home() / "models.toml"


def is_offline(flag: bool = False) -> bool:
    """Whether the network must not be used: by argument, or by $NUMFLOW_OFFLINE (1, true, yes or on)."""
    return flag or os.environ.get("NUMFLOW_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")
