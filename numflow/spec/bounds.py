"""Limits that a source table sets to what a checkpoint's configuration says: `words`, `items`, `least`, `most`."""

from collections.abc import Callable, Mapping
from typing import Any

from numflow.errors import quoted

LIMITS = ("words", "items", "least", "most")


def outside(key: str, source: Mapping[str, Any], value: Any, number: Callable[[str, Any], int]) -> str:
    """The place in a value that is outside its source's limits, with what was expected there; "" where all fit.

    number: the whole number that an entry of the source stands for, given its name and the entry (an expression).
    """
    listed = isinstance(value, (list, tuple)) or ("items" in source and isinstance(value, str))
    if "items" in source:
        texts = source["items"] if isinstance(source["items"], list) else [source["items"]]
        counts = sorted({number("items", text) for text in texts})
        if not listed or len(value) not in counts:
            found = f"has {len(value)}" if listed else f"is {quoted(value)}"
            return f"{key}{{}} {found}; expected a list of {' or '.join(map(str, counts))} items, one for each layer"
    bounds = {name: number(name, source[name]) for name in ("least", "most") if name in source}
    for at, item in enumerate(value if listed else [value]):
        place = f"{key}[{at}]{{}} is {quoted(item)}; expected" if listed else f"{key}{{}} is {quoted(item)}; expected"
        if "words" in source and item not in source["words"]:
            words = ", ".join(str(word) for word in source["words"] if not isinstance(word, bool))
            return f"{place} one of {words}" if words else f"{place} {str(source['words'][0]).lower()}"
        whole = isinstance(item, (int, float)) and not isinstance(item, bool) and item == item // 1
        if bounds and not (whole and bounds.get("least", item) <= item <= bounds.get("most", item)):
            return f"{place} {_range(bounds)}"
    return ""


def _range(bounds: Mapping[str, int]) -> str:
    if len(bounds) == 2:
        return f"a whole number from {bounds['least']} to {bounds['most']}"
    return f"a whole number of {bounds['least']} or more" if "least" in bounds else \
        f"a whole number up to {bounds['most']}"
