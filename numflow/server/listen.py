"""Run the service on a socket until it is stopped."""

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from numflow.errors import RequestError
from numflow.server.app import Endpoint, make_app
from numflow.server.http.errors import ApiError, shutting_down
from numflow.server.messages.wire import dump
from numflow.server.service.service import Service

BACKLOG = 2048  # connections that may wait to be accepted
GRACE = 15.0  # seconds after drain_timeout for error answers to the remaining requests


class Connection(H11Protocol):
    """A client's connection, with time limits for sending requests and for reading answers.

    most: largest number of connections; further ones get status 503 and are closed.
    header_timeout: seconds for a request's headers. write_timeout: seconds in which the client reads no byte.
    """

    def __init__(self, *args: Any, most: int, header_timeout: float, write_timeout: float,
                 **options: Any):
        super().__init__(*args, **options)
        self._most, self._header_timeout, self._write_timeout = most, header_timeout, write_timeout
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._head = self.loop.call_later(self._header_timeout, transport.abort)
        if len(self.connections) > self._most:
            self._refuse(503, b"Service Unavailable", ApiError(
                503, f"{self._most} connections are open already; try again later", code="too_many_connections"))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiting = self.cycle is None or self.cycle.response_complete
        if self._head is None and waiting and not self.transport.is_closing():
            self._head = self.loop.call_later(self._header_timeout, self.transport.abort)
        elif not waiting:
            self._head = _stopped(self._head)

    def on_response_complete(self) -> None:
        self._head = _stopped(self._head)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head, self._stall = _stopped(self._head), _stopped(self._stall)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._stall = _stopped(self._stall)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, with a JSON error as on all routes."""
        self._refuse(400, b"Bad Request", ApiError(400, msg, code="invalid_http"))

    def _refuse(self, status: int, phrase: bytes, error: ApiError) -> None:
        """Answer without the application, and close the connection."""
        body = dump(error.body())
        self.transport.write(b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                             b"x-request-id: %s\r\nconnection: close\r\nretry-after: 5\r\n\r\n%s"
                             % (status, phrase, len(body), secrets.token_hex(12).encode(), body))
        self.transport.close()


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, if there is one; return None."""
    if timer is not None:
        timer.cancel()
    return None


class _Server(uvicorn.Server):
    """A server whose shutdown waits for running requests up to drain_timeout, then ends them with an error."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None]):
        super().__init__(config)
        self._service, self._started = service, started

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self._started()

    def handle_exit(self, sig: int, frame) -> None:
        if self._service.draining:
            self.force_exit = sig == signal.SIGINT  # a second Ctrl-C does not wait
            self._service.jobs.stop_all(shutting_down())
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._service.failure is not None

    async def shutdown(self, sockets=None) -> None:
        self._service.draining = True
        timer = asyncio.get_running_loop().call_later(self._service.config.drain_timeout,
                                                      self._service.jobs.stop_all, shutting_down())
        await super().shutdown(sockets)
        timer.cancel()
        # uvicorn raises captured signals again after the shutdown; after SIGTERM the exit code should be 0.
        self._captured_signals = [number for number in self._captured_signals if number != signal.SIGTERM]


def serve(service: Service, listens: Callable[[str], None] = lambda url: None,
          serves: Callable[[str, dict[str, str]], None] = lambda url, plans: None,
          routes: Sequence[Endpoint] | None = None) -> None:
    """Run the service until SIGINT or SIGTERM.

    listens: called with the URL when connections are accepted. serves: called with the URL and the memory plan of each
    model when the preloaded models are ready. routes: as in make_app.

    Raises:
        RequestError: the address cannot be bound. NumflowError: a preloaded model cannot be loaded.
    """
    config = service.config
    listener = _listen(config.host, config.port)
    url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{listener.getsockname()[1]}"
    protocol = partial(Connection, most=config.max_connections, header_timeout=config.body_timeout,
                       write_timeout=config.write_timeout)
    options = uvicorn.Config(
        make_app(service, routes), http=protocol,  # type: ignore[arg-type]
        ws="none", lifespan="on", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        timeout_keep_alive=30, backlog=BACKLOG, timeout_graceful_shutdown=int(config.drain_timeout + GRACE) + 1)
    service.ready = partial(serves, url)
    server = _Server(options, service, lambda: listens(url))
    try:
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again after the shutdown
            server.run(sockets=[listener])
    finally:
        listener.close()
    if service.failure is not None:
        raise service.failure


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)  # fails here, before models are loaded, if another service listens on the port
        listener.set_inheritable(True)
    except OSError as error:
        listener.close()
        raise RequestError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener
