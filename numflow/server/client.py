"""A client of the service's OpenAI interface, with the standard library only."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from numflow.errors import RequestError


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, key: str | None = None,
        timeout: float = 600.0) -> Iterator[dict[str, Any]]:
    """Send a request; yield the events of a stream, or else one object. Without a body the request is a GET.

    Raises:
        RequestError: the service cannot be reached, or answers with an error, whose message it is.
    """
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            if "event-stream" in reply.headers.get("content-type", ""):
                yield from _events(reply)
            else:
                yield json.load(reply)
    except urllib.error.HTTPError as error:
        raise RequestError(f"{url}: {_message(error)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RequestError(f"{url}: {reason}; is `numflow serve` running there?") from None


def _events(reply) -> Iterator[dict[str, Any]]:
    for line in reply:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise RequestError(event["error"]["message"])
        yield event
    raise RequestError("the connection was lost in the middle of the answer")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"
