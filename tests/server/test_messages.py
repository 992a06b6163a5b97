"""Anthropic's Messages on the wire: blocks, tools, thinking, events, counts, errors."""

import json

import httpx
import pytest

from numflow.server.app import make_app
from numflow.server.config.config import make_config
from numflow.server.service.service import Service
from tests.waiting import until

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
    "additionalProperties": False}}
CALL = r'<tool_call>\{"name": "weather", "arguments": \{"city": "Rome"\}\}</tool_call>'


def ask(http, **fields):
    reply = http.post("/v1/messages", json={"messages": HI, "max_tokens": 20, "temperature": 0, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events_of(http, **fields):
    """The JSON values of a stream's events, each under an event name equal to its type."""
    reply = http.post("/v1/messages", json={"messages": HI, "max_tokens": 20, "temperature": 0, "stream": True,
                                            **fields})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply.text
    found = []
    for block in filter(None, reply.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def tokens(http, messages, **more):
    return http.post("/tokenize", json={"messages": messages, **more}).json()["count"]


def test_a_text(http, model):
    found = ask(http)
    expected = model.generate([{"role": "user", "content": "hi"}], max_tokens=20, temperature=0)
    assert found["content"] == [{"type": "text", "text": expected.text}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "org/chat")
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage = found["usage"]
    assert usage["output_tokens"] == 20
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected.stats["prompt_tokens"]
    assert ask(http, regex="yes")["stop_reason"] == "end_turn"


@pytest.mark.parametrize("sequences", [["b"], ["never", "b", "c"]])
def test_the_stop_sequence_that_ended_it(http, sequences):
    found = ask(http, stop_sequences=sequences, regex="aaba", max_tokens=10)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "b")
    assert found["content"][0]["text"] == "aa"
    last = events_of(http, stop_sequences=sequences, regex="aaba")[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "b"}


def test_blocks_and_a_system_text(http):
    blocks = [{"type": "text", "text": "h", "cache_control": {"type": "ephemeral"}}, {"type": "document", "source": {
        "type": "text", "media_type": "text/plain", "data": "i"}}]
    found = http.post("/v1/messages/count_tokens", json={
        "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
        "messages": [{"role": "user", "content": blocks}]}).json()
    assert found == {"input_tokens": tokens(http, [{"role": "system", "content": "A\n\nB"},
                                                   {"role": "user", "content": "h\ni"}])}


def test_results_of_a_search_are_text_below_their_title(http):
    found = {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "a"}] * 2}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    for blocks, expected in (([found, {"type": "text", "text": "q"}], [{"role": "user", "content": "T (s)\na\na\nq"}]),
                             ([{"type": "tool_result", "tool_use_id": "t", "content": [found]}],
                              [{"role": "tool", "tool_call_id": "t", "content": "T (s)\na\na"}])):
        told = {"messages": [{"role": "assistant", "content": [use]}, {"role": "user", "content": blocks}]}
        call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        said = [{"role": "assistant", "content": "", "tool_calls": [call]}, *expected]
        assert http.post("/v1/messages/count_tokens", json=told).json() == {"input_tokens": tokens(http, said)}
    image = {**found, "content": [{"type": "image", "source": {}}]}
    for block, place in ((image, "[0].content[0]"), ({**found, "source": 1}, "[0]")):
        reply = http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": [block]}]})
        assert reply.status_code == 400 and f"messages[0].content{place} is" in reply.json()["error"]["message"]


