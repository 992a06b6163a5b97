"""POST /v1/chat/completions."""

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from numflow.decoding.logprobs import TokenLogprob
from numflow.decoding.structured import KINDS
from numflow.engine.engine import Engine
from numflow.engine.request.request import Request as Checked
from numflow.engine.run.generation import Generation, Piece
from numflow.server.http.errors import bad_request
from numflow.server.http.event_loop import Run
from numflow.server.messages.logprobs import chat_entries
from numflow.server.messages.reply import Reply, ReplyPart
from numflow.server.messages.schemas import ChatRequest
from numflow.server.messages.settings import chat_settings
from numflow.server.messages.wire import DONE, event
from numflow.server.models.served import Served
from numflow.server.protocols.conversation import ChatPrompt, prepare
from numflow.server.service.service import Generating, Service


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    return await service.answer(request, ChatRequest, _Answer)


class _Answer:
    """The reply to one request."""

    def __init__(self, service: Service, running: Generating, body: ChatRequest):
        self._running, self._body, self._served = running, body, running.served
        self._thinking = service.config.reasoning == "separate"
        self._prompt: ChatPrompt
        self._all: list[_Choice] = []
        self._envelope = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion",
                          "created": int(time.time()), "model": self._served.name,
                          "system_fingerprint": self._served.fingerprint}

    async def start(self) -> None:
        settings = chat_settings(self._body, self._served.defaults, self._running.ignored) | {"chat": True}

        def make(engine: Engine) -> list[Checked]:
            self._prompt = prepare(self._served, self._body, self._thinking, self._running.ignored)
            self._running.check(self._prompt.ids, "messages")
            if self._prompt.settings and (constraint := next((kind for kind in KINDS if kind in settings), None)):
                raise bad_request(f"{constraint} contradicts a tool that has to be called: leave out one of them",
                                  "tool_choice")
            return [engine.request(self._prompt.ids, **settings, **self._prompt.settings)]

        await self._running.start(make)

    async def finish(self) -> None:
        """Wait for all of it."""
        run, = self._running.runs
        choices = self._all = self._choices(run)
        await self._running.finish(lambda run, pieces: [choices[piece.index].feed(piece) for piece in pieces])

    def whole(self) -> dict[str, Any]:
        """The reply in one piece: the stream's parts, put together."""
        run, = self._running.runs
        return {**self._envelope, "usage": self._running.usage(), "choices": [{
            "index": choice.index, "message": _message(choice.end().splitter.reply),
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": finish_reason(run.results[choice.index], choice.splitter.reply)}
            for choice in self._all[:len(run.results)]]}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply in server-sent events."""
        run, = self._running.runs
        self._envelope["object"] = "chat.completion.chunk"
        choices = self._choices(run)
        yield b"".join(self._chunk(choice.index, {"role": "assistant", "content": ""}) for choice in choices)
        async for pieces in run:
            self._running.came(run, pieces)
            chunks = []
            for piece in pieces:
                chunks += self._deltas(choices[piece.index], choices[piece.index].feed(piece))
            if chunks:
                yield b"".join(chunks)
        for choice in choices[:len(run.results)]:
            chunks = self._deltas(choice, choice.end().last)
            reason = finish_reason(run.results[choice.index], choice.splitter.reply)
            chunks.append(self._chunk(choice.index, {}, self._take(choice), reason))
            yield b"".join(chunks)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event({**self._envelope, "choices": [], "usage": self._running.usage()})
        yield DONE

    def _choices(self, run: Run) -> list["_Choice"]:
        return [_Choice(self._served, self._prompt, index) for index in range(len(run.results))]

    def _deltas(self, choice: "_Choice", parts: Sequence[ReplyPart]) -> list[bytes]:
        """Chunks for parts of the reply; log-probabilities go with the first text that comes after them."""
        return [self._chunk(choice.index, delta, self._take(choice)) for part in parts for delta in _delta(part)]

    def _take(self, choice: "_Choice") -> dict[str, Any] | None:
        """Log-probabilities of the tokens that came since the last time."""
        begin, choice.told = choice.told, len(choice.entries)
        return self._logprobs(choice.entries[begin:]) if begin < choice.told else None

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": chat_entries(self._served.tokenizer, entries), "refusal": None}

    def _chunk(self, index: int, delta: Mapping[str, Any], logprobs=None, finish: str | None = None) -> bytes:
        usage = {"usage": None} if self._body.stream_options and self._body.stream_options.include_usage else {}
        return event({**self._envelope, "choices": [{"index": index, "delta": delta, "logprobs": logprobs,
                                                     "finish_reason": finish}], **usage})


class _Choice:
    """A choice as it grows. entries: log-probabilities of its tokens, of which the first `told` were sent."""

    def __init__(self, served: Served, prompt: ChatPrompt, index: int):
        self.index, self.splitter = index, prompt.make_splitter()
        self.entries: list[TokenLogprob] = []
        self.told = 0
        self.last: list[ReplyPart] = []
        self._marks = served.marks

    def feed(self, piece: Piece) -> list[ReplyPart]:
        """Take a piece, with the marks of tool calls and thinking, which decoding leaves out."""
        if piece.logprob is not None:
            self.entries.append(piece.logprob)
        return self.splitter.feed(("" if piece.id is None else self._marks.get(piece.id, "")) + piece)

    def end(self) -> "_Choice":
        """No more pieces come."""
        self.last = self.splitter.feed("", end=True)
        return self


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message |= {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
    if reply.calls:
        message |= {"content": reply.content or None, "tool_calls": [call.message() for call in reply.calls]}
    return message


def _delta(part: ReplyPart) -> list[dict[str, Any]]:
    if part.call is not None:
        call = part.call
        first = {"index": call.index, "id": call.id, "type": "function",
                 "function": {"name": call.call.name, "arguments": ""}}
        return [{"tool_calls": [first]},
                {"tool_calls": [{"index": call.index, "function": {"arguments": call.call.arguments}}]}]
    if part.kind == "reasoning":
        return [{"reasoning_content": part.text, "reasoning": part.text}]
    return [{"content": part.text}]


def finish_reason(result: Generation, reply: Reply | None = None) -> str:
    """OpenAI's word for why a text ended."""
    if result.finish_reason == "length":
        return "length"
    return "tool_calls" if reply is not None and reply.calls else "stop"
