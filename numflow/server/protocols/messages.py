"""Anthropic's Messages: POST /v1/messages and POST /v1/messages/count_tokens."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.messages_schemas import CountRequest, MessagesRequest
from numflow.server.messages.reply import ReplyPart
from numflow.server.messages.schemas import ChatRequest, Settled
from numflow.server.messages.wire import Json, named_event
from numflow.server.models.served import Served
from numflow.server.protocols.conversation import prepare
from numflow.server.protocols.messages_content import Blocks, Event, messages_of_turns, tools_of_messages
from numflow.server.protocols.talk import ReplyChoice, Talk, chat_request
from numflow.server.service.service import Answer, Generating, Service


async def messages(service: Service, request: Request) -> Response:
    """Answer a conversation of blocks."""
    return await service.answer(request, MessagesRequest, _Answer)


async def count_tokens(service: Service, request: Request) -> Json:
    """Number of tokens of a conversation's prompt."""
    body = await service.read(request, CountRequest)
    ignored: Ignored = request.state.ignored

    def work(served: Served) -> int:
        fields, begun = _fields(body, served, ignored)
        return len(prepare(served, chat_request(Settled(), ignored, fields), True, ignored, begun).ids)

    return Json({"input_tokens": await service.in_thread(request, body.model, work)})


def _fields(body: CountRequest, served: Served, ignored: Ignored) -> tuple[dict[str, Any], str]:
    """Fields of a chat request, and the beginning of the answer, which the model continues."""
    found, begun = messages_of_turns(body.messages, body.system)
    fields = {"messages": found, **tools_of_messages(body, ignored)}
    if body.thinking is not None:
        wanted, name = body.thinking.type != "disabled", "enable_thinking"
        if served.knows(name, "thinking", ignored) if wanted else served.mentions(name):
            fields["chat_template_kwargs"] = {name: wanted}
        if body.thinking.budget_tokens is not None:
            ignored.add("thinking.budget_tokens", "thinking.budget_tokens has no effect here")
    output = body.output_config
    if output is not None and output.effort is not None:
        fields["reasoning_effort"] = output.effort
    form = body.output_format if output is None or output.format is None else output.format
    if form is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
    return fields, begun


class _Answer(Answer):
    """The message that answers one request."""

    def __init__(self, service: Service, running: Generating, body: MessagesRequest):
        for name in ("container", "mcp_servers"):
            if getattr(body, name):
                raise bad_request(f"{name} is not supported: this service runs no tools itself", name, "unsupported")
        self._service, self._running, self._body = service, running, body
        self._blocks = Blocks()
        self._talk: Talk
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant",
            "model": running.served.name, "content": [], "stop_reason": None, "stop_sequence": None}

    async def start(self) -> None:
        chat, begun = await asyncio.to_thread(self._chat)
        self._talk = Talk(self._service, self._running, chat, begun, pieces=bool(self._body.stream))
        await self._talk.start()

    def _chat(self) -> tuple[ChatRequest, str]:
        body, ignored = self._body, self._running.ignored
        fields, begun = _fields(body, self._running.served, ignored)
        for name in ("context_management", "cache_control"):
            if getattr(body, name):
                ignored.add(name, f"{name} has no effect: conversations are never shortened, and the prefix cache is "
                            "automatic")
        return chat_request(body, ignored, {
            **fields, "max_tokens": body.max_tokens, "temperature": body.temperature, "top_p": body.top_p,
            "top_k": body.top_k, "stop": body.stop_sequences}), begun

    async def finish(self) -> None:
        await self._talk.finish(lambda choice, parts: self._reply_events(parts))

    def whole(self) -> dict[str, Any]:
        """The complete message, assembled by the same code as the stream's events."""
        choice, = self._talk.ended()
        self._reply_events(choice.last)
        return {**self._message, "content": self._blocks.blocks, **self._end(choice), "usage": self._usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The message in server-sent events."""
        begun = {**self._usage(), "output_tokens": 0}  # also if tokens have been generated by now
        yield _events([("message_start", {"message": {**self._message, "usage": begun}}), ("ping", {})])
        async for fed in self._talk.parts():
            if events := [event for _, parts in fed for event in self._reply_events(parts)]:
                yield _events(events)
        choice, = self._talk.ended()
        yield _events([*self._reply_events(choice.last), *self._blocks.end(),
                       ("message_delta", {"delta": self._end(choice), "usage": self._usage()}), ("message_stop", {})])

    def _reply_events(self, parts: Sequence[ReplyPart]) -> list[Event]:
        """Take parts of the reply; return their events."""
        return [event for part in parts for event in self._blocks.take(part)]

    def _end(self, choice: ReplyChoice) -> dict[str, Any]:
        result = choice.result
        reason = {"length": "max_tokens", "stop_string": "stop_sequence"}.get(result.finish_reason or "", "end_turn")
        if any(not call.broken for call in choice.splitter.reply.calls) and reason == "end_turn":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": result.stop_string if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, int]:
        """Token counts in Anthropic's shape: input_tokens are without tokens from the prefix cache."""
        usage = self._running.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"],
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


def _events(events: Sequence[Event] | Iterator[Event]) -> bytes:
    return b"".join(named_event(kind, {"type": kind, **fields}) for kind, fields in events)
