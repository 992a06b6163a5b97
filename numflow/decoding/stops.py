"""Stop strings and markers in streamed text."""

from collections.abc import Iterable


def held_back(text: str, marks: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `marks`."""
    return max((size for mark in marks for size in range(1, min(len(text), len(mark) - 1) + 1)
                if text.endswith(mark[:size])), default=0)
