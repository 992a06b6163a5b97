"""Custom tools, whose input is a text: models see them as functions with one argument. Also the older field `functions`
of requests."""

import json
from collections.abc import Sequence
from typing import Any

from numflow.server.http.errors import bad_request
from numflow.server.messages.reply import ReplyCall, ReplyPart
from numflow.server.messages.schemas import (
    ChatRequest,
    CustomTool,
    Function,
    Message,
    MessageCall,
    Named,
    Tool,
    ToolChoice,
)

INPUT = "input"  # name of the argument with the text


def as_functions(tools: Sequence[Tool | CustomTool] | None) -> list[Tool]:
    """Tools as functions, for the model."""
    return [_function(one) if isinstance(one, CustomTool) else one for one in tools or ()]


def _function(tool: CustomTool) -> Tool:
    custom, text = tool.custom, {"type": "string"}
    if expression := grammar_of(tool, "regex"):
        text["pattern"] = f"^(?:{expression})$"
    return Tool(type="function", function=Function(name=custom.name, description=custom.description, parameters={
        "type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}))


def grammar_of(tool: CustomTool, syntax: str) -> str:
    """The grammar of a custom tool's input; "" if it has none of this syntax.

    Raises:
        ApiError: the format is of type grammar, but has no grammar.
    """
    form = tool.custom.format
    if form is None or form.type == "text":
        return ""
    if form.grammar is None:
        raise bad_request(f"the format of the custom tool {tool.custom.name} is of type grammar, but has no grammar",
                          "tools", "missing_field")
    return form.grammar.definition if form.grammar.syntax == syntax else ""


def given_tools(body: ChatRequest) -> tuple[Sequence[Tool | CustomTool], Any, str]:
    """Tools of a request, the tool choice, and the name of the field with the choice.

    Raises:
        ApiError: the request has both tools and functions, or two tools with one name of which one is custom.
    """
    if body.functions or body.function_call is not None:
        if body.tools or body.tool_choice is not None:
            raise bad_request("functions and function_call are older names of tools and tool_choice: use one pair only",
                              "functions")
        choice: Any = body.function_call
        if isinstance(choice, Named):
            choice = ToolChoice(type="function", function=choice)
        return [Tool(type="function", function=one) for one in body.functions or ()], choice, "function_call"
    tools = body.tools or []
    names = [one.custom.name if isinstance(one, CustomTool) else one.function.name for one in tools]
    for index, one in enumerate(tools):
        if isinstance(one, CustomTool) and names.count(names[index]) > 1:
            raise bad_request(f"tools[{index}]: two tools have the name {names[index]!r}", "tools")
    return tools, body.tool_choice, "tool_choice"


def newer(messages: Sequence[Message]) -> list[Message]:
    """Messages with tool_calls instead of function_call, and role "tool" instead of "function"."""
    found, id, called = [], "", ""  # id and name of the last function_call
    for index, message in enumerate(messages):
        if message.function_call is not None:
            id, called = f"call_{index}", message.function_call.name
            call = MessageCall(id=id, function=message.function_call)
            message = message.model_copy(update={"tool_calls": [*(message.tool_calls or ()), call],
                                                 "function_call": None})
        elif message.role == "function":
            answers = bool(id) and message.name in (None, called)
            message = message.model_copy(update={"role": "tool", "name": message.name or called or None,
                                                 "tool_call_id": id if answers else f"call_{index}"})
        found.append(message)
    return found


def custom_input(arguments: str) -> str:
    """The input text of a call of a custom tool; arguments without INPUT are the text themselves."""
    value = json.loads(arguments)
    return value[INPUT] if isinstance(value, dict) and isinstance(value.get(INPUT), str) else arguments if value else ""


def with_input(text: str) -> str:
    """The arguments of a function for an input text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class ToldCalls:
    """The shape of calls in chat answers: calls of functions, calls of custom tools, or the older function_call."""

    def __init__(self, body: ChatRequest):
        self._old = bool(body.functions)
        self._texts: set[tuple[int, int]] = set()  # choices and calls of custom tools
        self._custom = {one.custom.name for one in body.tools or () if isinstance(one, CustomTool)}

    def message(self, calls: Sequence[ReplyCall]) -> dict[str, Any]:
        """Fields of a message with its calls (at least one)."""
        if self._old:
            return {"function_call": calls[0].message()["function"]}
        return {"tool_calls": [self._whole(call) for call in calls]}

    def delta(self, choice: int, part: ReplyPart) -> dict[str, Any]:
        """Fields of a streamed delta for a part of a call. {} if there is nothing to send yet: the input text of a
        custom tool is sent when it is complete. choice: index of the choice."""
        index = {"index": part.index}
        if part.call is not None:
            name = part.call.call.name
            custom = name in self._custom
            if part.kind == "called":
                text = custom_input(part.call.call.arguments) if custom else ""
                return {"tool_calls": [{**index, "custom": {"input": text}}]} if custom else {}
            if custom:
                self._texts.add((choice, part.index))
            begun = {"name": name, "input" if custom else "arguments": ""}
            kind = "custom" if custom else "function"
            return {"function_call": begun} if self._old else {
                "tool_calls": [{**index, "id": part.call.id, "type": kind, kind: begun}]}
        if (choice, part.index) in self._texts:
            return {}
        more = {"arguments": part.text}
        return {"function_call": more} if self._old else {"tool_calls": [{**index, "function": more}]}

    def _whole(self, made: ReplyCall) -> dict[str, Any]:
        call = made.call
        if call.name not in self._custom:
            return made.message()
        return {"id": made.id, "type": "custom", "custom": {
            "name": call.name, "input": custom_input(call.arguments)}}

    def reason(self, word: str) -> str:
        """The finish reason: function_call instead of tool_calls for the older field."""
        return "function_call" if self._old and word == "tool_calls" else word
