"""The service's state, which all routes share: configuration, models, running requests, metrics."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from numflow.engine.engine import Engine
from numflow.engine.request.request import Request as Checked
from numflow.engine.run.generation import Piece
from numflow.server.config.config import Config
from numflow.server.http.errors import ApiError, bad_request
from numflow.server.http.event_loop import Hub, Run
from numflow.server.http.ignored import Ignored
from numflow.server.http.jobs import Jobs
from numflow.server.messages.wire import EventStream, Json, dump_long, error_part, parse, read_body
from numflow.server.models.pool import Lease, ModelPool
from numflow.server.models.served import Served
from numflow.server.service.limits import Limits
from numflow.server.service.metrics import Metrics, Watch
from numflow.server.service.store import ResponseStore
from numflow.server.service.traces import Traces

log = logging.getLogger("numflow.server")
Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")
LONG = 1 << 15  # bytes of a body from which on it is parsed in a thread
READERS = 2  # largest number of such threads
WORKERS = 4  # threads of routes that do not generate text
LONG_ANSWER = 4096  # tokens of an answer from which on its JSON is written in a thread


class Service:
    """The state of one service.

    ready: called with the memory plan of each model when the preloaded models are ready.
    """

    def __init__(self, config: Config, pool: ModelPool | None = None):
        self.config = config
        self.pool = pool or ModelPool(config)
        self.jobs = Jobs(config.request_timeout)
        self.metrics = Metrics(self.pool)
        self.responses = ResponseStore(config.max_responses, config.responses_memory)
        self.limits = Limits(config.requests_per_minute, config.tokens_per_minute, config.tokens_per_day)
        self.traces = Traces(config.traces) if config.traces and not config.replicas else None
        self.started = time.time()
        self.draining = False
        self.failure: BaseException | None = None
        self._hub: Hub | None = None
        self.ready: Callable[[dict[str, str]], None] = lambda plans: None
        self._workers = ThreadPoolExecutor(WORKERS, "numflow-work")
        self._readers = asyncio.Semaphore(READERS)

    @property
    def hub(self) -> Hub:
        """The Hub of the running event loop."""
        if self._hub is None:
            self._hub = Hub(asyncio.get_running_loop())
        return self._hub

    def loaded(self, loading: asyncio.Task) -> None:
        """Callback of preloading: report that the service is ready, or shut it down after an error."""
        if not loading.cancelled() and (error := loading.exception()) is not None:
            self.failure, self.draining = error.__cause__ or error, True
        elif not loading.cancelled():
            plans = {served.name: str(served.memory) for served in self.pool.loaded()}
            log.info({"ready": list(plans), "memory": plans})
            self.ready(plans)

    def watched(self, watching: asyncio.Task) -> None:
        """Callback of the end of ModelPool.watch: shut the service down after an error."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self.failure, self.draining = error, True

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Read and check the request's body.

        Raises:
            ApiError: the body is too long, too slow, or invalid.
        """
        data = await read_body(request, self.config.max_body, self.config.body_timeout)
        if self.config.log_prompts:
            request.state.body = {"body": data.decode("utf-8", "replace")}
        ignored = request.state.ignored = Ignored(self.config.strict)
        if len(data) < LONG:
            return parse(kind, data, ignored)
        async with self._readers:
            return await asyncio.to_thread(parse, kind, data, ignored)

    async def leased(self, request: Request, name: str | None) -> Lease:
        """Load the model of a request, if necessary, and lease it."""
        lease = await self.pool.acquire(name)
        request.state.facts = {"model": lease.served.name}
        return lease

    async def in_thread(self, request: Request, name: str | None, work: Callable[[Served], T],
                        computes: bool = False) -> T:
        """Run slow work on a model in a thread. computes: the work runs the network, without adapters.

        If the client disconnects, the work continues and the model stays loaded until it ends.
        """
        lease = await self.leased(request, name)
        if computes and lease.adapter is not None:
            lease.release()
            raise bad_request(f"the adapter {lease.adapter!r:.200} is only for generating text; use the model "
                              f"{lease.served.name!r}, or merge the adapter (merge)", "model")
        running = asyncio.get_running_loop().run_in_executor(self._workers, work, lease.served)

        def done(future: asyncio.Future) -> None:
            lease.release()
            if not future.cancelled():
                future.exception()  # marks the exception as retrieved

        running.add_done_callback(done)
        return await self.jobs.run(request.receive, _shielded(running))

    async def answer(self, request: Request, kind: type[Body],
                     make: Callable[["Service", "Generating", Body], "Answer"]) -> Response:
        """Answer a request that generates text. make: makes the Answer."""
        return await self.answered(request, await self.read(request, kind), make)

    async def answered(self, request: Request, body: Any,
                       make: Callable[["Service", "Generating", Any], "Answer"]) -> Response:
        """The answer to a parsed body, in one piece, or streamed if body.stream. make: makes the Answer."""
        running = Generating(self, request, await self.leased(request, body.model))
        try:
            answer = make(self, running, body)
            await answer.start()
            if body.stream:
                return self.stream(request, answer.stream(), running.close, answer.failed, answer.media_type)
            await answer.finish()
            long = running.usage()["total_tokens"] > LONG_ANSWER
            reply = await asyncio.to_thread(lambda: dump_long(answer.whole())) if long else answer.whole()
        except BaseException:
            running.close()
            raise
        running.close()
        return Json(reply)

    def stream(self, request: Request, parts: AsyncGenerator[bytes, None], closed: Callable[[], None],
               failed: Callable[[ApiError], bytes | None] = lambda error: None,
               media_type: str = "text/event-stream") -> EventStream:
        """A streamed answer. failed: makes the last part for an error; if it returns None, the error has the shape of
        the route's protocol."""
        def last(error: ApiError) -> bytes:
            part = failed(error)
            return error_part(error, request.method, request.url.path) if part is None else part

        return EventStream(self.jobs, request, parts, closed, failed=last, media_type=media_type,
                           keep_alive=self.config.keep_alive)


