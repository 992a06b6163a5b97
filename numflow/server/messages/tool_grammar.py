"""A grammar for answers of a model that is shown tools in text: either any text, or calls whose arguments fit their
schemas. What is chosen is the model's affair."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SPACE = r"\s{0,8}"  # as much white space as a call may have at a place
_ANY = {"type": "object"}


def _opening(space: str) -> str:
    """A call up to the quote before the function's name."""
    return rf'{space}\{{{space}("type"{space}:{space}"function"{space},{space})?"name"{space}:{space}"'


def calls_or_text(functions: Sequence[Mapping[str, Any]], several: bool) -> str:
    """The grammar, as llguidance takes it. functions: name and parameters of each. several: more than one call.

    A text that begins as a call of one of the functions goes on as one; the first bytes of both are the same, so each
    beginning of a call is one lexeme, that ends where the text cannot go on as anything else.
    """
    names = [re.escape(function["name"]) for function in functions]
    places = range(len(functions))
    call, first = (" | ".join(f"{kind}{at}" for at in places) for kind in ("call", "first"))
    rules = [f"start: TEXT | {'call+' if several else 'call'} | first {'(/,/ call)*' if several else ''} /{_SPACE}\\]/",
             f"call: {call}", f"first: {first}"]
    for at, (name, function) in enumerate(zip(names, functions, strict=True)):
        schema = {"x-guidance": {"whitespace_flexible": False}, **(function.get("parameters") or _ANY)}
        rules += [f"call{at}: OPEN{at} rest{at}", f"first{at}: LIST{at} rest{at}",
                  f"OPEN{at}: /{_opening(_SPACE)}{name}\"/", f"LIST{at}: /{_SPACE}\\[{_opening(_SPACE)}{name}\"/",
                  f'rest{at}: /{_SPACE},{_SPACE}"(arguments|parameters)"{_SPACE}:{_SPACE}/ %json {json.dumps(schema)} '
                  f"/{_SPACE}\\}}/"]
    space = r"\s*"
    return "\n".join([*rules, rf'TEXT: /(?s:.*)/ & ~/{space}\[?{_opening(space)}({"|".join(names)})"(?s:.*)/', ""])


def moved(schema: Any, to: str) -> Any:
    """A schema that stands inside another one, at the JSON pointer `to`: its own references go along."""
    if isinstance(schema, Mapping):
        return {name: f"#{to}{value[1:]}" if name == "$ref" and isinstance(value, str) and value.startswith("#")
                else moved(value, to) for name, value in schema.items()}
    return [moved(one, to) for one in schema] if isinstance(schema, list) else schema
