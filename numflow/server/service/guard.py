"""Middleware of every request: request id, check of host, origin and API key, error answers, log line and trace."""

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
OWN_NAMES = (*LOOPBACK, "host.docker.internal", "host.containers.internal")  # the last two: from within containers
# Routes that need no key, and that answer during shutdown.
OPEN = ("/health", "/health/live", "/health/ready")
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Guard:
    """The outermost ASGI layer.

    keys:    API keys. If there are any, a request needs one of them: as bearer token, x-api-key header or password
             of basic authentication (browsers).
    hosts:   allowed names in the Host header; empty: any name. The check protects a service on loopback from web
             pages that reach it under their own name (DNS rebinding).
    origins: origins of web pages, besides the service's own, that may call the service.
    service: the service. While it is draining, new requests are refused.
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
        scope["app"] = self  # makes the router raise errors instead of answering with them
        headers, begin = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["id"] = given if _ID.fullmatch(given) else secrets.token_hex(12)
        sent = {"status": 0}

        async def send_marked(message) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = state["id"]
                if "content-length" in headers and "transfer-encoding" in headers:
                    response_headers["connection"] = "close"  # two lengths: request smuggling (RFC 9112, 6.1)
                if (ignored := state.get("ignored")) is not None and ignored.why:
                    response_headers[HEADER] = ignored.header()
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
            raise ApiError(403, f"the host name {host!r:.100} is not allowed; the option allowed_hosts (--allow-host "
                           "NAME) adds host names",
                           code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and _place(origin) != headers.get("host"):
            raise ApiError(403, "web pages of this origin may not call the service; the option cors_origins allows it",
                           code="origin_not_allowed")
        owner = self._owner(headers) if self._keys else scope["state"].get("owner", "")
        if owner is None:
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                           code="invalid_api_key",
                           headers={"WWW-Authenticate": 'Basic realm="numflow", charset="UTF-8"'})
        scope["state"]["owner"] = owner  # clients with different keys share no prefix cache
        if self._service.draining:
            raise shutting_down()
        if scope["method"] == "POST":
            self._service.limits.request(owner)

    def _owner(self, headers: Headers) -> str | None:
        """A name for the request's API key, from which the key cannot be derived; None if the key is not valid."""
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
        equal = [hmac.compare_digest(given, key) for key in self._keys]  # compares with all keys, in constant time
        return self._owners[equal.index(True)] if any(equal) else None

    def _record(self, scope, sent, headers: Headers, begin: float) -> None:
        """Write a log line and a trace. They contain no prompts, unless log_prompts is set."""
        seconds = time.perf_counter() - begin
        state = scope["state"]
        error = state.get("error")
        client = scope.get("client")
        route = getattr(scope.get("route"), "path", "unknown")  # unknown paths share one metric label
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
            outcome = {"method": "POST", "route": route, "status": sent["status"], "id": state["id"],
                    "error": line.get("code") or (str(sent["status"]) if sent["status"] >= 400 else None)}
            facts, runs = state.get("facts", {}), state.get("runs", ())
            line["trace"] = self._service.traces.tell(headers, outcome, facts, runs, begin)
        serious = error is not None and _as_api(error).status >= 500
        log.log(logging.ERROR if serious else logging.INFO, line)


def _as_api(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        return of_http(error.status_code, error.detail, error.headers)
    return of_error(error)


def _place(origin: str) -> str | None:
    """Host and port of an origin; None if the origin is invalid."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _host(header: str) -> str:
    """The name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()
