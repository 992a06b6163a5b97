"""Ollama's POST /api/chat and POST /api/generate."""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from numflow.engine.request.prompt import ConversationIds
from numflow.errors import quoted
from numflow.server.http.errors import bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.constraints import FIELDS, refuse
from numflow.server.messages.logprobs import chat_entries
from numflow.server.messages.ollama_schemas import OllamaChat, OllamaGenerate, OllamaMessage, OllamaSettled
from numflow.server.messages.reply import ReplyPart
from numflow.server.messages.schemas import ChatRequest
from numflow.server.messages.settings import OWN
from numflow.server.messages.wire import Json, dump
from numflow.server.models.served import Served
from numflow.server.protocols.conversation import ChatPrompt, prepare
from numflow.server.protocols.talk import SHARED, ReplyChoice, Talk, chat_request
from numflow.server.service.service import Answer, Generating, Service

NANOSECONDS = 1e9
NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}  # Ollama's options -> ours
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(-?)((?:[0-9]{1,9}(?:\.[0-9]{0,9})?(?:ns|us|µs|ms|s|m|h))+)")


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    body = await service.read(request, OllamaChat)
    _keep(service, body)
    if not body.messages:
        return await _load(service, request, body, {"message": {"role": "assistant", "content": ""}})
    return await service.answered(request, body, _Chat)


async def generate(service: Service, request: Request) -> Response:
    """Answer a prompt."""
    body = await service.read(request, OllamaGenerate)
    _keep(service, body)
    if not body.prompt and not body.suffix:
        return await _load(service, request, body, {"response": ""})
    return await service.answered(request, body, _Generate)


async def _load(service: Service, request: Request, body: OllamaSettled, empty: Mapping[str, Any]) -> Json:
    """Load the model of a request without a prompt, or unload it if keep_alive is 0."""
    name, ends = service.pool.find(body.model), seconds_of(body.keep_alive) == 0
    if ends:
        await service.pool.unload(name)
    else:
        (await service.leased(request, name)).release()
    return Json({"model": name, "created_at": now(), **empty, "done": True,
                 "done_reason": "unload" if ends else "load"})


def _keep(service: Service, body: OllamaSettled) -> None:
    """Apply a request's keep_alive to its model."""
    if body.keep_alive is not None:
        service.pool.keep(service.pool.find(body.model), seconds_of(body.keep_alive))


def seconds_of(span: str | float | None) -> float | None:
    """Seconds of a keep_alive: a number of seconds, or text such as "5m" or "1h30m"; negative: for ever.

    Raises:
        ApiError: it is no duration.
    """
    if span is None:
        return None
    if isinstance(span, str):
        if found := _SPAN.fullmatch(span):
            parts = re.findall(r"([0-9.]+)(ns|us|µs|ms|s|m|h)", found[2])
            span = (-1 if found[1] else 1) * sum(float(count) * _UNITS[unit] for count, unit in parts)
        elif re.fullmatch(r"-?[0-9]{1,9}", span):
            span = float(span)
        else:
            raise bad_request(f'keep_alive should be seconds, or text such as "5m", is {quoted(span)}', "keep_alive",
                              "invalid_value")
    if span != span:
        raise bad_request("keep_alive should be a number", "keep_alive", "invalid_value")
    return float("inf") if span < 0 else float(span)


