"""OpenAI's Responses with its own client: items, events, tools, thinking, structured output, stored responses."""

import json

import pytest

from numflow.server.service.store import ResponseStore, StoredResponse
from tests.server.test_openai_client import WEATHER
from tests.waiting import until

openai = pytest.importorskip("openai")

TOOL = {"type": "function", **WEATHER["function"]}
CUSTOM = {"type": "custom", "name": "shell", "description": "Runs a command."}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 5}, "good": {"type": "boolean"}},
          "required": ["word", "good"], "additionalProperties": False}
CALL = r'<tool_call>\{"name": "weather", "arguments": \{"city": "Rome", "days": 1\}\}</tool_call>'


def ask(client, **fields):
    return client.responses.create(**{"model": "org/chat", "input": "hi", "temperature": 0, "max_output_tokens": 20,
                                      **fields})


def events_of(http, **fields):
    """(name, value) of each event of a stream."""
    reply = http.post("/v1/responses", json={"input": "hi", "temperature": 0, "max_output_tokens": 20, "stream": True,
                                             **fields})
    assert reply.status_code == 200, reply.text
    blocks = [block.split("\n") for block in reply.text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_a_text(openai_client, model):
    reply = ask(openai_client)
    expected = model.generate([{"role": "user", "content": "hi"}], max_tokens=20, temperature=0)
    assert reply.output_text == expected.text and reply.model == "org/chat" and reply.object == "response"
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    message, = reply.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert reply.usage.output_tokens == 20 and reply.usage.input_tokens == expected.stats["prompt_tokens"]
    done = ask(openai_client, extra_body={"regex": "yes"})
    assert (done.output_text, done.status, done.incomplete_details) == ("yes", "completed", None)


@pytest.mark.parametrize("items", [
    [{"role": "user", "content": "hi"}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "h"},
                                                     {"type": "input_text", "text": "i"}]}]])
def test_items_are_messages(openai_client, items):
    assert ask(openai_client, input=items).output_text == ask(openai_client).output_text


def test_instructions_come_first_and_are_one_with_other_system_messages(http):
    def count(**body):
        return http.post("/v1/responses/input_tokens", json=body).json()["input_tokens"]

    told = [{"role": "developer", "content": "B"}, {"role": "user", "content": "hi"}]
    chat = http.post("/tokenize", json={"messages": [{"role": "system", "content": "A\n\nB"}, told[1]]}).json()
    assert count(input=told, instructions="A") == chat["count"]
    assert count(input="hi") == http.post("/tokenize", json={"messages": told[1:]}).json()["count"]


def test_a_stream_tells_the_same(openai_client):
    options = {"temperature": 0.9, "top_p": 0.9, "extra_body": {"seed": 5}}
    whole = ask(openai_client, **options)
    events = list(ask(openai_client, **options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == ["created", "in_progress", "output_item.added", "content_part.added",
                     *["output_text.delta"] * deltas, "output_text.done", "content_part.done", "output_item.done",
                     "incomplete"] and deltas > 3
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[-1].response.output[0].id}
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_clients_own_way_of_streaming(openai_client):
    with openai_client.responses.stream(model="org/chat", input="hi", max_output_tokens=20, temperature=0,
                                        extra_body={"regex": "<think>hm</think>yes"}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "yes" and "response.reasoning_text.delta" in kinds


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"},
                                    {"type": "allowed_tools", "mode": "required",
                                     "tools": [{"type": "function", "name": "weather"}]}])
def test_a_tool_has_to_be_called(openai_client, http, choice):
    fields = {"tools": [TOOL], "tool_choice": choice,
              "max_output_tokens": 200, "temperature": 1}
    call, = ask(openai_client, **fields, extra_body={"seed": 1}).output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert set(json.loads(call.arguments)) == {"city", "days"} and call.call_id.startswith("call_")
    events = events_of(http, **fields, seed=1)
    kinds = [name.removeprefix("response.") for name, _ in events]
    deltas = [event["delta"] for name, event in events if name.endswith("arguments.delta")]
    assert kinds == ["created", "in_progress", "output_item.added", *["function_call_arguments.delta"] * len(deltas),
                     "function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(deltas) == call.arguments
    assert events[2][1]["item"]["arguments"] == "" and events[-3][1]["arguments"] == call.arguments
    until(lambda: sum(name.endswith("arguments.delta") for name, _ in events_of(http, **fields, seed=1)) > 3,
          "arguments in pieces", 1)  # on a busy machine several come as one


def test_a_conversation_with_a_tool(openai_client, http):
    first = ask(openai_client, tools=[TOOL], max_output_tokens=200, extra_body={"regex": f"Well\\.{CALL}"})
    message, call = first.output
    assert (message.content[0].text, call.name) == ("Well.", "weather") and first.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    kept = ask(openai_client, tools=[TOOL], previous_response_id=first.id, input=[result])
    whole = ask(openai_client, tools=[TOOL], store=False, input=[
        {"role": "user", "content": "hi"}, *[item.model_dump(exclude_none=True) for item in first.output], result])
    assert kept.output_text == whole.output_text and kept.usage.input_tokens == whole.usage.input_tokens
    prompt = http.post("/tokenize", json={"tools": [WEATHER], "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well.", "tool_calls": [
            {"id": call.call_id, "type": "function", "function": {"name": "weather", "arguments": call.arguments}}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}]}).json()
    assert kept.usage.input_tokens == prompt["count"] and kept.previous_response_id == first.id


