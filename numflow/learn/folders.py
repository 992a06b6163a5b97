"""The student's folder: write a lab's blank file or solution, and keep the old file under another name."""

from pathlib import Path

from numflow.errors import RequestError
from numflow.learn.catalogue import LabFile


def folder_of(lab: LabFile, folder: Path | None) -> Path:
    """The given folder, else labs/NN-NAME."""
    return Path("labs") / lab.label if folder is None else folder


def start(lab: LabFile, folder: Path, again: bool = False) -> Path:
    """Write the lab's blank file into a folder; return its path.

    Raises:
        RequestError: the file exists already, and `again` is False.
    """
    path = folder / lab.file_name
    if path.exists() and not again:
        raise RequestError(f"{path} exists already: --again starts again, and keeps it as {_free_name(path).name}")
    _put(path, lab.blank())
    return path


def solve(lab: LabFile, folder: Path) -> tuple[Path, Path | None]:
    """Write the lab's solution into a folder; return its path, and the new path of the old file or None."""
    path = folder / lab.file_name
    return path, _put(path, lab.solution())


def _put(path: Path, text: str) -> Path | None:
    """Write a file. An old file with other content is renamed; return its new path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    renamed = None
    if path.exists() and path.read_bytes() != text.encode():
        renamed = _free_name(path)
        path.replace(renamed)
    path.write_text(text, encoding="utf-8")
    return renamed


def _free_name(path: Path) -> Path:
    """An unused path for an old file: rope.yours-1.py."""
    number = 1
    while (unused := path.with_name(f"{path.stem}.yours-{number}.py")).exists():
        number += 1
    return unused
