"""Bodies that are nearly right, for the routes of every protocol: no answer is a 500.

    python -m tests.server.test_protocols_fuzz [--seconds 300] [--only ROUTE,ROUTE]

asks each route so long and prints what it answered.
"""

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.server.processes import ServerProcess

pytestmark = pytest.mark.slow
ROUNDS = 250
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEXT = [{"type": "input_text", "text": "hi"}, {"type": "output_text", "text": "é\U0001f642"}]
BODIES = {
    "/v1/responses": {
        "model": "org/chat", "instructions": "Be brief.", "max_output_tokens": 3, "temperature": 0.5, "top_p": 0.9,
        "input": [{"role": "user", "content": TEXT}, {"type": "reasoning", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "ls"}],
        "tools": [{"type": "function", "name": "f", "parameters": WEATHER, "strict": True},
                  {"type": "custom", "name": "g", "format": {"type": "text"}},
                  {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1, "store": True, "metadata": {"a": "b"},
        "truncation": "auto", "stream": False, "previous_response_id": None},
    "/v1/messages": {
        "model": "org/chat", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["x"],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "é\U0001f642"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": False,
                                          "content": [{"type": "text", "text": "sunny"}]},
                                         {"type": "document", "source": {"type": "text", "data": "d"}}]},
            {"role": "assistant", "content": "It"}],
        "tools": [{"name": "f", "input_schema": WEATHER}, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"}, "metadata": {"user_id": "me"}, "stream": False},
}
BODIES |= {
    "/api/chat": {
        "model": "org/chat:latest", "stream": False, "think": True, "format": {"type": "object"}, "keep_alive": "5m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"},
                     {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [
                         {"function": {"name": "f", "arguments": {"city": "Rome"}}}]},
                     {"role": "tool", "tool_name": "f", "content": "sunny"}, {"role": "assistant", "content": "It"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "x", "parameters": WEATHER}}],
        "options": {"num_predict": 3, "temperature": 0.5, "top_k": 5, "stop": ["x"], "repeat_penalty": 1.1, "seed": 1,
                    "num_ctx": 64}, "logprobs": True, "top_logprobs": 1},
    "/api/generate": {
        "model": "org/chat", "prompt": "hi", "system": "Be brief.", "raw": False, "context": [3, 4], "stream": False,
        "suffix": "", "images": [], "template": "", "format": "json", "think": False,
        "options": {"num_predict": 3, "temperature": 0.5, "stop": ["x"], "mirostat": 0}, "keep_alive": 60},
    "/v1/rerank": {"model": "encoder", "query": "a", "documents": ["b", {"text": "c", "id": 1}], "top_n": 1,
                   "return_documents": True, "truncate": True},
    "/v1/score": {"model": "encoder", "text_1": "a", "text_2": ["b", "c"]},
    "/tokenize": {"content": "hi", "with_pieces": True, "add_special": True, "parse_special": False},
    "/api/embed": {"model": "encoder", "input": ["a", "b"], "truncate": True, "dimensions": 0, "options": {"a": 1}},
    "/api/show": {"model": "org/chat", "name": "x", "verbose": True},
    "/api/pull": {"model": "org/chat", "stream": False, "insecure": False},
}
BODIES |= {
    "/v1/chat/completions": {
        "model": "org/chat", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 1, "stop": ["x"],
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
            {"type": "text", "text": "é\U0001f642"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny"}, {"role": "user", "content": "and?"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "x", "parameters": WEATHER,
                                                    "strict": True}}],
        "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}, "logprobs": True,
        "top_logprobs": 1, "stream": False, "stream_options": None, "presence_penalty": 0.1, "logit_bias": {"20": 1},
        "reasoning_effort": None, "chat_template_kwargs": {"enable_thinking": False}, "user": "me"},
    "/v1/completions": {
        "model": "org/chat", "prompt": ["hi", "you"], "max_tokens": 3, "echo": True, "logprobs": 1, "stop": "x", "n": 1,
        "best_of": 1, "suffix": None, "logit_bias": {"20": 1}, "stream": False, "seed": 1, "min_p": 0.1},
    "/v1/embeddings": {"model": "encoder", "input": ["paris", "is"], "encoding_format": "float", "dimensions": None},
    "/": {"text": "hi", "decoding_alg": "sample.top_p", "is_streaming_mode": False, "max_output_len": 3,
          "random_seed": 1, "temperature": 0.5, "system_prompt": "x", "res_prefix": ""},
}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
ODD = [None, True, False, 0, -1, 1, 2**31, 2**70, 0.5, -1e308, "", "x", "\x00", "é\U0001f642", "{", "null", "auto",
       "<tool_call>", "text", "function", [], {}, [[]], [None], [""], {"": None}, {"type": "text"}, {"type": "x"},
       {"type": "json_schema", "schema": {"type": "nonsense"}}, ["a"] * 20, {"a": {"b": {"c": [1, {}]}}}]


def places(value, path=()):
    """Paths of everything inside a value."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(one, (*path, key))


def damaged(body, chance: random.Random):
    """A body with one to three places changed, dropped, doubled or added."""
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        found = list(places(body))
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
        if not body:
            break
    return body


def hurried(config):
    """A configuration by which no request takes long."""
    return config.replace("[service]", "[service]\nrequest_timeout = 5\nmax_choices = 4")


@pytest.fixture(scope="module")
def fuzzed(config_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "service.toml"
    path.write_text(hurried(config_file.read_text()))
    with ServerProcess("-c", str(path)) as server:
        yield server
        assert server.wait_idle()["kv_blocks_used"] == 0
        assert "Traceback" not in "".join(server.log), next(line for line in server.log if "Traceback" in line)


def ask(http, route, chance):
    """The status of an answer to a damaged body."""
    text = json.dumps(damaged(BODIES[route], chance))
    reply = http.post(route, content=text)
    assert reply.status_code < 500, (text, reply.text[:500])
    assert "internal_error" not in reply.text, (text, reply.text[:500])
    return reply.status_code


@pytest.mark.parametrize("route", BODIES)
def test_no_server_errors(fuzzed, route):
    chance = random.Random(route)
    with httpx.Client(base_url=fuzzed.url, timeout=60) as http:
        assert http.post(route, json=BODIES[route]).status_code == 200
        seen = {ask(http, route, chance) for _ in range(ROUNDS)}
    assert 400 in seen and seen <= {200, 400, 404}


def main() -> int:
    """Ask each route for a while; 1 if an answer was a 500."""
    from tests.server.conftest import CONFIG, write_models

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", default="")
    asked, failed = parser.parse_args(), False
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "service.toml"
        path.write_text(hurried(CONFIG.format(**write_models(Path(scratch)))))
        for route in asked.only.split(",") if asked.only else BODIES:
            with ServerProcess("-c", str(path)) as server, httpx.Client(
                    base_url=server.url, timeout=60) as http:
                found, chance, end = Counter(), random.Random(), time.monotonic() + asked.seconds
                try:
                    while time.monotonic() < end:
                        found[ask(http, route, chance)] += 1
                    assert server.wait_idle()["kv_blocks_used"] == 0 and "Traceback" not in "".join(server.log)
                except AssertionError as error:
                    failed = True
                    print(f"{route}: {error}")
                print(f"{route}: {found.total()} requests in {asked.seconds:g} s, {dict(sorted(found.items()))}",
                      flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
