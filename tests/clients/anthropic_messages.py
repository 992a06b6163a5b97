"""Anthropic's client."""

import json

import anthropic
from checks import ASKED, KEY, MODEL, PLACE, QUESTION, TOLD, URL, WEATHER, is_call, is_place, tell

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
MORE = {"model": MODEL, "max_tokens": 60}


def conversation():
    messages = [{"role": "user", "content": QUESTION}]
    first = client.messages.create(messages=messages, **MORE)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And goodbye."}]
    assert client.messages.create(messages=messages, **MORE).content[0].text


def stream():
    with client.messages.stream(messages=[{"role": "user", "content": QUESTION}], **MORE) as events:
        parts = list(events.text_stream)
        assert "".join(parts) == events.get_final_message().content[0].text and len(parts) > 2


def tool():
    tools = [{"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}]
    messages = [{"role": "user", "content": ASKED}]
    first = client.messages.create(messages=messages, tools=tools, tool_choice={"type": "any"}, **MORE)
    call = next(block for block in first.content if block.type == "tool_use")
    is_call(call.name, call.input)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": TOLD}]}]
    assert client.messages.create(messages=messages, tools=tools, tool_choice={"type": "none"}, **MORE).content[0].text


def structured():
    form = {"format": {"type": "json_schema", "schema": PLACE}}
    found = client.messages.create(messages=[{"role": "user", "content": "Name a city."}],
                                   extra_body={"output_config": form}, **MORE)
    is_place(json.loads(found.content[0].text))


tell(anthropic.__version__, conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
