"""Formats of tool calls. A format has a pair of marks around a body. The chat template shows which format to use."""

import ast
import json
import re
import tomllib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from numflow import syntax
from numflow.errors import RequestError, did_you_mean
from numflow.server.messages.json_pieces import DECODER as _DECODER


class ToolCall(NamedTuple):
    """A call: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    begin, end: marks around the body; end "": the end of the text. begin "": the whole text is the body.
    read:       parses a body to calls; raises ValueError if it has none.
    clues:      texts that all occur in a chat template of this format.
    opening:    text before the JSON object of a call, when the model is forced to call.
    inner:      marks inside the body.
    write:      makes the body of a call from name and arguments.
    head:       pattern of the beginning of a body, with the name, up to the arguments, so that they can be streamed;
                None: calls are sent when they are complete. wrapped: the arguments are inside another JSON object.
    """

    begin: str
    end: str
    read: Callable[[str], list[ToolCall]]
    clues: tuple[str, ...]
    opening: str = ""
    inner: tuple[str, ...] = ()
    write: Callable[[str, Mapping[str, Any]], str] = lambda name, arguments: _json_text(
        {"name": name, "arguments": arguments})
    head: re.Pattern[str] | None = None
    wrapped: bool = False

    def text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call in this format."""
        return f"{self.begin}{self.write(name, arguments)}{self.end}"

    @property
    def marks(self) -> set[str]:
        """All marks, which may be special tokens."""
        return {self.begin, self.end, *self.inner} - {""}


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _write_named(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}[ARGS]{_json_text(arguments)}"


def _write_tagged(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f"<parameter={key}>\n{value if isinstance(value, str) and _value(value) == value else _json_text(value)}\n"
             "</parameter>\n" for key, value in arguments.items()]
    return f"\n<function={name}>\n{''.join(lines)}</function>\n"


def _write_python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def _write_fenced(name: str, arguments: Mapping[str, Any]) -> str:
    return (f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json_text(arguments)}\n```"
            "<｜tool▁call▁end｜>")


def _arguments(values: Any) -> str:
    """Arguments as JSON text. Raises ValueError if they are no object or contain values that JSON does not have."""
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError("arguments are no object")
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _json_calls(body: str) -> list[ToolCall]:
    """Parse {"name": ..., "arguments": {...}}, a list of such objects, or several in sequence."""
    values, decoder, rest = [], _DECODER, body.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        values += value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip(" \t\r\n;,")
    return [_call_of(value) for value in values]


def _call_of(value: Any) -> ToolCall:
    value = value.get("function", value) if isinstance(value, dict) and isinstance(value.get("function"), dict) \
        else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no name")
    given: Any = next((value[key] for key in ("arguments", "parameters", "args") if key in value), {})
    if isinstance(given, str):
        values = _DECODER.decode(given)
        arguments = _arguments(values)
        return ToolCall(value["name"], arguments if values is None else given)
    return ToolCall(value["name"], _arguments(given))


def _named_calls(body: str) -> list[ToolCall]:
    """Parse NAME[ARGS]{...}, one or more in sequence, with or without the opening mark between them."""
    calls, decoder, rest = [], _DECODER, body.strip()
    while rest:
        name, mark, rest = rest.removeprefix("[TOOL_CALLS]").partition("[ARGS]")
        value, end = decoder.raw_decode(rest.lstrip())
        if not mark or not name.strip():
            raise ValueError("no call")
        calls.append(ToolCall(name.partition("[CALL_ID]")[0].strip(), _arguments(value)))
        rest = rest.lstrip()[end:].lstrip()
    return calls


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.S)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.S)


def _tagged_calls(body: str) -> list[ToolCall]:
    """Parse <function=NAME>...</function> with a JSON object or <parameter=KEY>value</parameter> lines inside."""
    calls, offset = [], 0
    while offset < len(body):
        found = _FUNCTION.match(body, offset)
        if found is None:
            raise ValueError("no function")
        name, inside = found[1], found[2].strip()
        if inside.startswith("{"):
            _arguments(_DECODER.decode(inside))
            calls.append(ToolCall(name, inside))
        else:
            calls.append(ToolCall(name, _arguments(_parameters(inside))))
        offset = found.end()
    return calls


def _parameters(text: str) -> dict[str, Any]:
    values, offset = {}, 0
    while offset < len(text):
        found = _PARAMETER.match(text, offset)
        if found is None:
            raise ValueError("no parameter")
        values[found[1]] = _value(found[2])
        offset = found.end()
    return values


def _value(text: str) -> Any:
    """A parameter's value: parsed JSON, or the text if it is no JSON."""
    try:
        return _DECODER.decode(text)
    except ValueError:
        return text


