"""Middleware of every request: an id, the check of its key, errors in one shape, one line of log."""

import base64
import binascii
import hmac
import logging
import re
import secrets
import time
import traceback
from collections.abc import Sequence
from hashlib import blake2b
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from numflow.server.http.errors import ApiError, of_error, of_http, shutting_down
from numflow.server.http.ignored import HEADER
from numflow.server.http.jobs import ClientGone
from numflow.server.messages.wire import error_response
from numflow.server.service.service import Service

log = logging.getLogger("numflow.server")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OWN_NAMES = (*LOOPBACK, "host.docker.internal", "host.containers.internal")  # the last two: as containers say it
# The only routes that ask for no key, and answer while the service ends.
OPEN = ("/health", "/health/live", "/health/ready")
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Guard:
    """The outermost ASGI layer.

    keys:    if there are any, one of them is needed, as a bearer token, as x-api-key or as the password
             of a browser.
    hosts:   names that the Host header may have; none: any. It keeps web pages from reaching a service on loopback
             by a name of their own (DNS rebinding).
    origins: web pages of these origins, besides the service's own, may call it.
    service: whose requests are counted; while it is draining, no new ones come in.
    """

    def __init__(self, app, keys: Sequence[str], hosts: Sequence[str], origins: Sequence[str], service: Service):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._owners = [f"key {blake2b(key, digest_size=6).hexdigest()}" for key in self._keys]  # also after a restart
        self._hosts, self._origins, self._service = tuple(hosts), tuple(origins), service

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # lets the router raise its errors instead of answering
        headers, begin = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["id"] = given if _ID.fullmatch(given) else secrets.token_hex(12)
        sent = {"status": 0}

        async def send_marked(message) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                told = MutableHeaders(scope=message)
                told["x-request-id"] = state["id"]
                if "content-length" in headers and "transfer-encoding" in headers:
                    told["connection"] = "close"  # RFC 9112, section 6.1: two lengths, as request smuggling has
                if (ignored := state.get("ignored")) is not None and ignored.why:
                    told[HEADER] = ignored.header()
            await send(message)

        try:
            try:
                self._check(scope, headers)
                await self._app(scope, receive, send_marked)
            except (ClientGone, ClientDisconnect):
                sent["gone"] = True
            except Exception as error:
                state["error"] = error
                if sent["status"]:
                    raise
                answer = error_response(_as_api(error), scope["method"], scope["path"])
                await answer(scope, receive, send_marked)
        finally:
            self._record(scope, sent, headers, begin)

    def _check(self, scope, headers: Headers) -> None:
        if scope["path"] in OPEN:
            return
        host = _host(headers.get("host", ""))
        if self._hosts and host not in self._hosts:
            raise ApiError(403, f"the service does not go by the name {host!r:.100}; the option allowed_hosts "
                           "(--allow-host NAME) adds names",
                           code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and _place(origin) != headers.get("host"):
            raise ApiError(403, "pages of other origins may not call this service; cors_origins lists those that may",
                           code="origin_not_allowed")
        owner = self._owner(headers) if self._keys else scope["state"].get("owner", "")
        if owner is None:
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                           code="invalid_api_key",
                           headers={"WWW-Authenticate": 'Basic realm="numflow", charset="UTF-8"'})
        scope["state"]["owner"] = owner  # clients with different keys share no keys and values (prefix cache)
        if self._service.draining:
            raise shutting_down()
        if scope["method"] == "POST":
            self._service.limits.request(owner)

    def _owner(self, headers: Headers) -> str | None:
        """A name for the key that was given, which tells nothing of it; None if it is none of ours."""
        kind, _, value = headers.get("authorization", "").partition(" ")
        if not kind and "x-api-key" in headers:  # as Anthropic's clients send it
            kind, value = "bearer", headers["x-api-key"]
        given = value.strip().encode("utf-8", "replace")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif kind.lower() != "bearer":
            return None
        equal = [hmac.compare_digest(given, key) for key in self._keys]  # each one, so that time tells nothing
        return self._owners[equal.index(True)] if any(equal) else None

    def _record(self, scope, sent, headers: Headers, begin: float) -> None:
        """A line of the log, and a trace. It has no text of prompts unless the service is told so."""
        seconds = time.perf_counter() - begin
        state = scope["state"]
        error = state.get("error")
        client = scope.get("client")
        route = getattr(scope.get("route"), "path", "unknown")  # names that clients invent are not counted one by one
        self._service.metrics.requests.labels(route, str(sent["status"])).inc()
        line = {"request": state["id"], "client": client[0] if client else None, "method": scope["method"],
                "path": scope["path"], "status": sent["status"], "ms": round(1000 * seconds, 1),
                **state.get("facts", {}), **state.get("body", {})}
        if (ignored := state.get("ignored")) is not None and ignored.why:
            line["ignored"] = ignored.why
        if sent.get("gone"):
            line["client_gone"] = True
        if error is not None:
            answer = _as_api(error)
            line["code"] = answer.code
            if answer.status >= 500 and answer.code == "internal_error":
                line["traceback"] = "".join(traceback.format_exception(error))
        if self._service.traces is not None and scope["method"] == "POST":
            told = {"method": "POST", "route": route, "status": sent["status"], "id": state["id"],
                    "error": line.get("code") or (str(sent["status"]) if sent["status"] >= 400 else None)}
            facts, runs = state.get("facts", {}), state.get("runs", ())
            line["trace"] = self._service.traces.tell(headers, told, facts, runs, begin)
        serious = error is not None and _as_api(error).status >= 500
        log.log(logging.ERROR if serious else logging.INFO, line)


def _as_api(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        return of_http(error.status_code, error.detail, error.headers)
    return of_error(error)


def _place(origin: str) -> str | None:
    """Host and port of an origin; None for one that has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _host(header: str) -> str:
    """The name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