def test_tools_that_take_text_and_tools_in_a_namespace(openai_client):
    said = r'<tool_call>\{"name": "shell", "arguments": \{"input": "ls"\}\}</tool_call>'
    call, = ask(openai_client, tools=[CUSTOM], max_output_tokens=200, extra_body={"regex": said}).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "shell", "ls")
    space = {"type": "namespace", "name": "sky", "tools": [TOOL]}
    call, = ask(openai_client, tools=[space], max_output_tokens=200, extra_body={
        "regex": CALL.replace("weather", r"sky\.weather")}).output
    assert (call.type, call.name, call.namespace) == ("function_call", "weather", "sky")


def test_tools_of_openais_own_are_left_out_and_told(http):
    body = {"input": "hi", "max_output_tokens": 2, "tools": [{"type": "web_search"}, TOOL]}
    reply = http.post("/v1/responses", json=body)
    assert reply.status_code == 200 and reply.headers["x-numflow-ignored"] == "tools[0]"
    for choice in ({"type": "web_search"}, {"type": "function", "name": "other"}):
        refused = http.post("/v1/responses", json=body | {"tool_choice": choice})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"


def test_thinking_is_an_item(openai_client, http):
    fields = {"max_output_tokens": 60, "extra_body": {"regex": "<think>hm\nwell</think>\n\nyes"}}
    reply = ask(openai_client, **fields)
    thinking, message = reply.output
    assert (thinking.type, thinking.content[0].text, thinking.summary) == ("reasoning", "hm\nwell", [])
    assert message.content[0].text == "yes" == reply.output_text
    assert 0 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens
    again = ask(openai_client, input=[{"role": "user", "content": "hi"}, *reply.output, {
        "role": "user", "content": "so"}])
    assert again.status == "incomplete"
    kinds = [name.removeprefix("response.") for name, _ in events_of(
        http, max_output_tokens=60, **fields["extra_body"])]
    assert kinds[2:4] == ["output_item.added", "content_part.added"] and "reasoning_text.done" in kinds
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")


