"""Bodies and queries that are nearly right, for the routes of every protocol: no answer is a 500.

    python -m tests.server.test_protocols_fuzz [--seconds 300] [--at-once 4] [--only ROUTE,ROUTE]

asks each route so long, so many of them side by side, and prints what they answered.
"""

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.engine.classifiers import classifier
from tests.server import tiny
from tests.server.fuzz_bodies import BODIES, QUERIES, REFUSED
from tests.server.processes import ServerProcess

pytestmark = pytest.mark.slow
ROUNDS = 250
STATUSES = {200, 400, 403, 404}
MADE = "x-response-made"  # a header in which the client keeps the id of a stored response
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
MORE = """
[models.filler]
path = "{filler}"
preload = true
[models.classifier]
path = "{classifier}"
preload = true
"""
ODD = [None, True, False, 0, -1, 1, 2**31, 2**70, 0.5, -1e308, "", "x", "\x00", "é\U0001f642", "{", "null", "auto",
       "<tool_call>", "text", "function", [], {}, [[]], [None], [""], {"": None}, {"type": "text"}, {"type": "x"},
       {"type": "json_schema", "schema": {"type": "nonsense"}}, ["a"] * 20, {"a": {"b": {"c": [1, {}]}}}]


def places(value, path=()):
    """Paths of all values inside a value."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(one, (*path, key))


def damaged(body, chance: random.Random):
    """A body with one to three random changes: values replaced, removed, duplicated or added."""
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        found = list(places(body))
        if not found:
            break
        *above, last = chance.choice(found)
        inside = body
        for key in above:
            inside = inside[key]
        how = chance.randrange(5)
        if how == 0:
            del inside[last]
        elif how == 1 and isinstance(inside, list):
            inside.insert(last, copy.deepcopy(inside[last]))
        elif how == 2 and isinstance(inside, dict):
            inside[chance.choice(["stream", "type", "content", "stop", "n", "format", "x", "regex", "seed"])] = \
                copy.deepcopy(chance.choice(ODD))
        elif how == 3:
            *others, key = chance.choice(found)
            value = body
            for step in (*others, key):
                value = value[step]
            inside[last] = copy.deepcopy(value)
        else:
            inside[last] = copy.deepcopy(chance.choice(ODD))
    return body


def written(config, folder):
    """Write the configuration with two more models, a folder for slots, and a short request_timeout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "SPECIAL", [*tiny.SPECIAL, *MARKS])
        filler = tiny.write_chat_model(folder / "filler")
    (folder / "classifier").mkdir()
    more = MORE.format(filler=filler, classifier=classifier(folder / "classifier", 3)[0])
    service = '[service]\nrequest_timeout = 5\nmax_choices = 4\nload_adapters = true\nslot_folder = '
    path = folder / "service.toml"
    path.write_text(config.replace("[service]\n", f'{service}"{folder / "slots"}"\n') + more)
    return path


@pytest.fixture(scope="module")
def fuzzed(config_file, tmp_path_factory):
    with ServerProcess("-c", str(written(config_file.read_text(), tmp_path_factory.mktemp("fuzz")))) as server:
        yield server
        sound(server)


def sound(server):
    """Check that no request runs any more, and that the log has no traceback."""
    assert server.wait_idle()["kv_blocks_used"] == 0
    assert "Traceback" not in "".join(server.log), next(line for line in server.log if "Traceback" in line)


def send(http, route, body, query):
    """A route's answer. Routes without a body get none; resp_1 is replaced by the id of a stored response."""
    method, _, path = route.rpartition(" ")
    if "resp_1" in path:
        if MADE not in http.headers:
            http.headers[MADE] = http.post("/v1/responses", json=BODIES["/v1/responses"]).json()["id"]
        path = path.replace("resp_1", http.headers[MADE])
    content = {} if not BODIES[route] else {"content": json.dumps(body)}
    params = {key: value if isinstance(value, str) else json.dumps(value) for key, value in query.items()}
    return http.request(method or "POST", path, params=params, **content)


def ask(http, route, chance):
    """The status of the answer to a request with a damaged body and query."""
    body, query = damaged(BODIES[route], chance), damaged(QUERIES.get(route, {}), chance)
    if "/slots/" in route and chance.random() < 0.2:  # something to save and to erase
        made = {"prompt": "once upon a time", "max_tokens": 2, "id_slot": int(route[-1])}
        assert http.post("/v1/completions", json=made).status_code == 200
    reply = send(http, route, body, query)
    assert reply.status_code < 500, (json.dumps(body), query, reply.text[:500])
    assert "internal_error" not in reply.text, (json.dumps(body), query, reply.text[:500])
    return reply.status_code


@pytest.mark.parametrize("route", BODIES)
def test_no_server_errors(fuzzed, route):
    chance = random.Random(route)
    with httpx.Client(base_url=fuzzed.url, timeout=60) as http:
        right = send(http, route, BODIES[route], QUERIES.get(route, {}))
        assert right.status_code == 200 if route not in REFUSED else right.status_code < 500, right.text
        seen = {ask(http, route, chance) for _ in range(ROUNDS if BODIES[route] else 50)}
    assert seen <= STATUSES and (not BODIES[route] or seen & {400, 403})


def asked(server, route, seconds):
    """Counts of the statuses of a route in this many seconds, and the failure, if any."""
    found, chance, end = Counter(), random.Random(), time.monotonic() + seconds
    with httpx.Client(base_url=server.url, timeout=120) as http:
        try:
            while time.monotonic() < end:
                found[ask(http, route, chance)] += 1
        except (AssertionError, httpx.HTTPError) as error:
            return found, f"{type(error).__name__}: {error}"
    return found, "" if set(found) <= STATUSES else "a status that was not expected"


def main() -> int:
    """Fuzz each route for a while; the exit code is 1 if an answer was a 500."""
    from tests.server.conftest import CONFIG, write_models

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", default="")
    given, failed = parser.parse_args(), False
    routes = given.only.split(",") if given.only else list(BODIES)
    with tempfile.TemporaryDirectory() as scratch:
        path = written(CONFIG.format(**write_models(Path(scratch))), Path(scratch))
        for at in range(0, len(routes), given.at_once):
            group = routes[at:at + given.at_once]
            with ServerProcess("-c", str(path)) as server, ThreadPoolExecutor(len(group)) as pool:
                for route, (found, wrong) in zip(group, pool.map(lambda one: asked(server, one, given.seconds), group),
                                                 strict=True):
                    failed = failed or bool(wrong)
                    print(f"{route}: {found.total()} requests in {given.seconds:g} s, {dict(sorted(found.items()))} "
                          f"{wrong}", flush=True)
                try:
                    sound(server)
                except AssertionError as error:
                    failed = True
                    print(f"{group}: {error}: {''.join(server.log)[-3000:]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
