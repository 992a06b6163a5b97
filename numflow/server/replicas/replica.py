"""One of several copies of the service behind Ray Serve: the application, called without a socket."""

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

_HELD = 64      # parts of an answer that wait to be fetched
_TOLD_S = 30.0  # that a replica without its models lives on, so that it can be asked why


@dataclass(frozen=True)
class ReplicaCall:
    """A request on its way to a replica. Who may ask has been checked. id: as in the log. owner: whose key it has.
    responses: what it needs of stored ones."""

    method: str
    path: str
    query: bytes
    body: bytes
    id: str
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    owner: str = ""
    responses: PassedResponses = field(default_factory=lambda: PassedResponses(False))

    def scope(self) -> dict[str, Any]:
        """As an ASGI application gets it."""
        return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method,
                "scheme": "http", "path": self.path, "raw_path": self.path.encode(), "query_string": self.query,
                "root_path": "", "client": None, "server": ("replica", 80), "state": {"owner": self.owner,
                                                                                        "responses": self.responses},
                "headers": [(b"x-request-id", self.id.encode()), (b"host", b"replica"), *self.headers]}


@dataclass(frozen=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def get(self, name: bytes) -> str | None:
        """A header's value."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)


class Replica:
    """One replica of the deployment. `failure` tells of a model that could not be loaded."""

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
        """Reason why the first models could not be loaded; "" if they are there."""
        return self._failure

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises."""
        if self._failure and time.monotonic() - self._made > _TOLD_S:
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
        """A request's answer: its head, then its body, in parts as they come; a response to be kept comes before the
        part that tells of its end. Who stops listening ends the request."""
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
            while not parts.empty():  # whoever waits for room goes on
                parts.get_nowait()


def portable(config: Config) -> Config:
    """A configuration in plain dictionaries, which can be sent to other processes. A replica uses no more threads than
    the cluster has counted for it."""
    models = tuple(replace(model, load={"threads": 1, **model.load}, engine=dict(model.engine),
                           prompt=dict(model.prompt))
                   for model in config.models)
    return Config(dict(config.service), models)


def _unguarded(config: Config) -> Config:
    """A replica's own configuration: the front has asked for keys and the names of hosts already."""
    return Config({**config.service, "api_keys": (), "cors_origins": (), "allowed_hosts": (), "host": "0.0.0.0"},
                  config.models)
