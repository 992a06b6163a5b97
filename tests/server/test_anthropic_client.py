"""Anthropic's own client against a real service."""

import pytest

from tests.server.test_messages import CALL, HI, TOOL

anthropic = pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="sk-x", max_retries=0, timeout=60) as made:
        yield made


def test_a_conversation(client):
    found = client.messages.create(model="org/chat", max_tokens=8, messages=HI, system="Be brief.")
    assert found.content[0].type == "text" and found.stop_reason == "max_tokens" and found.usage.output_tokens == 8
    assert client.messages.count_tokens(model="org/chat", messages=HI, system="Be brief.").input_tokens == \
        found.usage.input_tokens + found.usage.cache_read_input_tokens


def test_a_stream(client):
    with client.messages.stream(model="org/chat", max_tokens=60, messages=HI, extra_body={
            "regex": "<think>hm</think>yes", "temperature": 0}) as stream:
        assert "".join(stream.text_stream) == "yes"
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"] and final.stop_reason == "end_turn"
    assert final.content[0].thinking == "hm" and final.usage.output_tokens > 3


def test_a_tool_and_its_result(client):
    with client.messages.stream(model="org/chat", max_tokens=200, messages=HI, tools=[TOOL],
                                extra_body={"regex": CALL, "temperature": 0}) as stream:
        call = stream.get_final_message()
    block, = call.content
    assert (block.type, block.name, block.input, call.stop_reason) == (
        "tool_use", "weather", {"city": "Rome"}, "tool_use")
    after = client.messages.create(model="org/chat", max_tokens=2, tools=[TOOL], messages=[
        *HI, {"role": "assistant", "content": call.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]}])
    assert after.stop_reason == "max_tokens"


def test_errors_are_those_that_the_client_knows(client):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="org/chat", max_tokens=0, messages=HI)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=1, messages=HI)
