"""Limits and safety: API keys, origins, hosts, bodies, queues, timeouts."""

import asyncio
import base64
import json
import shutil
import socket
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from numflow.server.app import make_app
from numflow.server.config.config import make_config
from numflow.server.http.errors import ApiError
from numflow.server.http.jobs import Jobs
from numflow.server.service.service import Service
from tests.server.processes import ServerProcess
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def client(**service):
    """A client, in this process, of a service that has loaded no model."""
    config = make_config({"service": service, "models": {"a": {"path": "nowhere"}}})
    ready = Service(config)
    ready.pool.ready = True
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(ready)), base_url="http://127.0.0.1:8080")


async def test_keys_guard_every_route_but_health():
    async with client(api_keys=["sk-1", "sk-2"]) as http:
        for path in ("/", "/v1/models", "/metrics", "/status", "/openapi.json", "/nowhere"):
            reply = await http.get(path)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error", path
            assert reply.headers["www-authenticate"].startswith("Basic")
        assert (await http.get("/health")).status_code == 200
        browser = base64.b64encode(b"any:sk-1").decode()
        for value in ("Bearer sk-1", "bearer sk-2", f"Basic {browser}"):
            assert (await http.get("/v1/models", headers={"Authorization": value})).status_code == 200
        for value in ("Bearer sk-3", "Bearer", "sk-1", "Basic sk-1", "Basic !", "Digest sk-1", "Bearer é"):
            headers = {"Authorization": value.encode()}
            assert (await http.get("/v1/models", headers=headers)).status_code == 401, value


async def test_services_that_keep_no_responses_say_so():
    async with client(max_responses=0) as http:
        reply = await http.post("/v1/responses/input_tokens", json={"input": "and?", "previous_response_id": "resp_1"})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, "previous_response_id", "unsupported")
        assert "max_responses" in error["message"] and "send the items of the whole conversation" in error["message"]
        assert (await http.get("/v1/responses/resp_1")).status_code == 404


