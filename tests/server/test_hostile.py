"""Misbehaving clients: the service keeps running and releases all their resources."""

import json
import signal
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest

from tests.server.processes import ServerProcess
from tests.waiting import until

LONG = {"prompt": "a", "max_tokens": 450, "temperature": 0, "ignore_eos": True}


def head(server, body: bytes, length=None, path="/v1/completions") -> bytes:
    return (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: "
            f"{len(body) if length is None else length}\r\n\r\n").encode() + body


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_all(connection) -> bytes:
    found = b""
    with suppress(ConnectionResetError):  # the service closed with unread bytes
        while data := connection.recv(65536):
            found += data
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(server, stream):
    before = server.wait_idle()
    with connect(server) as connection:
        connection.sendall(head(server, json.dumps(LONG | {"stream": stream}).encode()))
        if stream:
            assert b"200 OK" in connection.recv(4096)
        else:
            until(lambda: server.engine()["running"], "a running request")
    after = server.wait_idle()
    assert after["cancelled"] == before["cancelled"] + 1
    assert after["new_tokens"] - before["new_tokens"] < LONG["max_tokens"]
    assert after["kv_blocks_used"] == 0


@pytest.mark.merge
def test_half_closed_and_cut_off(server):
    body = json.dumps(LONG).encode()
    with connect(server) as connection:  # the client shuts down its sending side
        connection.sendall(head(server, body))
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    with connect(server) as connection:  # half a body, then disconnect
        connection.sendall(head(server, body[:10], len(body)))
    with connect(server) as connection:  # half a body, then silence
        connection.sendall(head(server, body[:10], len(body)))
        found = read_all(connection)
    assert b" 408 " in found and b'"code":"body_timeout"' in found
    with connect(server) as connection:  # half a head, then silence
        connection.sendall(b"POST / HT")
        assert read_all(connection) == b""  # closed by the service; a client timeout would raise
    assert server.wait_idle()["kv_blocks_used"] == 0


@pytest.mark.parametrize("data", [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000 + b"\r\n\r\n"])
def test_what_is_no_http(server, data):
    with connect(server) as connection:
        with suppress(ConnectionError):  # the service may close before it has read everything
            connection.sendall(data)
        found = read_all(connection)
    if found:
        assert b" 400 " in found.split(b"\r\n")[0]
        assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_slow_reader_does_not_stop_others(server):
    body = json.dumps(LONG | {"stream": True, "logprobs": 20}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head(server, body))
        time.sleep(0.3)
        quick = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert quick.status_code == 200
    assert server.wait_idle()["kv_blocks_used"] == 0


@pytest.mark.slow
def test_a_client_that_never_reads_is_given_up(server):
    """The send buffers fill up; after write_timeout (3 s here) the connection is closed."""
    fields = {"stream": True, "logprobs": 20, "n": 12, "temperature": 1}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head(server, json.dumps(LONG | fields).encode()))
        until(lambda: any('"client_gone": true' in line and '"/v1/completions"' in line for line in server.log[-3:]),
              "the end of the connection")
    assert server.wait_idle()["kv_blocks_used"] == 0


def stream(url, results, number, **fields):
    """One streamed request; its last event, or the error."""
    try:
        body = {**LONG, "prompt": f"n{number}", "stream": True, **fields}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            if reply.status_code != 200:
                results[number] = reply.read().decode()
                return
            last = "nothing"
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    last = line[6:]
            results[number] = last
    except httpx.HTTPError as error:
        results[number] = f"broken: {error!r}"


def start_streams(server, count, **fields):
    """(threads, results by index) of streamed requests that run at once."""
    results: dict[int, str] = {}
    threads = [threading.Thread(target=stream, args=(server.url, results, number), kwargs=fields)
               for number in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


@pytest.mark.parametrize("drain", [0.3, 30])
@pytest.mark.merge
def test_sigterm_in_the_middle_of_50_streams_loses_none(config_file, tmp_path, drain):
    path = tmp_path / "service.toml"
    path.write_text(config_file.read_text().replace("drain_timeout = 20", f"drain_timeout = {drain}"))
    with ServerProcess("-c", str(path)) as server:
        threads, results = start_streams(server, 50, max_tokens=400 if drain < 1 else 40)
        until(lambda: server.status()["requests"] >= 50 or len(results) >= 50, "50 requests")
        code = server.stop(signal.SIGTERM, 40)
        for thread in threads:
            thread.join(20)
        ends = list(results.values())
        assert not [end for end in ends if end != "[DONE]" and not end.startswith("{")], server.log[-8:]
        if drain < 1:  # not enough time: each stream ends with an error
            errors = [json.loads(end)["error"] for end in ends if end != "[DONE]"]
            assert errors and {error["code"] for error in errors} == {"shutting_down"}
        else:
            assert ends == ["[DONE]"] * 50
        assert len(ends) == 50 and code == 0
        assert "Traceback" not in "".join(server.log)


@pytest.mark.slow
def test_200_clients_for_a_minute(config_file):
    """Slow readers, disconnecting and idle clients: memory and threads stay bounded, valid requests are answered."""
    with ServerProcess("-c", str(config_file)) as server:
        ends, answered = time.monotonic() + 60, [0] * 200
        faults: list[tuple] = []

        def client(number):
            with httpx.Client(base_url=server.url, timeout=90) as http:
                while time.monotonic() < ends:
                    try:
                        if number % 4 == 3:  # disconnects in the middle
                            with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as reply:
                                next(reply.iter_bytes(), None)
                            continue
                        body = {"prompt": f"{number} asks", "max_tokens": 8, "stream": number % 2 == 0}
                        reply = http.post("/v1/completions", json=body)
                        if reply.status_code == 429:
                            time.sleep(0.2)
                        elif reply.status_code != 200 or (body["stream"] and "[DONE]" not in reply.text):
                            faults.append((number, reply.status_code, reply.text[-300:]))
                        answered[number] += 1
                    except httpx.HTTPError as error:
                        faults.append((number, repr(error)))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(200)]
        for thread in threads:
            thread.start()
        time.sleep(20)
        memory, kernel_threads = server.resident(), server.threads()
        for thread in threads:
            thread.join(120)
        assert faults == [] and all(answered[number] for number in range(200) if number % 4 != 3)
        found = server.wait_idle()
        assert found["kv_blocks_used"] == 0 and found["failed"] == 0
        assert server.threads() <= kernel_threads + 2
        assert server.resident() < memory + 60 * 2**20, (memory, server.resident())
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "Traceback" not in "".join(server.log)
