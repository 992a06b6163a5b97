"""Plain tables whose columns line up, on a terminal of any width and in a pipe."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under headers, two spaces between columns. A header that starts with ">" aligns right."""
    right = [header.startswith(">") for header in headers]
    lines = [[header.removeprefix(">") for header in headers], *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [_pad(*cell) for cell in zip(line, widths, right, strict=True)]
        print("  ".join(cells).rstrip())


def print_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """Print "name  value" lines with the values lined up."""
    pairs = [(name, str(value)) for name, value in fields]
    width = max((_width(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{_pad(name, width, False)}  {value}".rstrip())


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space


def _width(text: str) -> int:
    """Columns that a terminal gives to the text: two for wide East Asian characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
