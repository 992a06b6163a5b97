"""Text output of verdicts and measurements."""

from collections.abc import Mapping
from typing import Any

WIDTH = 30  # characters of the longest bar


def verdict_lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts of a check, one per line."""
    lines = [f"lab {facts['lab']}, {facts['title']}: {'passed' if facts['passed'] else 'not yet'}", facts["message"]]
    if facts.get("cause"):
        lines.append(f"This is the result of {facts['cause']}.")
    if facts.get("text"):
        lines.append(f"With your code the model writes: {facts['text']}")
    if facts.get("printed"):
        lines.append(f"Your code printed: {facts['printed'].rstrip()}")
    return lines


def bar_lines(bars: list[tuple[str, float]], unit: str) -> list[str]:
    """Values as a bar chart, one line each."""
    most = max((value for _, value in bars), default=0) or 1
    wide = max((len(label) for label, _ in bars), default=0)
    lines = []
    for label, value in bars:
        bar = "█" * max(1, round(WIDTH * value / most))
        lines.append(f"{label.ljust(wide)}  {bar.ljust(WIDTH)}  {value:.4g} {unit}".rstrip())
    return lines
