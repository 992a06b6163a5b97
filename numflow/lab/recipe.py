"""The recipe of a report: the command that reproduces it, and its commit."""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CODE = ("numflow", "specs", "experiments", "pyproject.toml")  # parts of the source tree that results depend on


def command(name: str, quick: bool, given: Mapping[str, str], dirty: bool = False) -> str:
    """The command with all given options; paths are shortened to their last part."""
    options = [word for key, value in given.items() for word in ("--set", f"{key}={described(value)}")]
    return shlex.join(["numflow", "experiment", name, *["--quick"] * quick, *["--dirty"] * dirty, *options])


def described(value: Any) -> Any:
    """The value of an option, with absolute paths shortened to their last part."""
    if not isinstance(value, str):
        return value
    return ",".join(Path(part).name if Path(part).is_absolute() else part for part in value.split(","))


def commit() -> str | None:
    """The source tree's commit, with "+" if the code has uncommitted changes; None outside of a repository."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str | None:
        try:
            run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    head = git("rev-parse", "--short", "HEAD")
    return None if head is None else head + ("+" if git("status", "--porcelain", "--", *CODE) else "")