def test_structured_output(openai_client):
    pydantic = pytest.importorskip("pydantic")

    class Thing(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        word: str = pydantic.Field(max_length=5)
        good: bool

    reply = ask(openai_client, temperature=1, max_output_tokens=120, extra_body={"seed": 4}, text={
        "format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}})
    found = json.loads(reply.output_text)
    assert set(found) == {"word", "good"} and reply.text.format.schema_ == SCHEMA
    parsed = openai_client.responses.parse(model="org/chat", input="hi", text_format=Thing, temperature=1,
                                           max_output_tokens=120, extra_body={"seed": 4})
    assert isinstance(parsed.output_parsed, Thing)
    assert ask(openai_client, text={"format": {"type": "json_object"}}).output_text.startswith("{")


def test_log_probabilities(openai_client):
    reply = ask(openai_client, max_output_tokens=5, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = reply.output[0].content[0].logprobs
    assert len(entries) == 5 and all(len(entry.top_logprobs) == 2 for entry in entries)
    events = list(ask(openai_client, max_output_tokens=5, top_logprobs=2, stream=True))
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in entries]


def test_answers_are_kept(openai_client, http):
    reply = ask(openai_client)
    found = openai_client.responses.retrieve(reply.id)
    assert found.output_text == reply.output_text and found.store is True
    items = openai_client.responses.input_items.list(reply.id).data
    assert [(item.type, item.content[0].text) for item in items] == [("message", "hi")]
    later = ask(openai_client, input="and?", previous_response_id=reply.id)
    texts = [item.content[0].text for item in openai_client.responses.input_items.list(later.id, order="asc")]
    assert texts == ["hi", reply.output_text, "and?"]
    page = http.get(f"/v1/responses/{later.id}/input_items?limit=2&order=asc").json()
    assert page["has_more"] and len(page["data"]) == 2
    rest = http.get(f"/v1/responses/{later.id}/input_items?order=asc&after={page['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["and?"] and not rest["has_more"]
    openai_client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        openai_client.responses.retrieve(reply.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, previous_response_id=reply.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"
    assert openai_client.responses.retrieve(later.id).id == later.id  # a later response stays
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert http.get(f"/v1/responses/{later.id}/input_items?{query}").status_code == 400


def test_references_stand_for_items_of_stored_responses(openai_client):
    first = ask(openai_client)
    kept = ask(openai_client, previous_response_id=first.id, input="and?")
    hi, more = {"role": "user", "content": "hi"}, {"role": "user", "content": "and?"}
    for reference in ({"type": "item_reference", "id": first.output[0].id}, {"id": first.output[0].id}):
        reply = ask(openai_client, input=[hi, reference, more])
        assert reply.output_text == kept.output_text and reply.usage.input_tokens == kept.usage.input_tokens
    openai_client.responses.delete(reply.id)
    openai_client.responses.delete(kept.id)
    openai_client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="which is not stored") as caught:
        ask(openai_client, input=[hi, {"type": "item_reference", "id": first.output[0].id}, more])
    assert caught.value.code == "item_not_found" and caught.value.param == "input[1].id"


def test_what_is_not_to_be_stored_is_not(openai_client):
    reply = ask(openai_client, store=False)
    assert reply.store is False
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(reply.id)


def test_the_store_has_bounds_and_owners():
    def one(id, size=10):
        return StoredResponse({"id": id, "output": [{"id": f"{id}1"}]}, ({"id": "0"},), size)

    store = ResponseStore(2, 25)
    store.put("a", one("x"))
    store.put("a", one("y"))
    assert store.get("b", "x") is None and not store.delete("b", "x")
    assert [item["id"] for item in store.get("a", "x").items] == ["0", "x1"]
    assert store.item("a", "x1") == {"id": "x1"} and store.item("b", "x1") is None and store.item("a", "?") is None
    store.put("a", one("z"))  # y is the least recently used
    assert store.get("a", "y") is None and store.get("a", "x") and store.get("a", "z")
    store.put("a", one("w", 20))
    assert store.get("a", "w") and store.get("a", "x") is None and store.get("a", "z") is None
    assert store.item("a", "w1") and store.item("a", "x1") is None and store.item("a", "0")
    store.put("a", one("v", 26))  # more than the whole store may hold
    assert [store.get("a", id) for id in "vw"] == [None, None] and not store.delete("a", "v")
    assert store.item("a", "0") is None
    assert not ResponseStore(0, 100).keeps


@pytest.mark.parametrize("body, param", [
    ({}, "input"), ({"input": []}, "input"), ({"input": [{"content": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "[1]"}]}, None),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": "x", "background": True}, "background"), ({"input": "x", "conversation": "c"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"), ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"), ({"input": "x", "tools": [TOOL, TOOL]},
                                                                         "tools[1].name"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"), ({"input": "x", "grammr": 1, "schema": {"a": 1}},
                                                                 "schema"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, None),
    ({"input": "x", "text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"input": "x", "model": "encoder"}, "model"), ({"input": "x" * 600, "model": "org/chat"}, "messages")])
def test_mistakes_are_told(http, body, param):
    reply = http.post("/v1/responses", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and (param is None or error["param"] == param), error
    assert set(error) == {"message", "type", "param", "code"}


def test_numbers_that_json_cannot_hold_are_refused(http):
    for number in ("NaN", "1e999"):
        reply = http.post("/v1/responses", content=f'{{"input": "x", "metadata": {{"a": {number}}}}}')
        assert reply.status_code == 400, reply.text


def test_fields_without_effect_are_told(http):
    reply = http.post("/v1/responses", json={
        "input": "x", "max_output_tokens": 1, "reasoning": {"effort": "low", "summary": "auto"}, "max_tool_calls": 2,
        "text": {"verbosity": "low"}, "truncation": "auto", "include": ["reasoning.encrypted_content"], "n": 2})
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-numflow-ignored"].split(", ")) == {
        "reasoning.summary", "reasoning_effort", "max_tool_calls", "text.verbosity", "n",
        "include.reasoning.encrypted_content"}
