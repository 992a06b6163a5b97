"""The recipe of a report: the command that makes it again, and the commit that it was made with."""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CODE = ("numflow", "specs", "experiments", "pyproject.toml")  # of the source tree, what decides about results


def command(name: str, quick: bool, given: Mapping[str, str], dirty: bool = False) -> str:
    """The command with every option that was given, files and folders by the last part of their paths."""
    options = [word for key, value in given.items() for word in ("--set", f"{key}={described(value)}")]
    return shlex.join(["numflow", "experiment", name, *["--quick"] * quick, *["--dirty"] * dirty, *options])


def described(value: Any) -> Any:
    """An option as others can read it: of files and folders of this machine, the last part of their paths."""
    if not isinstance(value, str):
        return value
    return ",".join(Path(part).name if Path(part).is_absolute() else part for part in value.split(","))


def commit() -> str | None:
    """The source tree's commit, with "+" if its code differs from it; None outside of a repository."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str | None:
        try:
            run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    head = git("rev-parse", "--short", "HEAD")
    return None if head is None else head + ("+" if git("status", "--porcelain", "--", *CODE) else "")
