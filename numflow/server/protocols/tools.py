"""Tools of a conversation: rendered by the chat template, or described in text if the template does not support tools;
forced calls, and grammars for calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numflow.decoding.structured import check_grammar
from numflow.engine.request.prompt import ConversationIds
from numflow.errors import RequestError
from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.custom_tools import as_functions, given_tools, grammar_of, with_input
from numflow.server.messages.schemas import AllowedChoice, ChatRequest, CustomChoice, CustomTool, Tool, ToolChoice
from numflow.server.messages.tool_formats import GENERIC, ToolCall, ToolFormat
from numflow.server.messages.tool_grammar import calls_or_text, marked_calls, moved
from numflow.server.models.served import Served


@dataclass(frozen=True)
class Wanted:
    """Tools of a request.

    shown:   tools that the model sees. forced: tools of which it must call one. several: allow more than one call.
    ruled:   names of custom tools whose input must match a regular expression.
    grammar: Lark grammar of the input of the one forced custom tool: the answer is this text, not JSON.
    """

    shown: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()
    several: bool = True
    ruled: frozenset[str] = frozenset()
    grammar: str = ""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools that the model is shown."""
        return frozenset(tool.function.name for tool in self.shown)

    @property
    def strict(self) -> bool:
        """Whether calls that are not forced must follow their schemas, too."""
        return bool(self.ruled) or any(tool.function.strict for tool in self.shown)

    def constraint(self) -> dict[str, Any]:
        """The setting that makes the answer a call of a forced tool; {} without forced tools."""
        if self.grammar:
            return {"grammar": self.grammar}
        return {"json_schema": call_schema(self.forced)} if self.forced else {}

    def form(self, served: Served) -> ToolFormat | None:
        """The format of calls in the answer; None for a forced call, which is JSON."""
        if self.grammar:
            name = self.forced[0].function.name
            return ToolFormat("", "", lambda text: [ToolCall(name, with_input(text))], ())
        return served.tool_format if self.shown and not self.forced else None


def wanted(body: ChatRequest) -> Wanted:
    """The tools of a request, and the forced ones.

    Raises:
        ApiError: the tool choice names no tool, or the grammar of a custom tool cannot be met.
    """
    given, choice, field = given_tools(body)
    shown, forced = _chosen(as_functions(given), choice, field)
    names = {tool.function.name for tool in shown}
    custom = [one for one in given if isinstance(one, CustomTool) and one.custom.name in names]
    grammars = {one.custom.name: found for one in custom if (found := grammar_of(one, "lark"))}
    only = forced[0].function.name if len(forced) == 1 else ""
    if grammars and only not in grammars:
        raise bad_request(f"the custom tool {next(iter(grammars))} has a Lark grammar, which works only if {field} "
                          "names the tool; a regular expression (regex) works without that, too", "tools",
                          "unsupported")
    return Wanted(shown, forced, body.parallel_tool_calls is not False and not body.functions,
                  frozenset(one.custom.name for one in custom if grammar_of(one, "regex")), grammars.get(only, ""))


def _chosen(tools: list[Tool], choice: Any, field: str) -> tuple[list[Tool], list[Tool]]:
    """Tools that the model sees, and tools of which it must call one."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request(f"{field} needs {'tools' if field == 'tool_choice' else 'functions'}", field)
        return [], []
    if choice == "none":
        return [], []
    if choice == "required":
        return tools, tools
    if isinstance(choice, (ToolChoice, CustomChoice)):
        return tools, _named(tools, choice, field)
    if isinstance(choice, AllowedChoice):
        some = [tool for one in choice.allowed_tools.tools for tool in _named(tools, one, field)]
        return some, some if choice.allowed_tools.mode == "required" else []
    return tools, []


def _named(tools: Sequence[Tool], choice: ToolChoice | CustomChoice, field: str) -> list[Tool]:
    name = (choice.custom if isinstance(choice, CustomChoice) else choice.function).name
    found = [tool for tool in tools if tool.function.name == name]
    if not found:
        raise bad_request(f"{field} names {name!r}, which is not one of the tools", field)
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
    return {"anyOf": [one(tool, f"/anyOf/{index}") for index, tool in enumerate(tools)]}


def call_grammar(served: Served, tools: Wanted, ignored: Ignored) -> dict[str, Any]:
    """Settings that make the arguments of calls follow their schemas, for strict tools and for models whose tools are
    described in text; else {}. ignored: collects strict fields that cannot be enforced.

    Raises:
        ApiError: the schema of a strict tool, or the regular expression of a custom tool, cannot be enforced.
    """
    in_text = not served.template_tools and served.tool_format is GENERIC and not served.thinks
    if tools.forced or not tools.shown or not (in_text or tools.strict):
        return {}
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools.shown]
    grammar = calls_or_text(functions, tools.several) if served.tool_format is GENERIC and not served.thinks else \
        marked_calls(served.tool_format, functions, tools.several, {text: id for id, text in served.marks.items()})
    if not grammar:
        return _not_enforced(tools, ignored, f"{served.name} has a format of tool calls for which schemas are enforced "
                             "only for forced calls (tool_choice)")
    try:
        check_grammar("grammar", grammar)
    except RequestError as error:
        if tools.strict:
            raise bad_request(f"tools: {error}", "tools", "unsupported") from None
        return {}
    if len(grammar.encode("utf-8", "replace")) <= served.config.budget.max_grammar:
        return {"grammar": grammar}
    return _not_enforced(tools, ignored, "the schemas of all tools together are longer than max_grammar")


def _not_enforced(tools: Wanted, ignored: Ignored, why: str) -> dict[str, Any]:
    """No grammar: `strict` is ignored; custom tools with a regular expression are refused."""
    if tools.ruled:
        raise bad_request(f"the regular expression of the custom tool {min(tools.ruled)} cannot be enforced: {why}",
                          "tools", "unsupported")
    for index, tool in enumerate(tools.shown):
        if tool.function.strict:
            ignored.add(f"tools[{index}].function.strict", f"strict has no effect: {why}")
    return {}


def render(served: Served, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None,
           variables: Mapping[str, Any]) -> ConversationIds:
    """Token ids of a conversation with its tools.

    Raises:
        TokenizerError: the template refuses the messages.
    """
    shown = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    if served.template_tools:
        return served.render(messages, {**variables, **({"tools": shown} if shown else {})})
    messages = _as_text(served.with_system(messages), served.tool_format)
    if not shown:
        return served.render(messages, variables)
    instruction = instructions(shown, served.tool_format)
    ids = served.render(_in_system(messages, instruction), variables)
    name = shown[0]["function"]["name"]
    if name in served.tokenizer.decode(ids):
        return ids
    return served.render(_in_question(messages, instruction), variables)


def instructions(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """A description of the tools in text, for a model whose chat template does not support tools."""
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
    index = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        return [{"role": "user", "content": text}, *messages]
    question = {**messages[index], "content": f"{text}\n\n{messages[index]['content']}"}
    return [*messages[:index], question, *messages[index + 1:]]


def _as_text(messages: Sequence[Mapping[str, Any]], form: ToolFormat) -> list[Mapping[str, Any]]:
    """Messages with calls as text in the model's format, and with results of calls as user messages."""
    found: list[Mapping[str, Any]] = []
    names: dict[str, str] = {}
    results = False  # whether the message before consists of results; further results are appended to it
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
