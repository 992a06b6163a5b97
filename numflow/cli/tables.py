"""Plain-text tables with aligned columns, for terminals and pipes. Control characters in cells are escaped."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

# Characters that control a terminal: C0 and C1 controls, DEL, changes of text direction; and lone surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, keep: str = "") -> str:
    """The text with control characters escaped (\\x1b), since the text may come from an untrusted file.

    keep: characters that are not escaped, such as line ends.
    """
    def shown(found: re.Match[str]) -> str:
        character = found[0]
        if character in keep:
            return character
        return f"\\x{ord(character):02x}" if ord(character) < 0x100 else f"\\u{ord(character):04x}"

    return _CONTROL.sub(shown, str(text))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under headers, two spaces between columns. A header with a leading ">" aligns its column right."""
    right = [header.startswith(">") for header in headers]
    lines = [[header.removeprefix(">") for header in headers], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [_pad(*cell) for cell in zip(line, widths, right, strict=True)]
        print("  ".join(cells).rstrip())


def print_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """Print "name  value" lines with the values aligned."""
    pairs = [(printable(name), printable(value)) for name, value in fields]
    width = max((_width(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{_pad(name, width, False)}  {value}".rstrip())


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space


def _width(text: str) -> int:
    """Width of a text in terminal columns: 2 for a wide East Asian character, 0 for a combining one."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
