"""Convert a chat request to a prompt: messages for the chat template, tools, and the tool choice."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numflow.engine.request.prompt import ConversationIds
from numflow.errors import quoted
from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.custom_tools import INPUT, newer
from numflow.server.messages.overflow import fitting
from numflow.server.messages.reply import Splitter, opens_thinking
from numflow.server.messages.schemas import ChatRequest, CustomMessageCall, Message, MessageCall, Tool
from numflow.server.models.served import Served
from numflow.server.protocols.tools import call_grammar, render, wanted

TEMPLATE_NAMES = ("messages", "tools", "template", "add_generation_prompt")  # not allowed in chat_template_kwargs
MEDIA = ("images", "image", "image_url", "audio", "video", "videos")  # media fields of messages in other interfaces


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    settings: additional settings for forced tools. splitter: arguments of each choice's Splitter. wished: settings that
    apply only if the request has no constraint of its own.
    """

    ids: ConversationIds
    settings: Mapping[str, Any]
    splitter: Mapping[str, Any]
    wished: Mapping[str, Any] = field(default_factory=dict)

    def make_splitter(self, pieces: bool = False) -> Splitter:
        """Make a Splitter for one choice. pieces: stream the arguments of calls."""
        return Splitter(**self.splitter, pieces=pieces)


def prepare(served: Served, body: ChatRequest, thinking: bool, ignored: Ignored, begun: str = "",
            most: int = 0) -> ChatPrompt:
    """The prompt of a chat request.

    thinking: separate thinking from the answer. ignored: collects fields that the template does not use. begun: the
    beginning of the answer, which the model continues. most: largest number of prompt tokens; 0: the context.

    Raises:
        ApiError: the model cannot take the messages or tools. TokenizerError: the template refuses the messages.
    """
    variables = template_variables(served, body.chat_template_kwargs, ignored)
    if body.reasoning_effort is not None and served.knows("reasoning_effort", "reasoning_effort", ignored):
        variables["reasoning_effort"] = body.reasoning_effort
    tools = wanted(body)
    forced = bool(tools.forced)
    ids = _rendered(served, body, tools.shown, variables, ignored, min(most or served.model.context,
                                                                       served.model.context))
    if forced and begun:
        raise bad_request("an answer with a given beginning cannot be a forced tool call: leave out the last message "
                          "or tool_choice", "tool_choice")
    if begun and opens_thinking(served.tokenizer, ids, served.think_marks):
        begun = f"\n{served.think_marks.end}\n\n{begun}"  # `begun` is part of the answer, not of the thinking
    opening = begun if not forced else "" if tools.grammar else served.tool_format.opening
    if opening:
        ids = ConversationIds([*ids, *served.tokenizer.encode(opening, add_special=False)])
    return ChatPrompt(ids, tools.constraint(), {
        "tools": tools.form(served), "forced": forced, "names": tools.names, "thinking": thinking and not forced,
        "marks": served.think_marks, "inside": opens_thinking(served.tokenizer, ids, served.think_marks),
        "single": not tools.several},
        call_grammar(served, tools, ignored))


def _rendered(served: Served, body: ChatRequest, tools: Sequence[Tool], variables: Mapping[str, Any],
              ignored: Ignored, most: int) -> ConversationIds:
    """Token ids of the conversation, without its oldest turns if it is too long and `overflow` allows dropping."""
    messages = messages_of(body.messages)
    if (body.overflow or served.defaults.get("overflow")) in (None, "refuse"):
        return render(served, messages, tools, variables)
    answer = body.max_completion_tokens or body.max_tokens or served.defaults.get("max_tokens")
    ids, dropped = fitting(messages, lambda some: render(served, some, tools, variables), most, answer)
    if dropped:
        ignored.why["messages"] = f"the oldest {dropped} turns are dropped: the conversation is longer than the context"
    return ids


def template_variables(served: Served, given: Mapping[str, Any] | None, ignored: Ignored) -> dict[str, Any]:
    """The chat_template_kwargs that the chat template uses.

    Raises:
        ApiError: a name is one of TEMPLATE_NAMES.
    """
    for name in given or {}:
        if name in TEMPLATE_NAMES:
            raise bad_request(f"chat_template_kwargs: {name} has its own field in the request, or cannot be set",
                              f"chat_template_kwargs.{name}")
    return {name: value for name, value in (given or {}).items()
            if served.knows(name, f"chat_template_kwargs.{name}", ignored)}


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for the chat template: content is text, and arguments of calls are objects.

    Raises:
        ApiError: a message has no content, or content that is no text.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(newer(messages))]


def _message(message: Message, place: str) -> dict[str, Any]:
    for name in MEDIA:
        if (message.model_extra or {}).get(name):
            raise bad_request(f"{place} has {name}; models here read text only", f"{place}.{name}", "unsupported")
    plain = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    content = message.content
    if isinstance(content, list):
        for index, part in enumerate(content):
            if part.type != "text" or part.text is None:
                raise bad_request(f"{place}.content[{index}] is of type {quoted(part.type)}; models here read text "
                                  "only", f"{place}.content[{index}]", "unsupported")
        content = "".join(part.text or "" for part in content)
    if content is None and not message.tool_calls:
        raise bad_request(f"{place} has no content", f"{place}.content", "missing_field")
    plain["content"] = content or ""
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, place) for call in message.tool_calls]
    return plain


def _call(call: MessageCall | CustomMessageCall, place: str) -> dict[str, Any]:
    if isinstance(call, CustomMessageCall):
        name, arguments = call.custom.name, {INPUT: call.custom.input}
    else:
        name, arguments = call.function.name, _arguments(call.function.arguments, place)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str, place: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise bad_request(f"{place}.tool_calls: arguments are no JSON", f"{place}.tool_calls") from None
    if not isinstance(arguments, dict):
        raise bad_request(f"{place}.tool_calls: arguments are no object", f"{place}.tool_calls")
    return arguments
