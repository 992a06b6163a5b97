"""POST /v1/chat/completions."""

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from numflow.decoding.logprobs import TokenLogprob
from numflow.engine.run.generation import Generation
from numflow.server.http.errors import bad_request
from numflow.server.messages.custom_tools import ToldCalls
from numflow.server.messages.logprobs import chat_entries
from numflow.server.messages.reply import Reply, ReplyPart
from numflow.server.messages.schemas import ChatRequest
from numflow.server.messages.wire import DONE, event
from numflow.server.protocols.talk import ReplyChoice, Talk
from numflow.server.service.service import Answer, Generating, Service


async def chat(service: Service, request: Request) -> Response:
    """Answer a conversation."""
    return await service.answer(request, ChatRequest, _Answer)


class _Answer(Answer):
    """The reply to one request."""

    def __init__(self, service: Service, running: Generating, body: ChatRequest):
        self._running, self._body, self._served = running, body, running.served
        begun = ""
        if body.continue_final_message:
            body, begun = _begun(body)
        self._talk = Talk(service, running, body, begun, pieces=bool(body.stream))
        self._calls = ToldCalls(body)
        self._envelope = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion",
                          "created": int(time.time()), "model": self._served.name,
                          "system_fingerprint": self._served.fingerprint}

    async def start(self) -> None:
        await self._talk.start()

    async def finish(self) -> None:
        await self._talk.finish()

    def whole(self) -> dict[str, Any]:
        """The complete reply."""
        return {**self._envelope, "usage": self._running.usage(), "choices": [{
            "index": choice.index, "message": self._message(choice.splitter.reply),
            "logprobs": self._logprobs(choice.entries), "finish_reason": self._reason(choice)}
            for choice in self._talk.ended()]}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply in server-sent events."""
        self._envelope["object"] = "chat.completion.chunk"
        yield b"".join(self._chunk(choice.index, {"role": "assistant", "content": ""}) for choice in self._talk.choices)
        async for fed in self._talk.parts():
            chunks = [chunk for choice, parts in fed for chunk in self._deltas(choice, parts)]
            if chunks:
                yield b"".join(chunks)
        for choice in self._talk.ended():
            chunks = self._deltas(choice, choice.last)
            chunks.append(self._chunk(choice.index, {}, self._take(choice), self._reason(choice)))
            yield b"".join(chunks)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event({**self._envelope, "choices": [], "usage": self._running.usage()})
        yield DONE

    def _deltas(self, choice: ReplyChoice, parts: Sequence[ReplyPart]) -> list[bytes]:
        """Chunks for parts of the reply. Log-probabilities are sent with the next text."""
        deltas = (self._delta(choice, part) for part in parts)
        return [self._chunk(choice.index, delta, self._take(choice)) for delta in deltas if delta]

    def _delta(self, choice: ReplyChoice, part: ReplyPart) -> dict[str, Any]:
        if part.call is not None or part.kind == "arguments":
            return self._calls.delta(choice.index, part)
        if part.kind == "reasoning":
            return {"reasoning_content": part.text, "reasoning": part.text}
        return {"content": part.text}

    def _message(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message |= {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
        if reply.calls:
            message |= {"content": reply.content or None, **self._calls.message(reply.calls)}
        return message

    def _reason(self, choice: ReplyChoice) -> str:
        return self._calls.reason(finish_reason(choice.result, choice.splitter.reply))

    def _take(self, choice: ReplyChoice) -> dict[str, Any] | None:
        """Log-probabilities of the tokens since the last call."""
        entries = choice.new_logprobs()
        return self._logprobs(entries) if entries else None

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return {"content": chat_entries(self._served.tokenizer, entries), "refusal": None}

    def _chunk(self, index: int, delta: Mapping[str, Any], logprobs=None, finish: str | None = None) -> bytes:
        usage = {"usage": None} if self._body.stream_options and self._body.stream_options.include_usage else {}
        return event({**self._envelope, "choices": [{"index": index, "delta": delta, "logprobs": logprobs,
                                                     "finish_reason": finish}], **usage})


def _begun(body: ChatRequest) -> tuple[ChatRequest, str]:
    """The request without its last message, and the text of this message, which the answer continues.

    Raises:
        ApiError: the last message is no text of the assistant, or it is the only message.
    """
    *others, last = body.messages
    if last.role != "assistant" or not isinstance(last.content, str) or last.tool_calls or not others:
        raise bad_request("continue_final_message needs a last message of the assistant with text, after other "
                          "messages", "continue_final_message", "invalid_value")
    return body.model_copy(update={"messages": others}), last.content


def finish_reason(result: Generation, reply: Reply | None = None) -> str:
    """OpenAI's finish_reason of a text."""
    if result.finish_reason == "length":
        return "length"
    called = reply is not None and any(not call.broken for call in reply.calls)
    return "tool_calls" if called else "stop"
