"""The routes, in one table, and the ASGI application made of them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from numflow.server.http.ignored import HEADER
from numflow.server.messages import schemas
from numflow.server.messages.wire import Json
from numflow.server.openapi import openapi
from numflow.server.protocols import openai_texts as texts
from numflow.server.protocols.inferflow import native
from numflow.server.protocols.openai_chat import chat
from numflow.server.protocols.openai_completions import completions
from numflow.server.service import status
from numflow.server.service.guard import LOOPBACK, OWN_NAMES, Guard
from numflow.server.service.service import Service

log = logging.getLogger("numflow.server")
Handler = Callable[[Service, Request], Awaitable[Response]]
PAGE = Path(__file__).with_name("page.html")
# The page may run what it has in itself, and talk to this service only.
PAGE_POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


@dataclass(frozen=True)
class Endpoint:
    """One route: its handler's docstring tells what it does. body: schema of the request."""

    method: str
    paths: tuple[str, ...]
    handler: Handler
    body: type[BaseModel] | None = None


async def page(service: Service, request: Request) -> Response:
    """GET /: the chat page."""
    return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers={
        "Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff"})


async def schema(service: Service, request: Request) -> Json:
    """GET /openapi.json."""
    return Json(openapi(ENDPOINTS))


ENDPOINTS = (
    Endpoint("POST", ("/",), native, schemas.NativeRequest),
    Endpoint("POST", ("/v1/chat/completions", "/chat/completions"), chat, schemas.ChatRequest),
    Endpoint("POST", ("/v1/completions", "/completions"), completions, schemas.CompletionRequest),
    Endpoint("POST", ("/v1/embeddings", "/embeddings"), texts.embeddings, schemas.EmbeddingRequest),
    Endpoint("GET", ("/v1/models", "/models"), status.models),
    Endpoint("GET", ("/v1/models/{id:path}", "/models/{id:path}"), status.model),
    Endpoint("POST", ("/tokenize",), texts.tokenize, schemas.TokenizeRequest),
    Endpoint("POST", ("/detokenize",), texts.detokenize, schemas.DetokenizeRequest),
    Endpoint("POST", ("/apply-template",), texts.apply_template, schemas.TemplateRequest),
    Endpoint("POST", ("/translate",), texts.translate, schemas.TranslateRequest),
    Endpoint("POST", ("/fill-mask",), texts.fill_mask, schemas.FillMaskRequest),
    Endpoint("GET", ("/health",), status.health),
    Endpoint("GET", ("/status",), status.status),
    Endpoint("GET", ("/metrics",), status.metrics),
    Endpoint("GET", ("/openapi.json",), schema),
    Endpoint("GET", ("/",), page),
)


def make_app(service: Service, routes: Sequence[Endpoint] | None = None) -> Guard:
    """The application. Models are loaded while it starts; it can be asked for its health meanwhile.

    routes: ENDPOINTS, unless others answer.
    """
    config = service.config

    def bound(endpoint: Endpoint):
        async def handle(request: Request) -> Response:
            return await endpoint.handler(service, request)
        return handle

    endpoints = [e for e in routes or ENDPOINTS if config.page or e.handler is not page]
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        for path in endpoint.paths:
            by_path.setdefault(path, {})[endpoint.method] = endpoint
    table = [Route(path, _by_method({method: bound(endpoint) for method, endpoint in methods.items()}),
                   methods=list(methods)) for path, methods in by_path.items()]
    router = Router(table, redirect_slashes=False, lifespan=lambda app: _lifespan(service))
    inner = router if not config.cors_origins else CORSMiddleware(
        router, allow_origins=config.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=["x-request-id", HEADER])
    hosts = (*config.allowed_hosts, *OWN_NAMES) if config.allowed_hosts or config.host in LOOPBACK else ()
    return Guard(inner, config.api_keys, hosts, config.cors_origins, service)


def _by_method(handlers: dict[str, Callable[[Request], Awaitable[Response]]]):
    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)
    return handle


@asynccontextmanager
async def _lifespan(service: Service) -> AsyncIterator[None]:
    loading, watching = asyncio.create_task(service.pool.preload()), asyncio.create_task(service.pool.watch())
    loading.add_done_callback(service.loaded)
    watching.add_done_callback(service.watched)
    try:
        yield
    finally:
        loading.cancel()
        watching.cancel()
        await service.pool.close()