async def test_other_origins_and_names_are_refused():
    async with client(cors_origins=["https://friend.example"]) as http:
        for headers, status in (({}, 200), ({"Origin": "http://127.0.0.1:8080"}, 200),
                                ({"Origin": "https://friend.example"}, 200),
                                ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403),
                                ({"Origin": "http://["}, 403),
                                ({"Host": "evil.example"}, 403), ({"Host": "localhost:1"}, 200),
                                ({"Host": "[::1]:8080"}, 200)):
            reply = await http.get("/v1/models", headers=headers)
            assert reply.status_code == status, headers
        allowed = await http.get("/v1/models", headers={"Origin": "https://friend.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://friend.example"
        before = await http.options("/v1/models", headers={"Origin": "https://friend.example",
                                                           "Access-Control-Request-Method": "POST"})
        assert before.status_code == 200
    async with client() as http:
        assert "access-control-allow-origin" not in (await http.get("/v1/models")).headers
    async with client(host="0.0.0.0") as http:
        assert (await http.get("/v1/models", headers={"Host": "my-machine"})).status_code == 200
    for listens in ("0.0.0.0", "127.0.0.1"):
        async with client(host=listens, allowed_hosts=["my-machine"]) as http:
            for host, status in (("other", 403), ("my-machine:80", 200), ("localhost", 200),
                                 ("host.docker.internal:8080", 200)):
                assert (await http.get("/v1/models", headers={"Host": host})).status_code == status, (listens, host)


async def test_health_says_when_it_is_not_ready():
    config = make_config({"models": {"a": {"path": "nowhere"}}})
    service = Service(config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://localhost") as http:
        assert (await http.get("/health")).json() == {"status": "loading"}
        service.pool.ready, service.draining = True, True
        assert (await http.get("/health")).status_code == 503
        refused = await http.get("/v1/models")
        assert refused.status_code == 503 and refused.headers["retry-after"] and "shutting down" in refused.text


async def test_a_model_that_cannot_be_loaded():
    async with client() as http:
        reply = await http.post("/v1/completions", json={"prompt": "a"})
        assert reply.status_code == 404 and "nowhere" in reply.json()["error"]["message"]
        assert "error" in (await http.get("/status")).json()["models"][0]


async def test_the_page_can_be_left_out():
    async with client(page=False) as http:
        assert (await http.get("/")).status_code == 405
        assert [(await http.get(path)).status_code for path in ("/explore", "/explore/kv")] == [404, 404]


def test_bodies_have_a_limit(http):
    big = json.dumps({"prompt": "x" * 300_000})
    reply = http.post("/v1/completions", content=big)
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_long"
    streamed = http.post("/v1/completions", content=iter([b'{"prompt": "'] + [b"x" * 50_000] * 10))  # no Content-Length
    assert streamed.status_code == 413


def endless(model, folder):
    """A model whose texts never reach the end of its context."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**8}))
    return folder


@pytest.mark.merge
def test_a_full_queue_is_429(model_folders, tmp_path):
    path = tmp_path / "service.toml"
    path.write_text(f'[service]\nmax_queue = 1\nmax_connections = 6\n\n[models.m]\n'
                    f'path = "{endless(model_folders["chat"], tmp_path / "endless")}"\n'
                    'backend = "reference"\nmax_batch = 1\n')
    with ServerProcess("-c", str(path)) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        body = {"prompt": "a", "max_tokens": 10**6, "temperature": 0, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body), http.stream("POST", "/v1/completions", json=body):
            full = http.post("/v1/completions", json=body)
            assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
            assert full.json()["error"]["type"] == "rate_limit_error" and full.json()["error"]["code"] == "queue_full"
            assert http.get("/metrics").status_code == 200
        assert server.wait_idle()["kv_blocks_used"] == 0
        with ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            last = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            assert b" 503 " in last.recv(500)
        log = [json.loads(line) for line in server.log]
        assert any(line.get("code") == "queue_full" and line["status"] == 429 for line in log)


def test_the_log_has_no_prompts(server, http):
    http.post("/v1/completions", json={"prompt": "my secret words", "max_tokens": 1}, headers={"x-request-id": "mine"})
    mine = until(lambda: [json.loads(line) for line in server.log if '"mine"' in line], "the request's line")
    assert len(mine) == 1 and mine[0]["status"] == 200 and mine[0]["new_tokens"] == 1 and mine[0]["model"] == "org/chat"
    assert "secret" not in "".join(server.log)


async def test_a_request_that_the_web_server_cancels_is_told_why():
    jobs = Jobs(60)

    async def silence():
        await asyncio.sleep(60)

    running = asyncio.ensure_future(jobs.run(silence, silence()))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(ApiError, match="shutting down"):
        await running
    assert len(jobs) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_weights_that_are_no_numbers_are_named(model_folders, tmp_path, stream):
    name, folder = "model.layers.0.self_attn.v_proj.weight", tmp_path / "bad"
    shutil.copytree(model_folders["chat"], folder)
    tensors = {key: np.array(x) for key, x in load_file(folder / "model.safetensors").items()}
    tensors[name][2, 7] = np.nan
    save_file(tensors, folder / "model.safetensors")
    service = Service(make_config({"models": {"m": {"path": str(folder), "backend": "reference"}}}))
    try:
        await service.pool.preload()
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            reply = await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, "stream": stream})
    finally:
        await service.pool.close()
    text = reply.text.partition("data: ")[2].partition("\n")[0] if stream and reply.status_code == 200 else reply.text
    told = json.loads(text)["error"]
    assert told["code"] == "model_failed" and told["message"] == (
        f"the model's logits are not finite numbers: tensor '{name}' has nan in row 2, column 7; its file is damaged, "
        "or was written so"), reply.text
    assert reply.status_code == 500 or stream