def now() -> str:
    """The current time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def fields_of(body: OllamaSettled, served: Served, ignored: Ignored) -> dict[str, Any]:
    """Fields of a chat request, without its messages.

    Raises:
        ApiError: the request asks for thinking of a model without it, or an unknown option is a constraint.
    """
    found: dict[str, Any] = {"format": body.format, "logprobs": body.logprobs,
                             "top_logprobs": body.top_logprobs if body.logprobs else None}
    if body.think is not None:
        wanted = body.think is not False
        if served.mentions("enable_thinking"):
            found["chat_template_kwargs"] = {"enable_thinking": wanted}
        elif wanted and not served.thinks:
            raise bad_request(f"{served.name} does not support thinking", "think", "unsupported")
        if isinstance(body.think, str):
            found["reasoning_effort"] = body.think
    for name, value in (body.options or {}).items():
        option = NAMES.get(name, name)
        if value is None:
            continue
        if option == "max_tokens":
            found[option] = max(value, -1) if isinstance(value, int) else value  # -2: until the context is full
        elif option in OWN or option in FIELDS or option in SHARED:
            found[option] = value
        else:
            refuse(name, value, "options.")
            ignored.add(f"options.{name}"[:100], f"options.{name:.80} has no effect on a request")
    return found


class _Answer(Answer):
    """The reply to one request, as JSON lines."""

    media_type = "application/x-ndjson"

    def __init__(self, service: Service, running: Generating, body: OllamaSettled):
        self._service, self._running, self.body, self._begin = service, running, body, time.perf_counter()
        self._talk: Talk
        self.thinking, self.text = "", ""
        self._calls: list[dict[str, Any]] = []

    async def start(self) -> None:
        self._running.served.need_engine()
        self._talk = await asyncio.to_thread(self.talk)
        await self._talk.start()

    def talk(self) -> Talk:
        """Make the Talk of the request; called in a thread."""
        raise NotImplementedError

    def content_fields(self, text: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Fields of a line for a part of the reply."""
        raise NotImplementedError

    def chat_request(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> ChatRequest:
        """The request as a chat request."""
        ignored = self._running.ignored
        fields = fields_of(self.body, self._running.served, ignored)
        return chat_request(self.body, ignored, {"messages": messages, **fields, **more})

    async def finish(self) -> None:
        await self._talk.finish(self._take)

    def whole(self) -> dict[str, Any]:
        """The reply in one piece."""
        choice, = self._talk.ended()
        self._take(choice, choice.last)
        return self._line(self.content_fields(self.text, self.thinking, self._calls) | self._logprobs(choice.entries),
                          self._end(choice))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply in lines."""
        async for fed in self._talk.parts():
            if lines := [line for choice, parts in fed for line in self._lines(choice, parts)]:
                yield b"".join(lines)
        choice, = self._talk.ended()
        fields = self.content_fields("") | self._logprobs(choice.new_logprobs())
        last = dump(self._line(fields, self._end(choice))) + b"\n"
        yield b"".join([*self._lines(choice, choice.last), last])

    def _take(self, choice: ReplyChoice, parts: Sequence[ReplyPart]) -> None:
        for part in parts:
            if part.kind == "called":
                self._calls.append(_call(part))
            elif part.kind == "reasoning":
                self.thinking += part.text
            elif part.kind == "content":
                self.text += part.text

    def _lines(self, choice: ReplyChoice, parts: Sequence[ReplyPart]) -> list[bytes]:
        lines = []
        for part in parts:
            if part.kind in ("call", "arguments"):
                continue
            content = self.content_fields("", calls=[_call(part)]) if part.call is not None else (
                self.content_fields("", part.text) if part.kind == "reasoning" else self.content_fields(part.text))
            lines.append(dump(self._line(content | self._logprobs(choice.new_logprobs()), {"done": False})) + b"\n")
        return lines

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any]:
        return {"logprobs": chat_entries(self._running.served.tokenizer, entries)} if entries else {}

    def _line(self, content: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self._running.served.name, "created_at": now(), **content, **state}

    def _end(self, choice: ReplyChoice) -> dict[str, Any]:
        """Fields of the last line: reason, counts, and times in nanoseconds."""
        stats = choice.result.stats
        return {"done": True, "done_reason": "length" if choice.result.finish_reason == "length" else "stop",
                "total_duration": int((time.perf_counter() - self._begin) * NANOSECONDS), "load_duration": 0,
                "prompt_eval_count": self._running.prompt_tokens,
                "prompt_eval_duration": int(stats["prefill_s"] * NANOSECONDS),
                "eval_count": len(choice.result.ids), "eval_duration": int(stats["decode_s"] * NANOSECONDS)}


def _call(part: ReplyPart) -> dict[str, Any]:
    assert part.call is not None
    call = part.call.call
    return {"id": part.call.id, "function": {"index": part.call.index, "name": call.name,
                                             "arguments": json.loads(call.arguments)}}


class _Chat(_Answer):
    """The reply to a conversation. A last message of the assistant is continued."""

    body: OllamaChat

    def talk(self) -> Talk:
        messages, begun = _messages(self.body.messages or [])
        tools = [tool.model_dump(exclude_none=True) for tool in self.body.tools or []]
        return Talk(self._service, self._running, self.chat_request(messages, tools=tools or None), begun)

    def content_fields(self, text: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        more = {name: value for name, value in (("thinking", thinking), ("tool_calls", calls)) if value}
        return {"message": {"role": "assistant", "content": text, **more}}


def _messages(messages: Sequence[OllamaMessage]) -> tuple[list[dict[str, Any]], str]:
    """Messages of a chat request, and the beginning of the answer, which the model continues."""
    found: list[dict[str, Any]] = []
    ids: list[str] = []  # ids of calls without results so far
    for index, message in enumerate(messages):
        if message.images:
            raise bad_request(f"messages[{index}] has images; models here read text only", f"messages[{index}].images",
                              "unsupported")
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls: list[dict[str, Any]] = [{
                "id": call.id or f"call_{index}_{number}", "type": "function", "function": {
                    "name": call.function.name, "arguments": json.dumps(call.function.arguments or {})}}
                for number, call in enumerate(message.tool_calls)]
            plain["tool_calls"], ids = calls, [str(call["id"]) for call in calls]
        if message.role == "tool":
            plain["tool_call_id"] = message.tool_call_id or (ids.pop(0) if ids else f"call_{index}")
            plain |= {"name": message.tool_name} if message.tool_name else {}
        found.append(plain)
    last = found[-1]
    if len(found) > 1 and last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        return found[:-1], last["content"]
    return found, ""


class _Generate(_Answer):
    """The reply to a prompt, raw or as a user message."""

    body: OllamaGenerate

    def talk(self) -> Talk:
        body, served = self.body, self._running.served
        if body.images:
            raise bad_request("images are not supported; models here read text only", "images", "unsupported")
        if body.template:
            raise bad_request("template is not supported: the model's own template is used, or none with raw",
                              "template", "unsupported")
        messages = [{"role": "system", "content": body.system}] if body.system else []
        chat = self.chat_request([*messages, {"role": "user", "content": body.prompt or ""}])

        def prompt() -> ChatPrompt:
            settings: dict[str, Any] = {}
            if body.suffix:
                ids, settings = served.filled_in(body.prompt or "", body.suffix)
            elif body.raw or not served.chats:
                ids = served.prompts.encode(body.prompt or "")
            else:
                made = prepare(served, chat, self._service.config.reasoning == "separate", self._running.ignored)
                return ChatPrompt(ConversationIds([*(body.context or []), *made.ids]), made.settings, made.splitter)
            return ChatPrompt(ConversationIds([*(body.context or []), *ids]), settings, {"thinking": False})

        return Talk(self._service, self._running, chat, make=prompt)

    def content_fields(self, text: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def _end(self, choice: ReplyChoice) -> dict[str, Any]:
        return super()._end(choice) | {"context": [*self._talk.ids, *choice.result.ids]}
