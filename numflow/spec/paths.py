"""The folder of specification files."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def specs_dir() -> Path:
    """The folder of shipped specs: the copy inside an installed numflow, else `specs/` of the checkout."""
    installed = _PACKAGE / "_specs"
    return installed if installed.is_dir() else _PACKAGE.parent / "specs"
