"""Bytes on the wire: JSON answers, request bodies, event streams."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from numflow.errors import did_you_mean
from numflow.server.http.errors import ApiError, bad_request, of_error, one_line, shape_of
from numflow.server.http.ignored import Ignored
from numflow.server.http.jobs import ClientGone, Jobs
from numflow.server.messages.constraints import refuse, refuse_inside
from numflow.server.messages.schemas import Open, Settled

Body = TypeVar("Body", bound=BaseModel)
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
DROPPED = 32 * 2**20  # bytes beyond the limit that are read before a body is refused
PIECE = 2048  # items of a list that are written in one go
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8; a lone surrogate, which no client could read, becomes "?"."""
    return _JSON.encode(value).encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """A server-sent event with a JSON value."""
    return b"data: " + dump(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """A server-sent event that has a name beside its JSON value."""
    return b"event: " + name.encode() + b"\n" + event(value)


def dump_long(value: Any) -> bytes:
    """As `dump`, for a thread: what is long is written piece by piece, so that others run in between."""
    if isinstance(value, dict):
        return b"{" + b",".join(dump(name) + b":" + dump_long(item) for name, item in value.items()) + b"}"
    if isinstance(value, list) and len(value) > PIECE:
        return b"[" + b",".join(dump(value[at:at + PIECE])[1:-1] for at in range(0, len(value), PIECE)) + b"]"
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return b"[" + b",".join(map(dump_long, value)) + b"]"
    return dump(value)


class Json(Response):
    """A JSON answer: of an object, or of the bytes that it has become already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else dump(content)


def error_response(error: ApiError, method: str, path: str) -> Json:
    """An ApiError as an answer, in the shape that the clients of a route look at."""
    return Json(error.shaped(method, path), error.status, error.headers)


def error_part(error: ApiError, method: str, path: str) -> bytes:
    """An ApiError as the last part of a stream."""
    body, kind = error.shaped(method, path), shape_of(method, path)
    if kind == "messages":
        return named_event("error", body)
    return event(body) if kind == "openai" else dump(body) + (b"\n\n" if kind == "native" else b"\n")


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The request's body.

    Raises:
        ApiError: longer than `limit` bytes, or not there after `seconds`.
    """
    too_long = ApiError(413, f"the request's body is longer than {limit} bytes", code="body_too_long",
                        headers={"Connection": "close"})
    declared = request.headers.get("content-length", "0")
    too_much = declared.isdigit() and int(declared) > limit
    if too_much and (int(declared) > limit + DROPPED or "expect" in request.headers):
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():  # what is too long is read and dropped, so that the answer is read
                size += len(part)
                too_much = too_much or size > limit
                if size > limit + DROPPED:
                    raise too_long
                if not too_much:
                    parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the request's body did not come within {seconds:g} s", code="body_timeout",
                       headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    if too_much:
        raise too_long
    return b"".join(parts)


def parse(kind: type[Body], data: bytes, ignored: Ignored | None = None) -> Body:
    """A body as an object of its schema. Fields that the schema does not have go to `ignored`; without it they are
    refused.

    Raises:
        ApiError: 400, with the first field that is wrong, or that is a constraint and unknown.
    """
    ignored = Ignored(strict=True) if ignored is None else ignored
    try:
        how: Any = {} if ignored.strict else {"extra": "allow", "context": "open"}
        body = kind.model_validate_json(data or b"{}", **how)
    except ValidationError as error:
        raise explained(kind, error) from None
    except RecursionError:
        raise bad_request("the request's JSON is nested too deeply", code="invalid_json") from None
    _leave_out(body, ignored)
    return body


def _leave_out(body: Any, ignored: Ignored, path: str = "") -> None:
    """Take fields that no schema has out of a body and of what is in it, but for schemas that are open."""
    if isinstance(body, list) and body and isinstance(body[0], BaseModel):
        for at, part in enumerate(body):
            _leave_out(part, ignored, f"{path.removesuffix('.')}[{at}].")
    if not isinstance(body, BaseModel):
        return
    if body.model_extra and not isinstance(body, Open):
        known = [path + name for name in _names(type(body))]
        for name, value in body.model_extra.items():
            refuse(name, value, path)
            ignored.unknown(path + name, known)
        body.model_extra.clear()
    elif isinstance(body, Settled):  # whoever reads the others knows them; not what is in them
        for name, value in (body.model_extra or {}).items():
            refuse_inside(name, value)
    for name in type(body).model_fields:
        _leave_out(getattr(body, name), ignored, f"{path}{name}.")


def explained(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first fault that pydantic found, in words for the sender."""
    faults: Sequence[Mapping[str, Any]] = error.errors(include_url=False, include_context=False)
    # A field of several types has a fault for each: the one that got furthest is what was meant.
    fault = max((other for other in faults if other["loc"][:1] == faults[0]["loc"][:1]),
                key=lambda other: _path(other["loc"]).count("["))
    field = _path(fault["loc"])
    if fault["type"] == "json_invalid":
        return bad_request(f"the request is no JSON: {fault['msg'].removeprefix('Invalid JSON: ')}",
                           code="invalid_json")
    if fault["type"] == "extra_forbidden":
        near = did_you_mean(str(fault["loc"][-1]), _names(kind)) if len(fault["loc"]) == 1 else ""
        return bad_request(f"there is no field {field!r:.100}{near}", field[:100], "unknown_field")
    if fault["type"] == "missing":
        return bad_request(f"{field:.100} is missing", field[:100], "missing_field")
    wanted = dict.fromkeys(one_line(other["msg"]).removeprefix("Input should be ") for other in faults
                           if _path(other["loc"]) == field)
    return bad_request(f"{field[:100] or 'the request'} should be {', or '.join(wanted)}", field[:100] or None,
                       "invalid_value")


def _names(kind: type[BaseModel]) -> list[str]:
    return list(kind.model_fields)


def _path(place: tuple) -> str:
    """("messages", 0, "content", "str") as messages[0].content: names of types are left out."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.islower() and part not in ("str", "bool", "int", "float") and not set("[]-") & set(part):
            text += f".{part}" if text else part
    return text


class EventStream(Response):
    """A body that is sent piece by piece, while the client listens.

    parts:   what to send, each in one go. An exception becomes a last part made by `failed`.
    closed:  called in the end, whatever happened.
    """

    def __init__(self, jobs: Jobs, request: Request, parts: AsyncGenerator[bytes, None], closed: Callable[[], None], *,
                 failed: Callable[[ApiError], bytes], media_type: str = "text/event-stream", keep_alive: float = 15.0):
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._jobs, self._request, self._parts, self._closed = jobs, request, parts, closed
        self._failed, self._keep_alive = failed, keep_alive

    async def __call__(self, scope, receive, send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = b""
            try:
                await self._jobs.run(receive, self._pump(send))
            except Exception as error:
                if isinstance(error, ClientGone):
                    raise
                self._request.state.error = error
                last = self._failed(of_error(error))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._closed()

    async def _pump(self, send) -> None:
        idle = asyncio.create_task(self._stay_alive(send)) if self.media_type == "text/event-stream" else None
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    self._quiet = False
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            if idle is not None:
                idle.cancel()

    async def _stay_alive(self, send) -> None:
        """Comments while nothing else is sent, so that nobody on the way closes the connection."""
        while True:
            self._quiet = True
            await asyncio.sleep(self._keep_alive)
            if self._quiet:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
