"""Plain tables whose columns line up, on a terminal of any width and in a pipe; what files say in them is harmless."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

# What commands a terminal instead of being shown: C0 and C1 controls, DEL, changes of direction, halves of pairs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, keep: str = "") -> str:
    """The text with control characters written out, as \\x1b, since it may come from a file that nobody trusts.

    keep: characters that stay as they are, such as line ends.
    """
    def shown(found: re.Match[str]) -> str:
        character = found[0]
        if character in keep:
            return character
        return f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"

    return _CONTROL.sub(shown, str(text))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under headers, two spaces between columns. A header that starts with ">" aligns right."""
    right = [header.startswith(">") for header in headers]
    lines = [[header.removeprefix(">") for header in headers], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [_pad(*cell) for cell in zip(line, widths, right, strict=True)]
        print("  ".join(cells).rstrip())


def print_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """Print "name  value" lines with the values lined up."""
    pairs = [(printable(name), printable(value)) for name, value in fields]
    width = max((_width(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{_pad(name, width, False)}  {value}".rstrip())


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space


def _width(text: str) -> int:
    """Columns that a terminal gives to the text: two for wide East Asian characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
