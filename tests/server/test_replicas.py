"""Replicas behind a front: requests whose replica dies, and (slow) Ray Serve on a cluster of two nodes."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from numflow.errors import DeviceError, RequestError  # noqa: E402
from numflow.server.app import make_app  # noqa: E402
from numflow.server.config.config import make_config  # noqa: E402
from numflow.server.messages.wire import KEEP_ALIVE  # noqa: E402
from numflow.server.replicas import replica as replica_module  # noqa: E402
from numflow.server.replicas.front import endpoints  # noqa: E402
from numflow.server.replicas.merge import merged  # noqa: E402
from numflow.server.replicas.replica import Head, Replica  # noqa: E402
from numflow.server.replicas.replicas import Replicas, _need  # noqa: E402
from numflow.server.service.service import Service  # noqa: E402
from tests.partition.rays import ray_cluster  # noqa: E402
from tests.server.processes import ServerProcess  # noqa: E402
from tests.waiting import until  # noqa: E402

KEY = {"Authorization": "Bearer sk-1"}
JSON = Head(200, [(b"content-type", b"application/json"), (b"content-length", b"2")])
STREAM = Head(200, [(b"content-type", b"text/event-stream; charset=utf-8")])


class Gone(Exception):
    """A replica has died."""


class Deployment:
    """Like a handle of Ray Serve: each call gets the next script, a list of parts and exceptions."""

    def __init__(self, *scripts):
        self.scripts, self.calls, self.cancelled = list(scripts), [], 0
        self.ask = self

    def options(self, stream):
        assert stream
        return self

    def remote(self, call):
        self.calls.append(call)
        return Parts(self, self.scripts.pop(0))


class Two:
    """Two replicas in this process, called in turn; their messages are pickled, as by Ray."""

    def __init__(self, *replicas):
        self.replicas, self.ask, self.count = replicas, self, 0

    def options(self, stream):
        return self

    def remote(self, call):
        self.count += 1
        replica = self.replicas[self.count % 2]
        return Parts(self, replica.ask(pickle.loads(pickle.dumps(call))))


class Parts:
    """Like a response of Ray Serve."""

    def __init__(self, deployment, script):
        self.deployment, self.script = deployment, script if hasattr(script, "asend") else iter(script)

    def __aiter__(self):
        return self

    async def __anext__(self):
        if hasattr(self.script, "asend"):
            return pickle.loads(pickle.dumps(await anext(self.script)))
        part = next(self.script, None)
        if part is None:
            raise StopAsyncIteration
        if part == "wait":
            await asyncio.sleep(60)
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self):
        self.deployment.cancelled += 1


def _front(deployment, **service):
    config = make_config({}, service={"api_keys": ["sk-1"], **service}, models={"tiny": {"path": "nowhere"}})
    replicas = Replicas(config, 2)
    replicas._handle, replicas._gone, replicas.ready = deployment, (Gone,), True
    front = Service(config, replicas)
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(front, endpoints(replicas))), headers=KEY,
                             base_url="http://127.0.0.1")


def _post(deployment, path="/v1/completions", **service):
    async def run():
        async with _front(deployment, **service) as client:
            return await client.post(path, content=b'{"prompt": "x"}', headers={"content-type": "application/json"})

    return asyncio.run(run())


def test_an_answer_passes_through():
    deployment = Deployment([Head(429, [*JSON.headers, (b"retry-after", b"7")]), b"{}"])
    reply = _post(deployment)
    assert (reply.status_code, reply.content, reply.headers["retry-after"]) == (429, b"{}", "7")
    call, = deployment.calls
    assert (call.method, call.path, call.body) == ("POST", "/v1/completions", b'{"prompt": "x"}')
    assert call.id == reply.headers["x-request-id"] and dict(call.headers) == {b"content-type": b"application/json"}
    assert deployment.cancelled == 0


def test_another_replica_answers_when_one_is_lost():
    for lost in ([Gone()], [JSON, Gone()]):
        deployment = Deployment(lost, [JSON, b"{}"])
        assert _post(deployment).content == b"{}" and len(deployment.calls) == 2


def test_a_stream_begins_again_until_something_of_it_was_sent():
    deployment = Deployment([STREAM, KEEP_ALIVE, Gone()], [STREAM, b"data: 1\n\n", b"data: [DONE]\n\n"])
    reply = _post(deployment)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.content == KEEP_ALIVE + b"data: 1\n\ndata: [DONE]\n\n"
    deployment = Deployment([STREAM, b"data: 1\n\n", Gone()])
    first, error, _ = _post(deployment).content.split(b"\n\n")
    assert first == b"data: 1"
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    native = Deployment([Head(200, [(b"content-type", b"application/json")]), b"{}\n\n", Gone()])
    assert json.loads(_post(native, "/").content.split(b"\n\n")[1])["ret_code"] == "error.busy"


def test_a_request_that_every_replica_dies_of_is_given_up():
    deployment = Deployment(*[[Gone()]] * 9)
    reply = _post(deployment)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "replica_lost")
    assert len(deployment.calls) == 4 and reply.headers["retry-after"] == "1"


def test_a_request_that_takes_too_long_ends_its_work():
    deployment = Deployment(["wait"])
    reply = _post(deployment, request_timeout=0.05)
    assert reply.json()["error"]["code"] == "request_timeout" and deployment.cancelled == 1


def test_the_front_asks_for_keys_and_knows_its_health():
    async def run():
        async with _front(Deployment()) as client:
            client.headers.pop("Authorization")
            return await client.get("/health"), await client.get("/v1/models")

    health, models = asyncio.run(run())
    assert (health.status_code, models.status_code) == (200, 401)


def test_numbers_of_all_replicas():
    text = "# HELP n_total Things.\n# TYPE n_total counter\nn_total{model=\"m\"} %s\n"
    found = merged(text % 1, [text % 2, text % 3])
    assert 'n_total{model="m"} 1.0' in found and found.count("# TYPE n_total counter") == 1
    assert 'n_total{model="m",replica="0"} 2.0' in found and 'n_total{model="m",replica="1"} 3.0' in found


def test_what_a_replica_asks_for():
    def need(**options):
        found = _need(make_config({}, models={"a": {"path": "x", **options}}).models)
        return found.cpus, found.gpus

    assert need() == (1, 0) and need(threads=4) == (4, 0) and need(threads=2, devices="0&1;2") == (6, 0)
    assert need(transport="ray", devices="0;1", threads=4, backend="cuda") == (0, 0)
    assert need(backend="cuda") == (1, 1) and need(backend="cuda", devices="0&1", threads=4) == (2, 2)
    assert need(backend="cuda", devices="cpu;0", threads=4) == (5, 1)
    assert need(backend="cuda", cpu_layers=2, threads=3) == (4, 1)
    with pytest.raises(RequestError, match="replicas should be a whole number from 1"):
        make_config({}, service={"replicas": 0}, models={"a": {"path": "x"}})


def test_a_replica_is_the_application_without_a_socket(model_folders):
    config = make_config({}, service={"api_keys": ["sk-1"]}, models={"tiny": {
        "path": str(model_folders["chat"]), "backend": "reference"}})

    async def run():
        replica = Replica.__new__(Replica)
        await Replica.__init__(replica, config)
        assert await replica.failure() == ""
        await replica.check_health()
        from numflow.server.replicas.replica import ReplicaCall

        body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "temperature": 0}
        call = ReplicaCall("POST", "/v1/completions", b"", json.dumps(body).encode(), "some-id")
        head, *parts = [part async for part in replica.ask(call)]
        assert head.status == 200 and head.get(b"x-request-id") == "some-id"
        assert json.loads(b"".join(parts))["usage"]["completion_tokens"] == 3
        # A client that disconnects ends the request.
        body |= {"stream": True, "max_tokens": 400}
        answer = replica.ask(ReplicaCall("POST", "/v1/completions", b"", json.dumps(body).encode(), "other"))
        assert (await anext(answer)).status == 200
        await anext(answer)
        await answer.aclose()
        for _ in range(5000):
            if not (await replica.status())["models"][0]["engine"]["running"]:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("it still runs")
        assert 'numflow_requests_cancelled_total{model="tiny"} 1.0' in await replica.metrics()
        await replica._service.pool.close()

    asyncio.run(run())


def test_responses_are_kept_in_front_of_the_replicas(model_folders):
    config = make_config({}, models={"tiny": {"path": str(model_folders["chat"]), "backend": "reference"}})

    async def run():
        replicas = [Replica.__new__(Replica) for _ in range(2)]
        for replica in replicas:
            await Replica.__init__(replica, config)
        two = Two(*replicas)
        async with _front(two, api_keys=["sk-1", "sk-2"]) as http:
            async def ask(**fields):
                reply = await http.post("/v1/responses", json={"max_output_tokens": 9, "temperature": 0, **fields})
                assert reply.status_code == 200, reply.text
                return reply

            first = (await ask(input="hi")).json()
            assert first["store"] is True
            events = (await ask(input="and?", previous_response_id=first["id"], stream=True)).text.split("\n\n")
            second = json.loads(events[-2].split("data: ")[1])["response"]
            third = (await ask(input="so?", previous_response_id=second["id"])).json()
            whole = (await ask(store=False, input=[
                {"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "and?"},
                *second["output"], {"role": "user", "content": "so?"}])).json()
            assert whole["store"] is False and two.count == 4
            assert third["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > second["usage"]["input_tokens"]
            assert third["output"][0]["content"] == whole["output"][0]["content"]
            assert (await http.get(f"/v1/responses/{third['id']}")).json() == third
            items = (await http.get(f"/v1/responses/{third['id']}/input_items?order=asc")).json()["data"]
            assert [item["role"] for item in items] == ["user", "assistant"] * 2 + ["user"]
            assert (await http.get(f"/v1/responses/{whole['id']}")).status_code == 404
            named = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "and?"}]
            reply = await ask(input=[{"role": "user", "content": "hi"}, *named])
            assert reply.json()["output"][0]["content"] == second["output"][0]["content"]
            fields = {"input": "x", "previous_response_id": second["id"]}
            counted = (await http.post("/v1/responses/input_tokens", json=fields)).json()
            assert counted["input_tokens"] > second["usage"]["input_tokens"]
            other = {"Authorization": "Bearer sk-2"}  # another client's
            assert (await http.get(f"/v1/responses/{third['id']}", headers=other)).status_code == 404
            reply = await http.post("/v1/responses", json=fields, headers=other)
            assert reply.json()["error"]["code"] == "previous_response_not_found"
            assert (await http.delete(f"/v1/responses/{second['id']}")).json()["deleted"] is True
            assert (await http.post("/v1/responses", json=fields)).status_code == 400
            for body in ("[1]", "{", '{"input": "x", "previous_response_id": 1}'):
                assert (await http.post("/v1/responses", content=body)).status_code == 400, body
        for replica in replicas:
            await replica._service.pool.close()

    asyncio.run(run())


def test_a_replica_without_its_model_says_why_and_is_replaced_later(monkeypatch):
    config = make_config({}, models={"tiny": {"path": "/nowhere/at-all.gguf"}})

    async def run():
        replica = Replica.__new__(Replica)
        await Replica.__init__(replica, config)
        assert "/nowhere/at-all.gguf" in await replica.failure()
        await replica.check_health()
        monkeypatch.setattr(replica_module, "_FAILED_S", -1.0)
        with pytest.raises(RuntimeError, match="at-all"):
            await replica.check_health()

    asyncio.run(run())


def test_a_cluster_that_is_not_there(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    config = make_config({}, service={"replicas": 1}, models={"a": {"path": "x"}})
    with pytest.raises(DeviceError, match="no Ray cluster at RAY_ADDRESS=127.0.0.1:1: Connection refused"):
        asyncio.run(Replicas(config, 1).preload())


# With Ray Serve

@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray.serve")
    with ray_cluster({"num_cpus": 2}, {"num_cpus": 2}) as cluster:
        yield cluster


def _actors(cluster, name):
    """Process ids of the actors of a class, on all nodes."""
    raylets = {info.process.pid for node in cluster.list_all_nodes() for info in node.all_processes["raylet"]}
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # the process has just ended
                title, parent = (folder / "cmdline").read_text(), (folder / "stat").read_text().rsplit(")", 1)[1]
                if title.startswith(f"ray::{name}") and int(parent.split()[1]) in raylets:
                    found.add(int(folder.name))
    return found


def _ask(url, number, stream):
    """A completion's text, or its error code."""
    body = {"prompt": f"prompt {number}", "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": stream}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=200)
    if reply.status_code != 200:
        return reply.json()["error"]["code"]
    if not stream:
        return reply.json()["choices"][0]["text"]
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")
              if line.startswith("data: {")]
    if "error" in events[-1]:
        return events[-1]["error"]["code"]
    assert reply.text.rstrip().endswith("data: [DONE]")
    return "".join(event["choices"][0]["text"] for event in events)


