"""One replica of the service behind Ray Serve: the ASGI application, called without a socket."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from numflow.errors import NumflowError
from numflow.server.app import make_app
from numflow.server.config.config import Config
from numflow.server.http.errors import ApiError
from numflow.server.service.service import Service
from numflow.server.service.status import status_of
from numflow.server.service.store import PassedResponses, StoredResponse
from numflow.server.service.traces import Traces

_HELD = 64      # parts of an answer that may wait to be fetched
_FAILED_S = 30.0  # seconds that a replica lives after a failure to load its models, so that the reason can be asked for


@dataclass(frozen=True)
class ReplicaCall:
    """A forwarded request, whose API key has been checked.

    id: the request's id in the log. owner: the name of its key. responses: the stored responses that it refers to.
    """

    method: str
    path: str
    query: bytes
    body: bytes
    id: str
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    owner: str = ""
    responses: PassedResponses = field(default_factory=lambda: PassedResponses(False))

    def scope(self) -> dict[str, Any]:
        """The scope for an ASGI application."""
        return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method,
                "scheme": "http", "path": self.path, "raw_path": self.path.encode(), "query_string": self.query,
                "root_path": "", "client": None, "server": ("replica", 80), "state": {"owner": self.owner,
                                                                                        "responses": self.responses},
                "headers": [(b"x-request-id", self.id.encode()), (b"host", b"replica"), *self.headers]}


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer, before its body."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def get(self, name: bytes) -> str | None:
        """The value of a header; None if it is missing."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)


class Replica:
    """A replica of the deployment."""

    async def __init__(self, config: Config):  # type: ignore[misc]  # Ray Serve awaits it
        self._service = Service(_unguarded(config))
        self._service.traces = Traces(config.traces) if config.traces else None
        self._app = make_app(self._service)
        self._failure, self._made = "", time.monotonic()
        try:
            await self._service.pool.preload()
        except (NumflowError, ApiError) as error:
            self._failure, self._made = str(error), time.monotonic()

    async def failure(self) -> str:
        """Reason why the preloaded models could not be loaded; "" if they are loaded."""
        return self._failure

    async def check_health(self) -> None:
        """Health check of Ray Serve, which replaces a replica that raises."""
        if self._failure and time.monotonic() - self._made > _FAILED_S:
            raise RuntimeError(self._failure)
        if failing := self._service.pool.failing():
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in failing.items()))

    async def status(self) -> dict[str, Any]:
        """The answer of /status."""
        return status_of(self._service)

    async def metrics(self) -> str:
        """The answer of /metrics."""
        return self._service.metrics.text().decode()

    async def ask(self, call: ReplicaCall) -> AsyncGenerator[Head | bytes | StoredResponse, None]:
        """Answer a request: yield the head, then the parts of the body. A response to store comes before the part with
        its end. Closing the generator cancels the request."""
        parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue(_HELD)
        body, gone = iter([call.body]), asyncio.Event()

        async def receive() -> dict[str, Any]:
            for data in body:
                return {"type": "http.request", "body": data, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def put(part: Head | bytes | None) -> None:
            if not gone.is_set():
                await parts.put(part)

        async def send(message) -> None:
            if message["type"] == "http.response.start":
                await put(Head(message["status"], list(message["headers"])))
            elif message.get("body"):
                await put(message["body"])

        async def answer() -> None:
            try:
                await self._app(call.scope(), receive, send)
            finally:
                await put(None)

        task = asyncio.ensure_future(answer())
        try:
            while (part := await parts.get()) is not None:
                if (made := call.responses.take()) is not None:
                    yield made
                yield part
            await task
        finally:
            gone.set()
            while not parts.empty():  # unblocks a producer that waits for room
                parts.get_nowait()


def portable(config: Config) -> Config:
    """A configuration with plain dictionaries, which can be pickled. Without an option `threads` a replica uses one
    thread, as many as it reserves in the cluster."""
    models = tuple(replace(model, load={"threads": 1, **model.load}, engine=dict(model.engine),
                           prompt=dict(model.prompt))
                   for model in config.models)
    return Config(dict(config.service), models)


def _unguarded(config: Config) -> Config:
    """A replica's configuration, without API keys and host names, which the front has checked."""
    return Config({**config.service, "api_keys": (), "cors_origins": (), "allowed_hosts": (), "host": "0.0.0.0"},
                  config.models)
