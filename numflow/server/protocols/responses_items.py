"""Conversion of OpenAI's Responses: input items to messages, tools to functions, parts of a reply to items and events.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numflow.errors import quoted
from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.custom_tools import custom_input, with_input
from numflow.server.messages.reply import ReplyCall, ReplyPart
from numflow.server.messages.responses_schemas import Content, ResponsesInput, ResponsesItem, ResponsesTool
from numflow.server.messages.schemas import ContentPart

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
Event = tuple[str, dict[str, Any]]  # type, and fields without type and sequence number


def messages_of_items(items: Sequence[ResponsesItem]) -> list[dict[str, Any]]:
    """Messages of a chat request.

    Raises:
        ApiError: an item is incomplete, or has an unsupported type.
    """
    turns = _Turns()
    for index, item in enumerate(items):
        turns.take(item, f"input[{index}]")
    return turns.messages


class _Turns:
    """Builder of messages: calls, and thinking before them, are put into one assistant message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thoughts = ""

    def take(self, item: ResponsesItem, place: str) -> None:
        kind = item.type or ("message" if item.role is not None else "")
        if kind == "message":
            self._message(item, place)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, kind, place)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._thoughts = ""
            self.messages.append({"role": "tool", "tool_call_id": _needed(item.call_id, f"{place}.call_id"),
                                  "content": _text(_needed(item.output, f"{place}.output"), f"{place}.output")})
        elif kind == "reasoning":
            self._thoughts += _text(item.content or item.summary or "", f"{place}.content")
        elif not kind:
            raise bad_request(f"{place} has no type", f"{place}.type", "missing_field")
        else:
            raise bad_request(f"{place} is of type {quoted(kind)}, which models here cannot read", f"{place}.type",
                              "unsupported")

    def _message(self, item: ResponsesItem, place: str) -> None:
        if item.role not in ROLES:
            raise bad_request(f"{place}.role should be one of {', '.join(ROLES)}", f"{place}.role", "invalid_value")
        content = _text(_needed(item.content, f"{place}.content"), f"{place}.content")
        self.messages.append({"role": item.role, "content": content,
                              **(self._thinking() if item.role == "assistant" else {})})
        self._thoughts = ""

    def _call(self, item: ResponsesItem, kind: str, place: str) -> None:
        arguments = item.arguments or "{}" if kind == "function_call" else with_input(item.input or "")
        call = {"id": _needed(item.call_id, f"{place}.call_id"), "type": "function",
                "function": {"name": shown_name(_needed(item.name, f"{place}.name"), item.namespace),
                             "arguments": arguments}}
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._thoughts:
            self.messages.append({"role": "assistant", "content": None, **self._thinking()})
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _thinking(self) -> dict[str, str]:
        thoughts, self._thoughts = self._thoughts, ""
        return {"reasoning_content": thoughts} if thoughts else {}


def _needed(value: Any, place: str) -> Any:
    if value is None:
        raise bad_request(f"{place} is missing", place, "missing_field")
    return value


def _text(content: Content, place: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, place: str) -> str:
    text = (part.model_extra or {}).get("refusal") if part.type == "refusal" else part.text
    if part.type not in TEXTS or not isinstance(text, str):
        raise bad_request(f"{place} is of type {quoted(part.type)}; models here read text only", place, "unsupported")
    return text


@dataclass(frozen=True)
class KnownTool:
    """A tool in the client's terms: name, namespace, and whether it is a custom tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass
class Tools:
    """Tools of a request. functions: for the model. known: function's name -> the client's tool. choice: tool choice.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, KnownTool] = field(default_factory=dict)
    choice: str | dict[str, Any] | None = None


def shown_name(name: str, namespace: str | None) -> str:
    """A function's name for the model, with its namespace."""
    return name if namespace is None else f"{namespace}.{name}"[:128]


def tools_of(body: ResponsesInput, ignored: Ignored) -> Tools:
    """The tools of a request. Tools that only OpenAI's own service can run are ignored, unless the choice names one.

    Raises:
        ApiError: a tool has no name, two tools have one name, or the choice cannot be met.
    """
    found, choice = Tools(), body.tool_choice
    for index, tool in enumerate(body.tools or []):
        _add(found, tool, f"tools[{index}]", None, ignored, lambda name: getattr(choice, "name", None) == name)
    if choice is None or isinstance(choice, str):
        found.choice = choice if found.functions or choice == "required" else None
        return found
    if choice.type == "allowed_tools":
        names = {_choice_name(found, one.type, one.name, "tool_choice.tools") for one in choice.tools or []}
        found.functions = [one for one in found.functions if one[one["type"]]["name"] in names]
        found.choice = choice.mode or "auto"
    else:
        name = _choice_name(found, choice.type, choice.name, "tool_choice")
        found.choice = {"type": "function", "function": {"name": name}}
    return found


