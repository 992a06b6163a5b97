"""Tools that take a text, which models are shown as functions of one argument; and `functions`, which were there before
`tools`."""

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

INPUT = "input"  # the argument that is the text


def as_functions(tools: Sequence[Tool | CustomTool] | None) -> list[Tool]:
    """Tools as models are shown them."""
    return [_function(one) if isinstance(one, CustomTool) else one for one in tools or ()]


def _function(tool: CustomTool) -> Tool:
    custom, text = tool.custom, {"type": "string"}
    if expression := grammar_of(tool, "regex"):
        text["pattern"] = f"^(?:{expression})$"
    return Tool(type="function", function=Function(name=custom.name, description=custom.description, parameters={
        "type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}))


def grammar_of(tool: CustomTool, syntax: str) -> str:
    """The grammar that a tool's text has to follow; "" if it has none of this syntax.

    Raises:
        ApiError: it should have one, and has not.
    """
    form = tool.custom.format
    if form is None or form.type == "text":
        return ""
    if form.grammar is None:
        place = f"the format of the custom tool {tool.custom.name}"
        raise bad_request(f"{place} is of type grammar, and has no grammar", "tools", "missing_field")
    return form.grammar.definition if form.grammar.syntax == syntax else ""


def given_tools(body: ChatRequest) -> tuple[Sequence[Tool | CustomTool], Any, str]:
    """Tools of a request, the choice among them, and the field that the choice stands in.

    Raises:
        ApiError: tools and functions at once, or two tools of one name of which one is custom.
    """
    if body.functions or body.function_call is not None:
        if body.tools or body.tool_choice is not None:
            raise bad_request("functions and function_call are older names of tools and tool_choice: give the one or "
                              "the other", "functions")
        choice: Any = body.function_call
        if isinstance(choice, Named):
            choice = ToolChoice(type="function", function=choice)
        return [Tool(type="function", function=one) for one in body.functions or ()], choice, "function_call"
    tools = body.tools or []
    names = [one.custom.name if isinstance(one, CustomTool) else one.function.name for one in tools]
    for at, one in enumerate(tools):
        if isinstance(one, CustomTool) and names.count(names[at]) > 1:
            raise bad_request(f"tools[{at}]: two tools go by the name {names[at]!r}", "tools")
    return tools, body.tool_choice, "tool_choice"


def newer(messages: Sequence[Message]) -> list[Message]:
    """Messages with tool_calls in place of function_call, and with results of tools in place of functions'."""
    found, id, called = [], "", ""  # of the last function_call
    for at, message in enumerate(messages):
        if message.function_call is not None:
            id, called = f"call_{at}", message.function_call.name
            call = MessageCall(id=id, function=message.function_call)
            message = message.model_copy(update={"tool_calls": [*(message.tool_calls or ()), call],
                                                 "function_call": None})
        elif message.role == "function":
            known = bool(id) and message.name in (None, called)
            message = message.model_copy(update={"role": "tool", "name": message.name or called or None,
                                                 "tool_call_id": id if known else f"call_{at}"})
        found.append(message)
    return found


def custom_input(arguments: str) -> str:
    """The text that a custom tool is called with; arguments without one are the text themselves."""
    value = json.loads(arguments)
    return value[INPUT] if isinstance(value, dict) and isinstance(value.get(INPUT), str) else arguments if value else ""


def with_input(text: str) -> str:
    """The arguments that a text becomes."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class ToldCalls:
    """The shape in which the client of a chat is told calls: of functions, of custom tools, or as one function_call."""

    def __init__(self, body: ChatRequest):
        self._old = bool(body.functions)
        self._texts: set[tuple[int, int]] = set()  # choices and calls of custom tools
        self._custom = {one.custom.name for one in body.tools or () if isinstance(one, CustomTool)}

    def message(self, calls: Sequence[ReplyCall]) -> dict[str, Any]:
        """Fields of a message for its calls, of which there is at least one."""
        if self._old:
            return {"function_call": calls[0].message()["function"]}
        return {"tool_calls": [self._whole(call) for call in calls]}

    def delta(self, choice: int, part: ReplyPart) -> dict[str, Any]:
        """Fields of a stream's message for a part of a call; {} where it tells nothing yet: the text of a custom tool
        stands within its arguments, and is told when it is whole. choice: the index of the part's choice."""
        place = {"index": part.index}
        if part.call is not None:
            name = part.call.call.name
            custom = name in self._custom
            if part.kind == "called":
                text = custom_input(part.call.call.arguments) if custom else ""
                return {"tool_calls": [{**place, "custom": {"input": text}}]} if custom else {}
            if custom:
                self._texts.add((choice, part.index))
            begun = {"name": name, "input" if custom else "arguments": ""}
            kind = "custom" if custom else "function"
            return {"function_call": begun} if self._old else {
                "tool_calls": [{**place, "id": part.call.id, "type": kind, kind: begun}]}
        if (choice, part.index) in self._texts:
            return {}
        more = {"arguments": part.text}
        return {"function_call": more} if self._old else {"tool_calls": [{**place, "function": more}]}

    def _whole(self, made: ReplyCall) -> dict[str, Any]:
        call = made.call
        if call.name not in self._custom:
            return made.message()
        return {"id": made.id, "type": "custom", "custom": {
            "name": call.name, "input": custom_input(call.arguments)}}

    def reason(self, word: str) -> str:
        """A word for why the text ended."""
        return "function_call" if self._old and word == "tool_calls" else word
