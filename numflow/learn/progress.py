"""The user's progress in one file of numflow's home folder: labs started and passed, attempts, hints seen."""

import json
import os
from pathlib import Path
from typing import Any

from numflow import places

NEW, STARTED, PASSED = "new", "started", "passed"


def path() -> Path:
    """Path of the progress file."""
    return places.home() / "learn.json"


def progress() -> dict[str, dict[str, Any]]:
    """State, attempts and hints by lab; empty if the file is missing or no progress file."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: row for name, row in found.items() if isinstance(row, dict)} if isinstance(found, dict) else {}


def state(name: str) -> dict[str, Any]:
    """State, attempts and hints of one lab."""
    row = progress().get(name, {})
    status = row.get("state") if row.get("state") in (STARTED, PASSED) else NEW
    return {"state": status, **{key: row[key] if isinstance(row.get(key), int) else 0 for key in ("attempts", "hints")}}


def note(name: str, **changes: Any) -> None:
    """Change the stored progress of a lab.

    Raises:
        OSError: the file cannot be written.
    """
    stored = progress()
    stored[name] = {**state(name), **changes}
    places.make(path().parent)
    temporary = path().with_name(f"learn.json.{os.getpid()}.part")
    temporary.write_text(json.dumps(stored, indent=1), encoding="utf-8")
    temporary.replace(path())
