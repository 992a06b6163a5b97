"""Streams: comments while idle, one error event on failure, nothing after the end."""

import asyncio
import json

import pytest
from starlette.requests import Request

from numflow.errors import RequestError
from numflow.server.http.errors import of_error, shutting_down
from numflow.server.http.jobs import ClientGone, Jobs
from numflow.server.messages.wire import DONE, EventStream, dump, event

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def sent(parts, jobs=None, gone=None, **options):
    """(bytes of the body, how often `closed` was called) of a stream; gone: when the client disconnects."""
    found, closed = [], []

    async def receive():
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        found.append(message)

    request = Request({"type": "http", "state": {}, "headers": []})
    stream = EventStream(Jobs(60) if jobs is None else jobs, request, parts, lambda: closed.append(1),
                         failed=lambda error: event(error.body()), **options)
    try:
        await stream({"type": "http"}, receive, send)
    except ClientGone:
        found.append({"body": b"(gone)"})
    assert found[0]["status"] == 200 and b"text/event-stream" in dict(found[0]["headers"])[b"content-type"]
    return b"".join(message["body"] for message in found[1:]), len(closed)


async def test_parts_come_as_they_are():
    async def parts():
        yield event({"a": "é"})
        yield DONE

    assert await sent(parts()) == ('data: {"a":"é"}\n\ndata: [DONE]\n\n'.encode(), 1)


async def test_comments_while_nothing_comes():
    async def parts():
        yield b"data: 1\n\n"
        await asyncio.sleep(0.2)
        yield DONE

    body, _ = await sent(parts(), keep_alive=0.03)
    assert body.startswith(b"data: 1\n\n: keep-alive\n\n") and body.endswith(DONE)


@pytest.mark.parametrize("error, status", [(RequestError("too much"), 400), (ZeroDivisionError("secret"), 500)])
async def test_a_failure_is_one_event_and_the_end(error, status):
    async def parts():
        yield b"data: 1\n\n"
        raise error

    body, closed = await sent(parts())
    first, last, nothing = body.decode().split("\n\n")
    assert closed == 1 and nothing == "" and first == "data: 1"
    told = json.loads(last.removeprefix("data: "))["error"]
    assert of_error(error).status == status and told["message"] == of_error(error).message
    assert "secret" not in last


async def test_the_end_of_the_service_and_of_the_client():
    closed_inside, jobs, gone = [], Jobs(60), asyncio.Event()

    async def parts():
        try:
            yield b"data: 1\n\n"
            await asyncio.sleep(60)
        finally:
            closed_inside.append(1)

    running = asyncio.ensure_future(sent(parts(), jobs))
    while not len(jobs):
        await asyncio.sleep(0.01)
    jobs.stop_all(shutting_down())
    body, closed = await running
    assert b'"code":"shutting_down"' in body and (closed, closed_inside) == (1, [1])
    running = asyncio.ensure_future(sent(parts(), jobs, gone))
    await asyncio.sleep(0.05)
    gone.set()
    body, closed = await running
    assert body == b"data: 1\n\n(gone)" and (closed, closed_inside) == (1, [1, 1])


async def test_a_request_has_so_much_time():
    async def parts():
        await asyncio.sleep(60)
        yield b""

    body, _ = await sent(parts(), Jobs(0.05))
    assert b'"code":"request_timeout"' in body


def test_json_is_always_utf8():
    assert json.loads(dump({"a": "\ud800"})) == {"a": "?"}
    with pytest.raises(ValueError, match="JSON compliant"):
        dump(float("nan"))


def test_devices_that_fail_are_not_the_clients_fault():
    from numflow.errors import DeviceError, DeviceLostError
    from numflow.server.http.errors import of_error

    lost, failed = of_error(DeviceLostError("device 1 was lost")), of_error(DeviceError("device 1 was killed"))
    assert (lost.status, lost.code, lost.headers) == (503, "device_lost", {"Retry-After": "5"})
    assert (failed.status, failed.code) == (500, "device_failed")
