"""Stop strings and marks in a text that comes piece by piece."""

from collections.abc import Iterable


def held_back(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of `text` that may begin one of `marks`, short of all of it."""
    return max((size for mark in marks for size in range(1, min(len(text), len(mark) - 1) + 1)
                if text.endswith(mark[:size])), default=0)