def test_a_stream_tells_the_same(http):
    fields = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    whole, events = ask(http, **fields), events_of(http, **fields)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == ["message_start", "ping", "content_block_start", *["content_block_delta"] * deltas,
                     "content_block_stop", "message_delta", "message_stop"] and deltas > 3
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") \
        == whole["content"][0]["text"]
    start, end = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert end["delta"]["stop_reason"] == "max_tokens" and end["usage"]["output_tokens"] == 20


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_has_to_be_called(http, choice):
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200, "temperature": 1, "seed": 1}
    found = ask(http, **fields)
    block, = found["content"]
    assert (block["type"], block["name"], found["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert set(block["input"]) == {"city"} and block["id"].startswith("toolu_")
    events = events_of(http, **fields)
    start = next(event for event in events if event["type"] == "content_block_start")["content_block"]
    assert (start["type"], start["name"], start["input"]) == ("tool_use", "weather", {})
    assert events[-2]["delta"]["stop_reason"] == "tool_use"

    def pieces():
        parts = [event["delta"]["partial_json"] for event in events_of(http, **fields)
                 if event["type"] == "content_block_delta"]
        assert json.loads("".join(parts)) == block["input"]
        return len(parts) > 2

    until(pieces, "arguments in pieces", 1)  # on a busy machine several come as one


def test_a_call_beside_text_and_its_result(http):
    found = ask(http, tools=[TOOL], regex=f"Well\\.{CALL}", max_tokens=200)
    text, call = found["content"]
    assert (text, call["input"]) == ({"type": "text", "text": "Well."}, {"city": "Rome"})
    kinds = [(event["index"], event["content_block"]["type"]) for event in events_of(
        http, tools=[TOOL], regex=f"Well\\.{CALL}", max_tokens=200) if event["type"] == "content_block_start"]
    assert kinds == [(0, "text"), (1, "tool_use")]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    after = {"type": "text", "text": "so?"}
    count = http.post("/v1/messages/count_tokens", json={"tools": [TOOL], "messages": [
        *HI, {"role": "assistant", "content": found["content"]}, {"role": "user", "content": [result, after]}]}).json()
    arguments = json.dumps(call["input"])
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    assert count["input_tokens"] == tokens(http, [
        *HI, {"role": "assistant", "content": "Well.", "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "x", "content": "sunny"}, {"role": "user", "content": "so?"}],
        tools=[{"type": "function", "function": function}])


def test_a_strict_tool_has_to_have_a_schema_that_can_be_met(http):
    for strict, status in ((True, 400), (False, 200)):
        odd = {**TOOL, "strict": strict, "input_schema": {"type": "nonsense"}}
        reply = http.post("/v1/messages", json={"messages": HI, "tools": [odd], "max_tokens": 1})
        assert reply.status_code == status and ("nonsense" in reply.text) is strict
    assert ask(http, tools=[{**TOOL, "strict": True}], max_tokens=1)["stop_reason"] == "max_tokens"


def test_an_answer_that_is_begun_goes_on(http, model):
    begun = [*HI, {"role": "assistant", "content": "The sky"}]
    prompt = http.post("/apply-template", json={"messages": HI}).json()["prompt"] + "The sky"
    expected = model.generate(model.tokenizer.encode(prompt), max_tokens=9, temperature=0)
    assert ask(http, messages=begun, max_tokens=9)["content"][0]["text"] == expected.text
    refused = http.post("/v1/messages", json={"messages": begun, "max_tokens": 9, "tools": [TOOL],
                                              "tool_choice": {"type": "any"}})
    assert refused.status_code == 400


def test_thinking_is_a_block(http):
    fields = {"regex": "<think>hm\nwell</think>\n\nyes", "max_tokens": 60}
    found = ask(http, **fields)
    assert found["content"] == [{"type": "thinking", "thinking": "hm\nwell", "signature": ""},
                                {"type": "text", "text": "yes"}]
    deltas = [event["delta"] for event in events_of(http, **fields) if event["type"] == "content_block_delta"]
    assert "".join(delta["thinking"] for delta in deltas if delta["type"] == "thinking_delta") == "hm\nwell"
    assert [delta["text"] for delta in deltas if delta["type"] == "text_delta"] == list("yes")
    again = http.post("/v1/messages", json={"max_tokens": 2, "messages": [
        *HI, {"role": "assistant", "content": found["content"]}, {"role": "user", "content": "so"}]})
    assert again.status_code == 200
    count = {kind: http.post("/v1/messages/count_tokens", json={"messages": HI, "thinking": {"type": kind}}).json()
             for kind in ("enabled", "disabled")}
    assert count["enabled"]["input_tokens"] > count["disabled"]["input_tokens"]  # the template writes <think>


def test_structured_output(http):
    form = {"type": "json_schema", "schema": TOOL["input_schema"]}
    for field in ({"output_config": {"format": form}}, {"output_format": form}):
        found = ask(http, temperature=1, seed=4, max_tokens=100, **field)
        assert set(json.loads(found["content"][0]["text"])) == {"city"}


def test_what_has_no_effect_is_told(http):
    body = {"messages": HI, "max_tokens": 1, "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "me"},
            "output_config": {"effort": "high"}, "context_management": {"edits": []}, "speed": "fast"}
    reply = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-numflow-ignored"].split(", ")) == {
        "tools[1]", "thinking.budget_tokens", "reasoning_effort", "context_management", "speed"}
    reply = http.post("/v1/messages", json=body | {"tool_choice": {"type": "tool", "name": "web_search"}})
    assert reply.status_code == 400


@pytest.mark.parametrize("change, param", [
    ({"max_tokens": None}, "max_tokens"), ({"messages": []}, "messages"), ({"messages": None}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
     "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [1]}]}]},
     "messages[0].content[0].content"),
    ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
     "messages[1].content[0]"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"), ({"container": "x"}, "container"),
    ({"response_schema": {"a": 1}}, "response_schema"), ({"model": "encoder"}, "model")])
def test_mistakes_are_told_in_anthropics_shape(http, change, param):
    body = {"messages": HI, "max_tokens": 5, **change}
    reply = http.post("/v1/messages", json={name: value for name, value in body.items() if value is not None})
    found = reply.json()
    assert reply.status_code == 400 and found["type"] == "error", found
    assert found["error"]["type"] == "invalid_request_error" and found["error"]["param"] == param, found


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_keys_as_anthropics_clients_send_them():
    ready = Service(make_config({"service": {"api_keys": ["sk-1", "sk-2"]}, "models": {"a": {"path": "nowhere"}}}))
    ready.pool.ready = True
    app = make_app(ready)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080") as http:
        for key, status in (("sk-2", 200), ("sk-3", 401), ("", 401)):
            assert (await http.get("/v1/models", headers={"x-api-key": key})).status_code == status
        both = {"x-api-key": "sk-1", "Authorization": "Bearer sk-3"}
        assert (await http.get("/v1/models", headers=both)).status_code == 401
        refused = await http.post("/v1/messages", json={})
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["type"] == "error"
