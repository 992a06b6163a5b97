"""Grammars for answers of a model that may call tools: either any text, or calls whose arguments fit their schemas.
What is chosen is the model's affair."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from numflow.server.messages.tool_formats import ToolFormat

_SPACE = r"\s{0,8}"  # as much white space as a call may have at a place
_ANY = {"type": "object"}
Functions = Sequence[Mapping[str, Any]]  # name and parameters of each


def _opening(space: str) -> str:
    """A call up to the quote before the function's name."""
    return rf'{space}\{{{space}("type"{space}:{space}"function"{space},{space})?"name"{space}:{space}"'


def _rules(functions: Functions) -> list[str]:
    """Rules of an object that is a call of one of the functions (`call`), and of the first of a list (`first`)."""
    places = range(len(functions))
    rules = [f"{kind}: {' | '.join(f'{kind}{at}' for at in places)}" for kind in ("call", "first")]
    for at, function in enumerate(functions):
        name = re.escape(function["name"])
        rules += [f"call{at}: OPEN{at} rest{at}", f"first{at}: LIST{at} rest{at}",
                  f"OPEN{at}: /{_opening(_SPACE)}{name}\"/", f"LIST{at}: /{_SPACE}\\[{_opening(_SPACE)}{name}\"/",
                  f'rest{at}: /{_SPACE},{_SPACE}"(arguments|parameters)"{_SPACE}:{_SPACE}/ {_json(function)} '
                  f"/{_SPACE}\\}}/"]
    return rules


def _json(function: Mapping[str, Any]) -> str:
    """The arguments of a function."""
    return "%json " + json.dumps({"x-guidance": {"whitespace_flexible": False}, **(function.get("parameters") or _ANY)})


def calls_or_text(functions: Functions, several: bool) -> str:
    """The grammar, as llguidance takes it, of a text that is nothing but calls, or any text. several: more than one.

    A text that begins as a call of one of the functions goes on as one; the first bytes of both are the same, so each
    beginning of a call is one lexeme, that ends where the text cannot go on as anything else.
    """
    names = "|".join(re.escape(function["name"]) for function in functions)
    space = r"\s*"
    return "\n".join([
        f"start: TEXT | {'call+' if several else 'call'} | first {'(/,/ call)*' if several else ''} /{_SPACE}\\]/",
        *_rules(functions), rf'TEXT: /(?s:.*)/ & ~/{space}\[?{_opening(space)}({names})"(?s:.*)/', ""])


def marked_calls(form: ToolFormat, functions: Functions, several: bool, special: Mapping[str, int]) -> str:
    """The grammar of a text in which calls stand between the format's marks; "" where arguments are no JSON.

    several: more than one call. special: ids of marks that are tokens of their own, those of thinking among them.
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
    rules += [f"free: TEXT? (({others}) TEXT?)*" if others else "free: TEXT?", plain]  # two TEXTs could hide a mark
    call = "call"
    if form.wrapped:
        rules += _rules(functions)
    else:
        inner = f"/>{_SPACE}/" if not form.inner else f"{mark(form.inner[0])} /{_SPACE}/"
        named = [f"{json.dumps(one['name'])} {inner} {_json(one)}" for one in functions]
        rules += [f"named{at}: {one}" for at, one in enumerate(named)]
        rules += ["call: " + " | ".join(f"named{at}" for at in range(len(named)))]
    if form.end:  # text may stand behind a call
        return "\n".join([f"start: free ({begin} {call} /{_SPACE}/ {mark(form.end)} free){'*' if several else '?'}",
                          *rules, ""])
    more = "(/,/ call)*" if several else ""
    calls = f"{call} | first {more} /{_SPACE}\\]/" if form.wrapped else call
    again = f"({mark(form.begin)} {call})*" if several and not form.wrapped else ""
    return "\n".join([f"start: free | free {begin} calls {again}", f"calls: {calls}", *rules, ""])


def moved(schema: Any, to: str) -> Any:
    """A schema that stands inside another one, at the JSON pointer `to`: its own references go along."""
    if isinstance(schema, Mapping):
        return {name: f"#{to}{value[1:]}" if name == "$ref" and isinstance(value, str) and value.startswith("#")
                else moved(value, to) for name, value in schema.items()}
    return [moved(one, to) for one in schema] if isinstance(schema, list) else schema