def _under_load(url, kill, count=24):
    """Texts of `count` requests, half of them streamed; `kill` is called while the requests run."""
    found = {}

    def client(first):
        for number in range(first, count, 6):
            found[number] = _ask(url, number, stream=number % 2 == 1)

    threads = [threading.Thread(target=client, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    kill()
    for thread in threads:
        thread.join(240)
    return [found[number] for number in range(count)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("options", "victim"), [
    ((), "ServeReplica"), (("--ray", "--devices", "0;1"), "ServeReplica"),
    (("--ray", "--devices", "0;1"), "GroupActor")])
def test_a_worker_that_is_killed_under_load(cluster, model_folders, options, victim):
    """kill -9 of one process: all requests are answered, or (streams that had begun) end with an error that says so;
    then there are as many workers as before."""
    def kill():
        pid = min(_actors(cluster, victim))
        before.remove(pid)
        os.kill(pid, signal.SIGKILL)

    with ServerProcess("-m", f"tiny={model_folders['chat']}", "--replicas", "2", "--threads", "1", *options,
                       RAY_ADDRESS=cluster.address, wait=False) as server:
        server.wait_ready(180)
        expected = _under_load(server.url, lambda: None)
        before = _actors(cluster, victim)
        count = len(before)
        assert count == (4 if victim == "GroupActor" else 2)
        found = _under_load(server.url, kill)
        lost = [number for number, text in enumerate(found) if text == "replica_lost"]
        assert all(number % 2 for number in lost), "only streams that had begun may be told so"
        assert victim == "ServeReplica" or not lost
        assert [text for number, text in enumerate(found) if number not in lost] == \
            [text for number, text in enumerate(expected) if number not in lost]
        until(lambda: len(_actors(cluster, victim)) >= count and len(server.status()["replicas"]) >= 2,
              "a worker in place of the lost one", 120)
        assert _under_load(server.url, lambda: None) == expected
        requests = [replica["models"][0]["engine"]["steps"] for replica in server.status()["replicas"]]
        assert len(requests) == 2 and all(requests), "both replicas have work"
        assert 'replica="1"' in httpx.get(f"{server.url}/metrics").text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_served(cluster, model_folders):
    for options, message in (((f"tiny={model_folders['chat']}", "--replicas", "5"),
                              "cannot have room for 5 replicas: asked for 5 x (1 CPU)"),
                             (("tiny=/nowhere/at-all.gguf", "--replicas", "1"), "at-all.gguf")):
        server = ServerProcess("-m", *options, RAY_ADDRESS=cluster.address, wait=False)
        with server:
            assert server.process.wait(120) == 1
            server._reader.join(5)
            assert message in "".join(server.log) and "Traceback" not in "".join(server.log)