def _add(found: Tools, tool: ResponsesTool, place: str, namespace: str | None, ignored: Ignored,
         chosen: Callable[[str], bool]) -> None:
    if tool.type == "namespace" and namespace is None:
        for index, one in enumerate(tool.tools or []):
            _add(found, one, f"{place}.tools[{index}]", _needed(tool.name, f"{place}.name"), ignored, chosen)
        return
    if tool.type not in ("function", "custom"):
        ignored.add(place, f"{place} is a tool of type {quoted(tool.type)}, which this service does not have",
                    "unsupported")
        return
    name, custom = _needed(tool.name, f"{place}.name"), tool.type == "custom"
    form = _form(tool.format, f"{place}.format") if custom else None
    if form is not None and form.get("grammar", {}).get("syntax") == "lark" and not chosen(name):
        ignored.add(place, f"{place} has a Lark grammar, which works only if tool_choice names the tool",
                    "unsupported")
        return
    shown = shown_name(name, namespace)
    if shown in found.known:
        raise bad_request(f"{place}: two tools have the name {shown!r}", f"{place}.name", "invalid_value")
    found.known[shown] = KnownTool(name, namespace, custom)
    fields = {"name": shown, "description": tool.description, **(
        {"format": form} if custom else {"strict": tool.strict, "parameters": tool.parameters})}
    found.functions.append({"type": tool.type, tool.type: {
        key: value for key, value in fields.items() if value is not None}})


def _form(given: Mapping[str, Any] | None, place: str) -> dict[str, Any] | None:
    """Input format of a custom tool, in the shape of chat requests."""
    if given is None or given.get("type") == "text":
        return None
    syntax, definition = given.get("syntax"), given.get("definition")
    if given.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise bad_request(f"{place} should be of type text, or of type grammar with a syntax (lark or regex) and a "
                          "definition", place, "unsupported")
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


def _choice_name(found: Tools, kind: str, name: str | None, place: str) -> str:
    shown = next((shown for shown, tool in found.known.items() if name in (tool.name, shown)), None)
    if kind not in ("function", "custom") or shown is None:
        raise bad_request(f"{place} names {quoted(name or kind)}, which is not one of the supported tools", place,
                          "unsupported")
    return shown


def new_id(kind: str) -> str:
    """A new id with a prefix for its kind, such as msg or fc."""
    return f"{kind}_{secrets.token_hex(16)}"


class ResponseOutput:
    """Output items of a response while it is generated. `take` and `end` yield the events of the stream.

    tools: function's name -> the client's tool.
    """

    def __init__(self, tools: Mapping[str, KnownTool]):
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._open: str | None = None  # kind of the last item, if it may still grow

    def take(self, part: ReplyPart, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Event]:
        """Take a part of the reply. logprobs: log-probabilities of the tokens of its text."""
        if part.kind == "arguments":
            yield from self._arguments(part.text)
            return
        if part.call is not None:
            yield from self._called(part.call) if part.kind == "called" else self._call(part.call)
            return
        if self._open != part.kind:
            yield from self._end("completed")
            yield from self._begin(part.kind)
        content = self.items[-1]["content"][0]
        content["text"] += part.text
        more = {}
        if part.kind == "content":
            content["logprobs"] = [*content["logprobs"], *logprobs]
            more = {"logprobs": list(logprobs)}
        yield f"response.{content['type']}.delta", {**self._indices(), "content_index": 0, "delta": part.text, **more}

    def end(self, status: str) -> Iterator[Event]:
        """End the output. status: completed or incomplete. An empty reply is one empty message."""
        if not self.items:
            yield from self._begin("content")
        yield from self._end(status)

    def _begin(self, kind: str) -> Iterator[Event]:
        self._open = kind
        if kind == "reasoning":
            item: dict[str, Any] = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
            content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items.append(item | {"content": [content]})
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item | {"content": []}}
        yield "response.content_part.added", {**self._indices(), "content_index": 0, "part": dict(content)}

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        self._open, item = None, self.items[-1]
        content, indices = item["content"][0], {**self._indices(), "content_index": 0}
        more = {"logprobs": content["logprobs"]} if "logprobs" in content else {}
        yield f"response.{content['type']}.done", {**indices, "text": content["text"], **more}
        yield "response.content_part.done", {**indices, "part": content}
        item["status"] = status
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _call(self, made: ReplyCall) -> Iterator[Event]:
        """Begin a call."""
        yield from self._end("completed")
        tool = self._tools.get(made.call.name, KnownTool(made.call.name))
        item: dict[str, Any] = {"id": new_id("ctc" if tool.custom else "fc"), "status": "in_progress",
                                "type": "custom_tool_call" if tool.custom else "function_call",
                                "call_id": made.id, "name": tool.name, "input" if tool.custom else "arguments": ""}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _arguments(self, text: str) -> Iterator[Event]:
        """Append to a call's arguments. The input of a custom tool is inside them, and is sent when it is complete."""
        if "arguments" in (item := self.items[-1]):
            item["arguments"] += text
            yield "response.function_call_arguments.delta", {**self._indices(), "delta": text}

    def _called(self, made: ReplyCall) -> Iterator[Event]:
        """End a call."""
        item = self.items[-1]
        if "input" in item:
            item["input"] = custom_input(made.call.arguments)
            yield "response.custom_tool_call_input.delta", {**self._indices(), "delta": item["input"]}
            yield "response.custom_tool_call_input.done", {**self._indices(), "input": item["input"]}
        else:
            yield "response.function_call_arguments.done", {**self._indices(), "arguments": item["arguments"],
                                                            "name": item["name"]}
        item["status"] = "incomplete" if made.broken else "completed"
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _indices(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
