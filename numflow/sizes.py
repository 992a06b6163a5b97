"""Sizes of memory as text: "24GB", "1.5 GiB", "512m"."""

import re

from numflow.errors import RequestError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30,
          "ti": 1 << 40}


def parse_bytes(size: int | float | str, what: str = "memory") -> int:
    """Parse a number of bytes, or text with a unit. what: name of the value in messages.

    Raises:
        RequestError: no valid size.
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and 1 <= size < float("inf"):
        return int(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", size.lower()) if isinstance(size, str) else None
    if match is None or not (count := int(float(match[1]) * _UNITS[match[2]])):
        raise RequestError(f'{what} should be a size such as "24GB" or "512MiB", is {size!r}')
    return count


def in_words(size: float) -> str:
    """Bytes as text: "4.2 GB", "310 MB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}" if size < 10 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} bytes"
