"""(slow) Conversations of Responses behind Ray Serve: every replica can continue an earlier response."""

import json
import os
import signal

import pytest

pytest.importorskip("starlette")
httpx = pytest.importorskip("httpx")

from tests.server.processes import ServerProcess  # noqa: E402
from tests.server.test_replicas import _actors, cluster  # noqa: E402, F401
from tests.waiting import until  # noqa: E402


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_responses_go_on_with_every_replica_and_when_one_is_replaced(cluster, model_folders):  # noqa: F811
    with (ServerProcess("-m", f"tiny={model_folders['chat']}", "--replicas", "2", "--threads", "1",
                        RAY_ADDRESS=cluster.address, wait=False) as server,
          httpx.Client(base_url=server.url, timeout=200) as http):
        server.wait_ready(400)

        def ask(text, before=None, **more):
            reply = http.post("/v1/responses", json={"input": text, "previous_response_id": before, "temperature": 0,
                                                     "max_output_tokens": 5, **more})
            assert reply.status_code == 200, reply.text
            if not more.get("stream"):
                return reply.json()
            return json.loads(reply.text.strip().split("\n\n")[-1].split("data: ")[1])["response"]

        def talk(kill=lambda: None):
            """A conversation of nine turns, some streamed; the same items in one request get the same answer."""
            items, before = [], None
            for turn in range(9):
                if turn == 4:
                    kill()
                found = ask(f"turn {turn}", before, stream=turn % 3 == 1)
                items += [{"role": "user", "content": f"turn {turn}"}, *found["output"]]
                before = found["id"]
            whole = ask("x", None, input=items[:-1], store=False)
            assert whole["usage"]["input_tokens"] == found["usage"]["input_tokens"]
            assert whole["output"][0]["content"] == found["output"][0]["content"]
            return before

        def working():
            return [replica["models"][0]["engine"]["steps"] for replica in server.status()["replicas"]]

        last = talk()
        assert len(working()) == 2 and all(working()), "both replicas have answered"

        def kill():
            os.kill(min(_actors(cluster, "ServeReplica")), signal.SIGKILL)

        later = talk(kill)
        for id in (last, later):  # stored responses survive the loss of a replica
            assert http.get(f"/v1/responses/{id}").json()["id"] == id
        until(lambda: len(working()) == 2, "a replica in place of the lost one", 120)
        assert ask("and?", last)["previous_response_id"] == last
        assert http.delete(f"/v1/responses/{last}").status_code == 200
        gone = http.post("/v1/responses", json={"input": "x", "previous_response_id": last})
        assert gone.json()["error"]["code"] == "previous_response_not_found"