class Answer(Protocol):
    """A route's answer to a request, made from the generated pieces."""

    media_type = "text/event-stream"  # of the stream

    def failed(self, error: ApiError) -> bytes | None:
        """The last part of a stream that ends with an error; None: use the protocol's shape."""
        return None

    async def start(self) -> None:
        """Check the request and queue it."""

    async def finish(self) -> None:
        """Wait for the end of the generation."""

    def whole(self) -> dict[str, Any]:
        """The complete reply, after `finish`."""

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The reply in parts."""


async def _shielded(running: asyncio.Future[T]) -> T:
    return await asyncio.shield(running)


class Adapted:
    """An engine whose requests use an adapter by default."""

    def __init__(self, engine: Engine, adapter: str):
        self._engine, self._own = engine, {"adapter": adapter}

    def request(self, prompt: Any, *given: Any, **settings: Any) -> Checked:
        """As Engine.request."""
        return self._engine.request(prompt, *given, **(self._own | settings))

    def translation_requests(self, texts: Any, *given: Any, **settings: Any) -> list[Checked]:
        """As Engine.translation_requests."""
        return self._engine.translation_requests(texts, *given, **(self._own | settings))


class Generating:
    """One request that generates text, from its checked settings to the last piece.

    runs: one Run for each prompt. The model stays loaded until `close`.
    """

    def __init__(self, service: Service, request: Request, lease: Lease):
        self.service, self.request, self.lease, self.served = service, request, lease, lease.served
        self.ignored: Ignored = request.state.ignored
        self.runs: list[Run] = []
        self.prompt_tokens = self._counted = 0
        self._watch = Watch(service.metrics, self.served.name)

    async def start(self, make: Callable[[Engine], Sequence[Checked]], priority: int = 0) -> None:
        """Queue the engine's requests. make: makes and checks them, in a thread.

        Raises:
            ApiError: there are too many, or the queue is full. NumflowError: raised by make.
        """
        engine = self.served.need_engine()
        requests = await asyncio.to_thread(make, engine if self.lease.adapter is None else cast(
            Engine, Adapted(engine, self.lease.adapter)))
        self.check_count(sum(max(checked.samples, checked.n) for checked in requests))
        owner = getattr(self.request.state, "owner", "")
        requests = [replace(checked, cache_key=(owner, checked.cache_key)) for checked in requests]
        retry = self.service.metrics.seconds_per_request(self.served.name)
        for checked in requests:
            self.ignored.update(checked.ignored)
        for checked in requests:
            self.runs.append(Run(self.service.hub, engine, checked, checked.samples, priority, retry))
            self.prompt_tokens += len(checked.prompt)
        self.service.limits.tokens(owner, self.prompt_tokens)

    def check_count(self, answers: int) -> None:
        """Check the number of answers of a request.

        Raises:
            ApiError: more than max_choices.
        """
        most = self.service.config.max_choices
        if answers > most:
            raise bad_request(f"the request is for {answers} answers; the limit is {most} (max_choices)", "n")

    def check(self, ids: Sequence[int], param: str) -> None:
        """Check the length of a prompt.

        Raises:
            ApiError: it is longer than the model's context or max_prompt_tokens.
        """
        self.served.check_length(ids, self.service.config.max_prompt_tokens, param)

    async def finish(self, take: Callable[[Run, list[Piece]], Any] = lambda run, pieces: None) -> None:
        """Wait for the end of the generation. take: called with pieces when they arrive.

        Raises:
            ClientGone, ApiError: the request was cancelled.
        """
        async def wait():
            for run in self.runs:
                async for pieces in run:
                    self.came(run, pieces)
                    take(run, pieces)

        await self.service.jobs.run(self.request.receive, wait())

    def came(self, run: Run, pieces: list[Piece]) -> None:
        """Record the arrival of pieces, for metrics."""
        self._watch.came(run, pieces)

    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape."""
        new = sum(run.new_tokens for run in self.runs)
        cached = sum(int(run.results[0].stats.get("cached_tokens", 0)) for run in self.runs if run.results)
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": new, "total_tokens": self.prompt_tokens + new,
                "prompt_tokens_details": {"cached_tokens": cached}}

    def close(self) -> None:
        """Cancel running generations, record counts, and release the model."""
        for run in self.runs:
            run.cancel()
        new = sum(run.new_tokens for run in self.runs)
        self.service.limits.tokens(getattr(self.request.state, "owner", ""), new - self._counted)
        self._counted = new
        self._watch.end(self.prompt_tokens, self.runs)
        new = sum(run.new_tokens for run in self.runs)
        self.served.last_request = (self.prompt_tokens, new)
        self.request.state.facts = {"model": self.served.name, "prompt_tokens": self.prompt_tokens, "new_tokens": new}
        self.request.state.runs = self.runs
        self.lease.release()