def _python_calls(body: str) -> list[ToolCall]:
    """Parse [name(key=value, ...), ...] with literal values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's text may have invalid escapes, of which Python warns
            tree = syntax.parse(body.strip(), "eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node) for node in nodes]
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("no calls") from error


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("no call with named arguments")
    if not all(isinstance(part, (ast.Name, ast.Attribute, ast.Load)) for part in ast.walk(node.func)):
        raise ValueError("no name of a function")
    given = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
    return ToolCall(ast.unparse(node.func), _arguments(given))


def _fenced_calls(body: str) -> list[ToolCall]:
    """Parse function<sep>NAME followed by a JSON block, one or more, each between its own marks."""
    found = re.findall(r"<｜tool▁call▁begin｜>(?:function)?<｜tool▁sep｜>([^\n`{]+)\s*(?:```json)?\s*(\{.*?\})\s*"
                       r"(?:```)?\s*<｜tool▁call▁end｜>", body, re.S)
    if not found:
        raise ValueError("no call")
    return [_call_of({"name": name.strip(), "arguments": arguments}) for name, arguments in found]


_JSON_HEAD = re.compile(r'\s*(?:\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*'
                        r'"(?:arguments|parameters|args)"\s*:\s*(?=\{)')
_NAMED_HEAD = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]\s*(?=\{)")
_TAG_HEAD = re.compile(r"([^>\s]+)>\s*(?=\{)")
_json_format = partial(ToolFormat, head=_JSON_HEAD, wrapped=True)

# In order of detection: the first format whose clues are all in the chat template is the model's.
FORMATS = {
    "tag_parameters": ToolFormat("<tool_call>", "</tool_call>", _tagged_calls, ("<tool_call>", "<parameter="),
                                 write=_write_tagged),
    "tag_json": _json_format("<tool_call>", "</tool_call>", _json_calls, ("<tool_call>",), "<tool_call>\n"),
    "bracket_named": ToolFormat("[TOOL_CALLS]", "", _named_calls, ("[TOOL_CALLS]", "[ARGS]"),
                                inner=("[ARGS]", "[CALL_ID]"), write=_write_named, head=_NAMED_HEAD),
    "bracket_json": _json_format("[TOOL_CALLS]", "", _json_calls, ("[TOOL_CALLS]",), "[TOOL_CALLS] "),
    "fenced": ToolFormat("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _fenced_calls, ("<｜tool▁calls▁begin｜>",),
                         inner=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), write=_write_fenced),
    "pipe_python": ToolFormat("<|tool_call_start|>", "<|tool_call_end|>", _python_calls, ("<|tool_call_start|>",),
                              write=_write_python),
    "pipe_json": _json_format("<|tool_call|>", "<|/tool_call|>", _json_calls, ("<|tool_call|>",), "<|tool_call|>"),
    "function_tag": ToolFormat("<function=", "</function>", lambda body: _tagged_calls(f"<function={body}</function>"),
                               ("<function=",), head=_TAG_HEAD,
                               write=lambda name, arguments: f"{name}>{_json_text(arguments)}"),
    "plain_python": ToolFormat("", "", _python_calls, ("[func_name1(",), write=_write_python),
    "plain_json": _json_format("", "", _json_calls, ('"name":', '"parameters":')),
}


GENERIC = FORMATS["plain_json"]  # for templates that show no format

# Names of other engines -> our names; of several the one that the chat template shows, else the last.
ALIASES: Mapping[str, Sequence[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def find_format(chat_template: str | None, name: str | None = None) -> ToolFormat | None:
    """The format with this name (ours or another engine's). Without a name: the format that the chat template shows, or
    None.

    Raises:
        RequestError: there is no format of that name.
    """
    text = (chat_template or "").replace('\\"', '"')

    def shown(names: Iterable[str]) -> ToolFormat | None:
        return next((FORMATS[one] for one in names if all(clue in text for clue in FORMATS[one].clues)), None)

    if name is not None:
        names = (name,) if name in FORMATS else ALIASES.get(name)
        if names is None:
            near = did_you_mean(name, [*FORMATS, *ALIASES])
            raise RequestError(f"there is no tool format {name!r:.80}{near}; formats: {', '.join(FORMATS)}; other "
                               f"names: {', '.join(ALIASES)}")
        return shown(names) or FORMATS[names[-1]]
    return shown(FORMATS) if "tools" in text else None
