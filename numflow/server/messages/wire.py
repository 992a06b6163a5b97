"""HTTP bodies: JSON answers, parsing of request bodies, event streams."""

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
DROPPED = 32 * 2**20  # bytes beyond the limit that are read and dropped before the connection is closed
PIECE = 2048  # items of a list that are serialised in one call
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump(value: Any) -> bytes:
    """Compact JSON in UTF-8. A lone surrogate becomes "?"."""
    return _JSON.encode(value).encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """A server-sent event with a JSON value."""
    return b"data: " + dump(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """A server-sent event with a name and a JSON value."""
    return b"event: " + name.encode() + b"\n" + event(value)


def dump_long(value: Any) -> bytes:
    """As `dump`, for use in a thread: long lists are serialised in pieces, so that other threads run in between."""
    if isinstance(value, dict):
        return b"{" + b",".join(dump(name) + b":" + dump_long(item) for name, item in value.items()) + b"}"
    if isinstance(value, list) and len(value) > PIECE:
        return b"[" + b",".join(dump(value[first:first + PIECE])[1:-1]
                                for first in range(0, len(value), PIECE)) + b"]"
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return b"[" + b",".join(map(dump_long, value)) + b"]"
    return dump(value)


class Json(Response):
    """A JSON answer, from an object or from serialised bytes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else dump(content)


def error_response(error: ApiError, method: str, path: str) -> Json:
    """An ApiError as an answer, in the shape of the route's protocol."""
    return Json(error.shaped(method, path), error.status, error.headers)


def error_part(error: ApiError, method: str, path: str) -> bytes:
    """An ApiError as the last part of a stream, in the shape of the route's protocol."""
    body, kind = error.shaped(method, path), shape_of(method, path)
    if kind == "messages":
        return named_event("error", body)
    return event(body) if kind == "openai" else dump(body) + (b"\n\n" if kind == "native" else b"\n")


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """Read the request's body.

    Raises:
        ApiError: it is longer than `limit` bytes, or does not arrive within `seconds`.
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
            async for part in request.stream():  # a body that is too long is dropped; then the client reads the answer
                size += len(part)
                too_much = too_much or size > limit
                if size > limit + DROPPED:
                    raise too_long
                if not too_much:
                    parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the request's body did not arrive within {seconds:g} s", code="body_timeout",
                       headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ClientGone from None
    if too_much:
        raise too_long
    return b"".join(parts)


def parse(kind: type[Body], data: bytes, ignored: Ignored | None = None) -> Body:
    """Parse a body by its schema. Unknown fields go to `ignored`; without it they are refused.

    Raises:
        ApiError: 400 with the first invalid field, or an unknown field that is a constraint.
    """
    ignored = Ignored(strict=True) if ignored is None else ignored
    try:
        options: Any = {} if ignored.strict else {"extra": "allow", "context": "open"}
        body = kind.model_validate_json(data or b"{}", **options)
    except ValidationError as error:
        raise explained(kind, error) from None
    except RecursionError:
        raise bad_request("the request's JSON is nested too deeply", code="invalid_json") from None
    _leave_out(body, ignored)
    return body


def _leave_out(body: Any, ignored: Ignored, path: str = "") -> None:
    """Remove unknown fields from a body and its nested objects, except from Open schemas."""
    if isinstance(body, list) and body and isinstance(body[0], BaseModel):
        for index, part in enumerate(body):
            _leave_out(part, ignored, f"{path.removesuffix('.')}[{index}].")
    if not isinstance(body, BaseModel):
        return
    if body.model_extra and not isinstance(body, Open):
        field_names = [path + name for name in _names(type(body))]
        for name, value in body.model_extra.items():
            refuse(name, value, path)
            ignored.unknown(path + name, field_names)
        body.model_extra.clear()
    elif isinstance(body, Settled):  # the readers check further fields, but not constraints nested in them
        for name, value in (body.model_extra or {}).items():
            refuse_inside(name, value)
    for name in type(body).model_fields:
        _leave_out(getattr(body, name), ignored, f"{path}{name}.")


def explained(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first validation error of pydantic as a 400 with a readable message."""
    faults: Sequence[Mapping[str, Any]] = error.errors(include_url=False, include_context=False)
    # A field of a union type has an error for each type: the one with the longest path is probably meant.
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


def _path(location: tuple) -> str:
    """("messages", 0, "content", "str") as "messages[0].content", without names of types."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.islower() and part not in ("str", "bool", "int", "float") and not set("[]-") & set(part):
            text += f".{part}" if text else part
    return text


class EventStream(Response):
    """A streamed body.

    parts:   the parts to send. After an exception, `failed` makes the last part.
    closed:  called at the end in any case.
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
        """Send comments while nothing else is sent, so that proxies don't close the connection."""
        while True:
            self._quiet = True
            await asyncio.sleep(self._keep_alive)
            if self._quiet:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
