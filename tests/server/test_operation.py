"""Operation: limits of each API key, health probes, and models that are unloaded when idle."""

import pytest

from numflow.server.http.errors import ApiError
from numflow.server.service.limits import Limits
from tests.server.processes import ServerProcess
from tests.waiting import until

httpx = pytest.importorskip("httpx")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def refused(limits, owner):
    with pytest.raises(ApiError) as caught:
        limits.request(owner)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value


def test_requests_come_back_with_time():
    clock = Clock()
    limits = Limits(3, 0, 0, clock)
    for _ in range(3):
        limits.request("alice")
    error = refused(limits, "alice")
    assert error.headers["Retry-After"] == "20" and "3 requests per minute" in error.message
    limits.request("bob")
    clock.now += 20.001
    limits.request("alice")
    refused(limits, "alice")
    clock.now += 1e6  # a long pause saves up no more than the allowance
    for _ in range(3):
        limits.request("alice")
    refused(limits, "alice")


def test_tokens_may_be_owed():
    clock = Clock()
    limits = Limits(0, 600, 1000, clock)
    limits.request("alice")
    limits.tokens("alice", 620)
    assert refused(limits, "alice").headers["Retry-After"] == "3"
    clock.now += 3
    limits.request("alice")
    limits.tokens("alice", 400)
    assert "1000 tokens per day" in refused(limits, "alice").message
    limits.request("bob")


CONFIG = """
[service]
api_keys = ["alice", "bob"]
tokens_per_minute = 60
unload_after = 1
[models.m]
path = "{chat}"
backend = "reference"
"""


@pytest.fixture(scope="module")
def server(model_folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("operation") / "service.toml"
    path.write_text(CONFIG.format(**model_folders))
    with ServerProcess("-c", str(path)) as server:
        yield server


def loaded(server):
    return httpx.get(f"{server.url}/status", headers={"x-api-key": "bob"}).json()["models"][0]["loaded"]


def test_over_http(server):
    def ask(key, **more):
        return httpx.post(f"{server.url}/v1/completions", headers={"x-api-key": key}, timeout=60,
                          json={"prompt": "one two three four", "max_tokens": 50, "ignore_eos": True, **more})

    for path in ("/health", "/health/live", "/health/ready"):
        assert httpx.get(server.url + path).json() == {"status": "ok"}
    assert ask("alice").status_code == 200
    reply = ask("alice")
    assert reply.status_code == 429 and int(reply.headers["Retry-After"]) >= 1
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "alice"}).status_code == 200
    until(lambda: not loaded(server), "a model that is unloaded", 30)
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": False,
             "options": {"num_predict": 2}, "keep_alive": "1h30m"}
    assert httpx.post(f"{server.url}/api/chat", json=asked, headers={"x-api-key": "bob"}, timeout=60).status_code == 200
    assert loaded(server)
    wrong = httpx.post(f"{server.url}/api/chat", json={**asked, "keep_alive": "soon"}, headers={"x-api-key": "bob"})
    assert wrong.status_code == 400 and "keep_alive" in wrong.json()["error"]
    assert httpx.post(f"{server.url}/api/generate", json={"keep_alive": "0s"},
                      headers={"x-api-key": "bob"}).json()["done_reason"] == "unload"
    assert not loaded(server)
