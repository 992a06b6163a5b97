"""The student's folder: a lab's file put there, blank or solved, and what was there before."""

from pathlib import Path

from numflow.errors import RequestError
from numflow.learn.catalogue import LabFile


def folder_of(lab: LabFile, folder: Path | None) -> Path:
    """The folder that is named, else labs/NN-NAME."""
    return Path("labs") / lab.label if folder is None else folder


def start(lab: LabFile, folder: Path, again: bool = False) -> Path:
    """Put the lab's blank file into a folder; returns its path.

    Raises:
        RequestError: there is one already, and nobody has said `again`.
    """
    path = folder / lab.file_name
    if path.exists() and not again:
        raise RequestError(f"{path} is there already: --again begins anew, and keeps it as {_kept(path).name}")
    _put(path, lab.blank())
    return path


def solve(lab: LabFile, folder: Path) -> tuple[Path, Path | None]:
    """Put the lab's solution into a folder; returns its path, and where what was there is kept."""
    path = folder / lab.file_name
    return path, _put(path, lab.solution())


def _put(path: Path, text: str) -> Path | None:
    """Write a file; another one that was there is kept beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = None
    if path.exists() and path.read_bytes() != text.encode():
        kept = _kept(path)
        path.replace(kept)
    path.write_text(text, encoding="utf-8")
    return kept


def _kept(path: Path) -> Path:
    """A name that is free, for a file that gives way: rope.yours-1.py."""
    number = 1
    while (kept := path.with_name(f"{path.stem}.yours-{number}.py")).exists():
        number += 1
    return kept
