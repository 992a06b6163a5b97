"""OpenAI's client: chat."""

import json

import openai
from checks import ASKED, KEY, MODEL, PLACE, QUESTION, TOLD, URL, WEATHER, is_call, is_place, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=300)
chat = client.chat.completions
MORE = {"model": MODEL, "max_tokens": 60, "seed": 1}


def conversation():
    messages = [{"role": "user", "content": QUESTION}]
    first = chat.create(messages=messages, **MORE).choices[0].message
    assert first.content
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And goodbye."}]
    assert chat.create(messages=messages, **MORE).choices[0].message.content


def stream():
    messages = [{"role": "user", "content": QUESTION}]
    whole = chat.create(messages=messages, temperature=0, **MORE).choices[0].message.content
    parts = [part.choices[0].delta.content or "" for part in chat.create(
        messages=messages, temperature=0, stream=True, **MORE) if part.choices]
    assert len(parts) > 2 and "".join(parts) == whole


def tool():
    tools, messages = [{"type": "function", "function": WEATHER}], [{"role": "user", "content": ASKED}]
    message = chat.create(messages=messages, tools=tools, tool_choice="required", **MORE).choices[0].message
    call = message.tool_calls[0]
    is_call(call.function.name, call.function.arguments)
    for _ in range(20):  # on a busy machine several pieces come as one
        deltas = [delta.function.arguments for part in chat.create(
            messages=messages, tools=tools, tool_choice="required", stream=True, **MORE) if part.choices
            for delta in part.choices[0].delta.tool_calls or []]
        assert "".join(deltas) == call.function.arguments
        if len(deltas) > 3:
            break
    assert len(deltas) > 3
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": TOLD}]
    assert chat.create(messages=messages, tools=tools, tool_choice="none", **MORE).choices[0].message.content


def structured():
    shape = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": PLACE}}
    is_place(json.loads(chat.create(messages=[{"role": "user", "content": "Name a city."}], response_format=shape,
                                    **MORE).choices[0].message.content))


tell(openai.__version__, conversation=conversation, stream=stream, tool_call_with_result=tool,
     structured_answer=structured)
