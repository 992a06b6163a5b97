"""Tools in a conversation: for the chat template where it knows them, else told in text, in the format that is looked
for in the answer. Which of them have to be called."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from numflow.decoding.structured import check_grammar
from numflow.engine.request.prompt import ConversationIds
from numflow.errors import RequestError, TokenizerError
from numflow.server.http.errors import bad_request
from numflow.server.messages.schemas import AllowedChoice, ChatRequest, Tool, ToolChoice
from numflow.server.messages.tool_formats import GENERIC, ToolFormat
from numflow.server.messages.tool_grammar import calls_or_text, moved
from numflow.server.models.served import Served


def wanted(body: ChatRequest) -> tuple[list[Tool], list[Tool]]:
    """Tools to show the model, and those of which it has to call one.

    Raises:
        ApiError: tool_choice names none of them.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return [], []
    if choice == "none":
        return [], []
    if choice == "required":
        return tools, tools
    if isinstance(choice, ToolChoice):
        return tools, _named(tools, choice)
    if isinstance(choice, AllowedChoice):
        some = [tool for one in choice.allowed_tools.tools for tool in _named(tools, one)]
        return some, some if choice.allowed_tools.mode == "required" else []
    return tools, []


def _named(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    found = [tool for tool in tools if tool.function.name == choice.function.name]
    if not found:
        raise bad_request(f"tool_choice names {choice.function.name!r}, which is none of the tools", "tool_choice")
    return found[:1]


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """JSON schema of a call of one of the tools."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}

    def one(tool: Tool, place: str) -> dict[str, Any]:
        arguments = moved(tool.function.parameters, f"{place}/properties/arguments") or nothing
        return {"type": "object", "required": ["name", "arguments"], "additionalProperties": False,
                "properties": {"name": {"const": tool.function.name}, "arguments": arguments}}

    if len(tools) == 1:
        return one(tools[0], "")
    return {"anyOf": [one(tool, f"/anyOf/{at}") for at, tool in enumerate(tools)]}


def call_grammar(served: Served, tools: Sequence[Tool], several: bool) -> dict[str, Any]:
    """Settings by which a model that is told its tools in text, and calls one, gives arguments of its schema; {} where
    that cannot be had.

    Raises:
        ApiError: a tool is strict, and its schema cannot be enforced.
    """
    if served.template_tools or served.tool_format is not GENERIC or served.thinks or not tools:
        return {}
    grammar = calls_or_text([tool.function.model_dump(exclude_none=True) for tool in tools], several)
    try:
        check_grammar("grammar", grammar)
        fits = len(grammar.encode("utf-8", "replace")) <= served.config.budget.max_grammar
    except RequestError as error:
        if any(tool.function.strict for tool in tools):
            raise bad_request(f"tools: {error}", "tools", "unsupported") from None
        fits = False
    return {"grammar": grammar} if fits else {}


def render(served: Served, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None,
           variables: Mapping[str, Any]) -> ConversationIds:
    """Ids of a conversation with its tools.

    Raises:
        TokenizerError: the template refuses the messages.
    """
    shown = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    if served.template_tools:
        return served.render(messages, {**variables, **({"tools": shown} if shown else {})})
    messages = _as_text(served.with_system(messages), served.tool_format)
    if not shown:
        return served.render(messages, variables)
    told = instructions(shown, served.tool_format)
    try:
        ids = served.render(_in_system(messages, told), variables)
    except TokenizerError:  # there are templates without a system message
        return served.render(_in_question(messages, told), variables)
    name = shown[0]["function"]["name"]
    return ids if name in served.tokenizer.decode(ids) else served.render(_in_question(messages, told), variables)


def instructions(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """Instructions on tools, as text for a model whose template does not know tools."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.text("NAME", {"ARGUMENT": "value"})
    return (f"You can call these functions, of which each line describes one:\n{functions}\n"
            f"To call a function, answer with nothing but its name and its arguments in this form:\n{example}\n"
            "Where no function is of use, answer as usual.")


def _in_system(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    if messages and messages[0]["role"] in ("system", "developer"):
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _in_question(messages: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    at = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *messages]
    asked = {**messages[at], "content": f"{text}\n\n{messages[at]['content']}"}
    return [*messages[:at], asked, *messages[at + 1:]]


def _as_text(messages: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[Mapping[str, Any]]:
    """Calls as the text that the model would write, and their results as what the user says."""
    found: list[Mapping[str, Any]] = []
    names: dict[str, str] = {}
    results = False  # the message before is made of results, and others go below them
    for message in messages:
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name", "the function"))
            text = f"Result of {name}: {message['content']}"
            if results:
                found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{text}"}
            else:
                found.append({"role": "user", "content": text})
            results = True
            continue
        results = False
        calls = message.get("tool_calls")
        if not calls:
            found.append(message)
            continue
        names |= {call["id"]: call["function"]["name"] for call in calls}
        written = [form.text(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        found.append({**rest, "content": "\n".join([*filter(None, [message["content"]]), *written])})
    return found
