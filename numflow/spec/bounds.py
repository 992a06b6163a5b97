"""Limits of a source table on values of a checkpoint's configuration: `words`, `items`, `least`, `most`."""

from collections.abc import Callable, Mapping
from typing import Any

from numflow.errors import quoted

LIMITS = ("words", "items", "least", "most")


def outside(key: str, source: Mapping[str, Any], value: Any, evaluate: Callable[[str, Any], int]) -> str:
    """Error text for the first item of a value outside its source's limits; "" where all items are inside.

    evaluate: evaluates an entry of the source, given its name and its expression, to an integer.
    """
    listed = isinstance(value, (list, tuple)) or ("items" in source and isinstance(value, str))
    if "items" in source:
        texts = source["items"] if isinstance(source["items"], list) else [source["items"]]
        counts = sorted({evaluate("items", text) for text in texts})
        if not listed or len(value) not in counts:
            found = f"has {len(value)}" if listed else f"is {quoted(value)}"
            return f"{key}{{}} {found}; expected a list of {' or '.join(map(str, counts))} items, one for each layer"
    bounds = {name: evaluate(name, source[name]) for name in ("least", "most") if name in source}
    for index, item in enumerate(value if listed else [value]):
        wrong = f"{key}{f'[{index}]' if listed else ''}{{}} is {quoted(item)}; expected"
        if "words" in source and item not in source["words"]:
            words = [str(word) for word in source["words"] if not isinstance(word, bool)] or [
                str(word).lower() for word in source["words"]]
            one_of = "" if len(source["words"]) == 1 and isinstance(source["words"][0], bool) else "one of "
            return f"{wrong} {one_of}{', '.join(words)}"
        integer = isinstance(item, (int, float)) and not isinstance(item, bool) and item == item // 1
        if bounds and not (integer and bounds.get("least", item) <= item <= bounds.get("most", item)):
            return f"{wrong} {_range(bounds)}"
    return ""


def _range(bounds: Mapping[str, int]) -> str:
    if len(bounds) == 2:
        return f"a whole number from {bounds['least']} to {bounds['most']}"
    return f"a whole number of {bounds['least']} or more" if "least" in bounds else \
        f"a whole number up to {bounds['most']}"
