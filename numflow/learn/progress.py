"""The user's progress: labs started, attempts, hints seen and labs passed, in one file of numflow's own folder."""

import json
import os
from pathlib import Path
from typing import Any

from numflow import places

NEW, STARTED, PASSED = "new", "started", "passed"


def path() -> Path:
    """The file."""
    return places.home() / "learn.json"


def progress() -> dict[str, dict[str, Any]]:
    """By lab: state, attempts, hints seen. A file that is none of ours counts as none."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: row for name, row in found.items() if isinstance(row, dict)} if isinstance(found, dict) else {}


def state(name: str) -> dict[str, Any]:
    """Of one lab."""
    row = progress().get(name, {})
    known = row.get("state") if row.get("state") in (STARTED, PASSED) else NEW
    return {"state": known, **{key: row[key] if isinstance(row.get(key), int) else 0 for key in ("attempts", "hints")}}


def note(name: str, **changes: Any) -> None:
    """Change what is known of a lab.

    Raises:
        OSError: the file cannot be written.
    """
    known = progress()
    known[name] = {**state(name), **changes}
    places.make(path().parent)
    temporary = path().with_name(f"learn.json.{os.getpid()}.part")
    temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
    temporary.replace(path())
