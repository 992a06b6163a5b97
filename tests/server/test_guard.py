"""Requests refused before a route sees them: unknown hosts, bodies over the limit without a declared length."""

import socket

import httpx
import pytest

from tests.server.processes import ServerProcess
from tests.server.test_limits import client

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.parametrize("host", ["", ":8080", "[]", " ", "127.0.0.1.", "127.0.0.1.evil.example"])
async def test_a_host_without_a_known_name_is_refused(host):
    async with client() as http:
        reply = await http.get("/v1/models", headers={"Host": host})
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("pieces, status", [((50, 50), 400), ((50, 51), 413), ((1,) * 101, 413), ((101,), 413)])
async def test_a_body_that_comes_in_pieces_has_the_same_limit(pieces, status):
    """The limit is 100 bytes, without Content-Length: status 400 means that the body was read and is no valid JSON."""
    async def body():
        for size in pieces:
            yield b"x" * size

    async with client(max_body=100) as http:
        reply = await http.post("/v1/completions", content=body(), headers={"Content-Type": "application/json"})
    assert "content-length" not in reply.request.headers
    assert reply.status_code == status, reply.text
    assert status == 400 or reply.json()["error"]["code"] == "body_too_long"


@pytest.mark.merge
def test_a_request_has_so_many_answers(config_file, tmp_path):
    """max_choices counts prompts times n, on every route that has them."""
    path = tmp_path / "service.toml"
    path.write_text(config_file.read_text().replace("[service]", "[service]\nmax_choices = 4"))
    asked = {"model": "org/chat", "max_tokens": 1, "temperature": 1}
    chat = asked | {"messages": [{"role": "user", "content": "a"}]}
    with ServerProcess("-c", str(path)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for route, body, count in (("/v1/completions", asked | {"prompt": "a", "n": 4}, 4),
                                   ("/v1/completions", asked | {"prompt": ["a", "b"], "n": 2}, 4),
                                   ("/v1/chat/completions", chat | {"n": 4}, 4)):
            reply = http.post(route, json=body)
            assert reply.status_code == 200 and len(reply.json()["choices"]) == count, reply.text
        for route, body, count in (("/v1/completions", asked | {"prompt": "a", "n": 5}, 5),
                                   ("/v1/completions", asked | {"prompt": ["a"] * 5}, 5),
                                   ("/v1/completions", asked | {"prompt": ["a", "b"], "n": 3, "stream": True}, 6),
                                   ("/v1/chat/completions", chat | {"n": 5}, 5)):
            reply = http.post(route, json=body)
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["type"] == "invalid_request_error", reply.text
            assert f"{count}" in error["message"] and "4" in error["message"] and "max_choices" in error["message"]
            assert error["param"] == "n"
        assert server.wait_idle()["kv_blocks_used"] == 0


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//[", "null", "http://]"])
async def test_an_origin_that_is_none_is_refused(origin):
    async with client() as http:
        reply = await http.get("/v1/models", headers={"Origin": origin})
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "origin_not_allowed"


def test_a_connection_whose_request_has_two_lengths_is_closed(server):
    """RFC 9112, section 6.1: the request is answered, then the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n"
                           b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer.lower()


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_answered(server, declared):
    """Without a connection reset: the body is read and dropped, up to a limit."""
    body = b"x" * (8 << 20)
    for _ in range(5):
        reply = httpx.post(f"{server.url}/v1/completions", content=body if declared else iter([body]), timeout=60)
        assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_long"
