"""POST /infill: fill-in-the-middle, for models with special tokens for it."""

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from numflow.engine.engine import Engine
from numflow.engine.request.request import Request as Checked
from numflow.engine.run.generation import Piece
from numflow.server.messages.settings import own_settings, stops, with_defaults
from numflow.server.messages.text_schemas import InfillRequest
from numflow.server.messages.wire import event
from numflow.server.protocols.inferflow import timings
from numflow.server.service.service import Answer, Generating, Service

REASONS = {"length": "limit", "stop_string": "word", "stop": "eos"}


async def infill(service: Service, request: Request) -> Response:
    """Generate the text between a prefix and a suffix."""
    return await service.answer(request, InfillRequest, _Answer)


class _Answer(Answer):
    """The reply to one request."""

    def __init__(self, service: Service, running: Generating, body: InfillRequest):
        self._running, self._body, self._served = running, body, running.served

    async def start(self) -> None:
        await self._running.start(self._make)

    def _make(self, engine: Engine) -> list[Checked]:
        body, ignored = self._body, self._running.ignored
        files = [(file.filename or "file", file.text) for file in body.input_extra or []]
        ids, extra = self._served.filled_in(body.input_prefix + (body.prompt or ""), body.input_suffix, files)
        self._running.check(ids, "input_prefix")
        if (body.model_extra or {}).pop("samplers", None):
            ignored.add("samplers", "samplers has no effect here: filters come in the order of every route")
        given = {"temperature": body.temperature, "repetition_penalty": body.repeat_penalty,
                 "stop": None if body.stop is None else stops(body.stop, ignored)}
        settings = with_defaults({**own_settings(body, ignored), **{
            name: value for name, value in given.items() if value is not None}}, self._served.defaults, talks=False)
        limit = self._served.defaults.get("max_tokens") if body.n_predict in (None, -1) else body.n_predict
        return [engine.request(ids, **{**settings, **extra}, max_tokens=limit)]

    async def finish(self) -> None:
        await self._running.finish()

    def whole(self) -> dict[str, Any]:
        """The reply in one piece."""
        run, = self._running.runs
        return self._end(run.results[0].text, run.results[0].ids)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply in server-sent events. The last event has `stop` true; there is no [DONE]."""
        run, = self._running.runs
        async for pieces in run:
            self._running.came(run, pieces)
            if text := "".join(pieces):
                yield event(self._part(text, pieces) | {"stop": False})
        yield event(self._end("", []))

    def _part(self, text: str, pieces: list[Piece]) -> dict[str, Any]:
        return {"index": 0, "content": text, "tokens": [piece.id for piece in pieces if piece.id is not None]}

    def _end(self, text: str, ids: list[int]) -> dict[str, Any]:
        result = self._running.runs[0].results[0]
        return {"index": 0, "content": text, "tokens": ids, "stop": True, "model": self._served.name,
                "stop_type": REASONS.get(result.finish_reason or "", "none"),
                "stopping_word": result.stop_string or "", "truncated": False,
                "tokens_predicted": len(result.ids), "tokens_evaluated": self._running.prompt_tokens,
                "tokens_cached": self._running.usage()["prompt_tokens_details"]["cached_tokens"],
                "timings": timings(result)}
