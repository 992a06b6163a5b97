"""The front process of a service with replicas: it listens, checks API keys, and forwards requests (replicas.py)."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

import numflow
from numflow.partition.cluster.connect import connected
from numflow.server import listen
from numflow.server.app import ENDPOINTS, Endpoint, Handler, page, schema
from numflow.server.config.config import Config
from numflow.server.explore import routes as explore
from numflow.server.http.ignored import HEADER
from numflow.server.messages.wire import Json, read_body
from numflow.server.protocols import responses
from numflow.server.replicas.merge import merged
from numflow.server.replicas.replica import Head, ReplicaCall
from numflow.server.replicas.replicas import Replicas
from numflow.server.service import status
from numflow.server.service.service import Service
from numflow.server.service.store import PassedResponses, ResponseStore, StoredResponse
from numflow.server.service.traces import Traces

_FORWARDED = (b"content-type", b"traceparent", b"tracestate")  # request headers that are forwarded to a replica
_OWN_HEADERS = (b"content-length", b"x-request-id")  # response headers that the front makes itself


def serve(config: Config, listens: Callable[[str], None], serves: Callable[[str, dict[str, str]], None]) -> None:
    """Run a service of `config.replicas` replicas until SIGINT or SIGTERM, as listen.serve does."""
    connected()  # in this thread: in another thread Ray would install its own handler of SIGTERM, which aborts
    if config.traces:
        Traces(config.traces).close()  # reports errors of the option here; the replicas make the traces
    replicas = Replicas(config, config.replicas)
    service = Service(config, replicas)  # type: ignore[arg-type]  # Replicas has the methods of a pool that are used
    listen.serve(service, listens, serves, endpoints(replicas))


def endpoints(replicas: Replicas) -> Sequence[Endpoint]:
    """The routes of the front: routes that it answers itself, and routes that it forwards."""
    async def forward(service: Service, request: Request) -> Response:
        return await _forward(service, replicas, request)

    async def forward_with_responses(service: Service, request: Request) -> Response:
        return await _forward(service, replicas, request, with_responses=True)

    async def all_status(service: Service, request: Request) -> Json:
        return Json({"version": numflow.__version__, "uptime_s": round(time.time() - service.started, 1),
                     "requests": len(service.jobs), "draining": service.draining,
                     "replicas": await replicas.all("status")})

    async def all_metrics(service: Service, request: Request) -> Response:
        return Response(merged(service.metrics.text().decode(), await replicas.all("metrics")),
                        media_type=service.metrics.content_type)

    handlers: dict[Any, Handler] = {status.health: status.health, status.live: status.live, status.status: all_status,
                               status.metrics: all_metrics, page: page, explore.page: explore.page, schema: schema,
                               responses.responses: forward_with_responses, responses.count: forward_with_responses}
    handlers |= {handler: handler for handler in (responses.stored, responses.forget, responses.input_items)}
    return [replace(endpoint, handler=handlers.get(endpoint.handler, forward)) for endpoint in ENDPOINTS]


async def _forward(service: Service, replicas: Replicas, request: Request, with_responses: bool = False) -> Response:
    """Forward a request, and answer as the replica does, in one piece or as a stream.

    with_responses: the request may refer to stored responses and their items. They are sent along, since the store is
    in the front process.
    """
    config = service.config
    body = await read_body(request, config.max_body, config.body_timeout)
    headers = [(name, value.encode("latin-1")) for name in _FORWARDED if (value := request.headers.get(name.decode()))]
    call = ReplicaCall(request.method, request.url.path, request.url.query.encode(), body, request.state.id, headers,
                       request.state.owner)
    if with_responses:
        call = replace(call, responses=await asyncio.to_thread(_passed, service.responses, call.owner, body))
    answer = _storing(service, call.owner, replicas.ask(call))
    try:
        head = await service.jobs.run(request.receive, _first(answer))
        if head.get(b"content-length") is None:
            return _stream(service, request, answer, head)
        parts = await service.jobs.run(request.receive, _rest(answer))
    except BaseException:
        await answer.aclose()
        raise
    reply = Response(b"".join(parts), head.status)
    reply.raw_headers += [(name, value) for name, value in head.headers if name not in _OWN_HEADERS]
    return reply


def _passed(store: ResponseStore, owner: str, body: bytes) -> PassedResponses:
    """Stored responses that a request refers to. An invalid body is reported by the replica."""
    try:
        fields = from_json(body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return PassedResponses(store.keeps)
    id, given = fields.get("previous_response_id"), fields.get("input")
    ids = [item.get("id") for item in given if isinstance(item, dict)] if isinstance(given, list) else []
    named = {name for name in ids if isinstance(name, str)}
    return PassedResponses(store.keeps, store.get(owner, id) if isinstance(id, str) else None,
                           {name: item for name in named if (item := store.item(owner, name)) is not None})


async def _storing(service: Service, owner: str, answer: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The head and the parts of an answer; a StoredResponse among them is put into the store."""
    async with aclosing(answer):
        async for part in answer:
            if isinstance(part, StoredResponse):
                service.responses.put(owner, part)
            else:
                yield part


def _stream(service: Service, request: Request, answer: AsyncGenerator[Any, None], head: Head) -> Response:
    """A streamed answer. The loss of the replica is reported in its last part."""
    kind = (head.get(b"content-type") or "").partition(";")[0]
    reply = service.stream(request, answer, lambda: None, media_type=kind)
    if (ignored := head.get(HEADER.encode())) is not None:
        reply.headers[HEADER] = ignored
    return reply


async def _first(answer: AsyncGenerator[Any, None]) -> Head:
    return await anext(answer)


async def _rest(answer: AsyncGenerator[Any, None]) -> list[bytes]:
    return [part async for part in answer]
