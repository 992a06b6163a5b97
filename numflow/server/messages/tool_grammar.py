"""Grammars for answers of a model that may call tools: any text, or tool calls whose arguments follow their schemas.
The model chooses between the two."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from numflow.server.messages.tool_formats import ToolFormat

_SPACE = r"\s{0,8}"  # allowed white space between the parts of a call
_ANY = {"type": "object"}
Functions = Sequence[Mapping[str, Any]]  # name and parameters of each


def _opening(space: str) -> str:
    """A call up to the quote before the function's name."""
    return rf'{space}\{{{space}("type"{space}:{space}"function"{space},{space})?"name"{space}:{space}"'


def _rules(functions: Functions) -> list[str]:
    """Rules of a JSON object that calls one of the functions (`call`), and of the first object of a list (`first`)."""
    rules = [f"{kind}: {' | '.join(f'{kind}{i}' for i in range(len(functions)))}" for kind in ("call", "first")]
    for i, function in enumerate(functions):
        name = re.escape(function["name"])
        rules += [f"call{i}: OPEN{i} rest{i}", f"first{i}: LIST{i} rest{i}",
                  f"OPEN{i}: /{_opening(_SPACE)}{name}\"/", f"LIST{i}: /{_SPACE}\\[{_opening(_SPACE)}{name}\"/",
                  f'rest{i}: /{_SPACE},{_SPACE}"(arguments|parameters)"{_SPACE}:{_SPACE}/ {_json(function)} '
                  f"/{_SPACE}\\}}/"]
    return rules


def _json(function: Mapping[str, Any]) -> str:
    """Grammar of a function's arguments."""
    return "%json " + json.dumps({"x-guidance": {"whitespace_flexible": False}, **(function.get("parameters") or _ANY)})


def calls_or_text(functions: Functions, several: bool) -> str:
    """The grammar (for llguidance) of a text that consists of calls only, or of any text. several: allow more than one
    call.

    A text that begins like a call of one of the functions must continue as a call. Since a text and a call may have the
    same first bytes, the beginning of a call up to the function's name is one lexeme.
    """
    names = "|".join(re.escape(function["name"]) for function in functions)
    space = r"\s*"
    return "\n".join([
        f"start: TEXT | {'call+' if several else 'call'} | first {'(/,/ call)*' if several else ''} /{_SPACE}\\]/",
        *_rules(functions), rf'TEXT: /(?s:.*)/ & ~/{space}\[?{_opening(space)}({names})"(?s:.*)/', ""])


def marked_calls(form: ToolFormat, functions: Functions, several: bool, special: Mapping[str, int]) -> str:
    """The grammar of a text with calls between the format's marks; "" for a format whose arguments are no JSON.

    several: allow more than one call. special: ids of the marks (of calls and of thinking) that are special tokens.
    """
    if form.head is None or not form.begin:
        return ""

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text, ensure_ascii=False)

    others = " | ".join(f"<[{id}]>" for text, id in special.items() if text not in form.marks)
    words = re.escape(form.begin)
    plain = "TEXT: /(?s:.+)/" if form.begin in special else f"TEXT: /(?s:.+)/ & ~/(?s:.*){words}(?s:.*)/"
    begin, rules = mark(form.begin), []
    if form.begin not in special:
        begin, rules = "begin", [f"begin[lazy]: /(?s:.*){words}/"]
    rules += [f"free: TEXT? (({others}) TEXT?)*" if others else "free: TEXT?", plain]  # TEXT TEXT could hide a mark
    call = "call"
    if form.wrapped:
        rules += _rules(functions)
    else:
        inner = f"/>{_SPACE}/" if not form.inner else f"{mark(form.inner[0])} /{_SPACE}/"
        named = [f"{json.dumps(one['name'])} {inner} {_json(one)}" for one in functions]
        rules += [f"named{i}: {one}" for i, one in enumerate(named)]
        rules += ["call: " + " | ".join(f"named{i}" for i in range(len(named)))]
    if form.end:  # text may follow a call
        return "\n".join([f"start: free ({begin} {call} /{_SPACE}/ {mark(form.end)} free){'*' if several else '?'}",
                          *rules, ""])
    more = "(/,/ call)*" if several else ""
    calls = f"{call} | first {more} /{_SPACE}\\]/" if form.wrapped else call
    again = f"({mark(form.begin)} {call})*" if several and not form.wrapped else ""
    return "\n".join([f"start: free | free {begin} calls {again}", f"calls: {calls}", *rules, ""])


def moved(schema: Any, to: str) -> Any:
    """A schema that is nested in another schema at the JSON pointer `to`: its references are adjusted."""
    if isinstance(schema, Mapping):
        return {name: f"#{to}{value[1:]}" if name == "$ref" and isinstance(value, str) and value.startswith("#")
                else moved(value, to) for name, value in schema.items()}
    return [moved(one, to) for one in schema] if isinstance(schema, list) else schema
